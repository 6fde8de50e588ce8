"""What the right answer is: `flash_jax.reference` under the signature of `flash_attention`, in float64 for the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import api, reference

DIFFERENTIABLE = ("query", "key", "value", "bias", "scale", "sinks")


def reference_attention(**arguments):
    """`(out, lse)` of the dense definition."""
    request = api.prepare(**arguments)
    out, lse = reference.attention(request.problem, request.operands)
    if request.sinks is not None:
        out, lse = api._with_sinks(out, lse, request.sinks)
    return out.reshape(*request.batch, *out.shape[1:]), lse.reshape(*request.batch, *lse.shape[1:])


def differentiable(arguments) -> tuple[str, ...]:
    return tuple(n for n in DIFFERENTIABLE if isinstance(arguments.get(n), (jax.Array, np.ndarray)))


def value_and_gradients(attention, arguments, dout, dlse, *, jit=True):
    """`{"out", "lse", "d<name>": ...}` as NumPy, for the cotangents of out and lse."""
    names = differentiable(arguments)
    fixed = {n: x for n, x in arguments.items() if n not in names}

    def run(arrays, dout, dlse):
        (out, lse), pullback = jax.vjp(lambda a: attention(**fixed, **a), arrays)
        (gradients,) = pullback((dout.astype(out.dtype), dlse.astype(lse.dtype)))
        assert {n: g.dtype for n, g in gradients.items()} == {n: x.dtype for n, x in arrays.items()}
        return {"out": out, "lse": lse} | {f"d{n}": g for n, g in gradients.items()}

    arrays = {n: arguments[n] for n in names}
    results = (jax.jit(run) if jit else run)(arrays, dout, dlse)
    return {n: np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x) for n, x in results.items()}


def _to_float64(x):
    return x.astype(jnp.float64) if isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating) else x


def in_float64(arguments, dout, dlse):
    """The oracle's `value_and_gradients`."""
    with jax.enable_x64(True):
        arguments, dout, dlse = jax.tree.map(_to_float64, (arguments, dout, dlse))
        return value_and_gradients(reference_attention, arguments, dout, dlse)


def unfused(arguments, dout, dlse):
    """The dense definition in the case's own dtype: what the tolerance is measured by."""
    return value_and_gradients(reference_attention, arguments, dout, dlse)


@functools.cache
def of_case(case):
    """`(arguments, dout, dlse, unfused, expected)` of a case, computed once a process."""
    arguments, dout, dlse = case.build()
    return arguments, dout, dlse, unfused(arguments, dout, dlse), in_float64(arguments, dout, dlse)
