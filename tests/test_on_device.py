"""Every implementation of ours that serves this machine's accelerator, over the whole list of cases: `pytest --device`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import differentiable, in_float64, of_case, unfused, value_and_gradients
from test_implementations import check
from tolerance import assert_as_exact_as_unfused

from flash_jax import api, dispatch, explain, flash_attention

pytestmark = pytest.mark.device


def kernels():
    """Names of our kernels for this machine, or `xla` where there are none."""
    device = dispatch.current_device()
    full = api.prepare(*(np.zeros((1, 8, 1, 64), np.float16) for _ in range(3))).problem
    return [b.name for b in dispatch.BACKENDS if b.whole is None and b.name != "xla" and b.why_not(full, device) is None] or ["xla"]


@functools.cache
def in_dtype(case, dtype):
    return dataclasses.replace(case, dtype=dtype)


USUAL = CASES[0].head_dim
# Wider heads have configurations of their own: the whole list with each, in one dtype.
SIZES = [*((dtype, USUAL) for dtype in ("bfloat16", "float16", "float32")), ("bfloat16", 128), ("bfloat16", 256)]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "case"),
    [
        pytest.param(*size, case, id=f"{size[0]}-{case.name}-{size[1]}")
        for size in SIZES
        for case in CASES
        if case.head_dim == USUAL or size[1] == USUAL
    ],
)
def test_kernel(dtype, head_dim, case, record_property):
    if case.head_dim == USUAL:
        case = dataclasses.replace(case, head_dim=head_dim)
    case = in_dtype(case, dtype)
    for name in kernels():
        arguments, _, _ = case.build()
        attention = functools.partial(flash_attention, implementation=name, return_residual=True)
        reason = next(b for b in dispatch.BACKENDS if b.name == name).why_not(api.prepare(**arguments).problem, dispatch.current_device())
        if reason is None:
            record_property(name, str(explain(**arguments, implementation=name).config))
            check(case, attention)
        else:
            with pytest.raises(NotImplementedError, match="cannot serve this call"):
                attention(**arguments)


CUDNN = ("full", "causal", "causal_more_rows", "window_left", "gqa", "mqa", "head_dim_72", "no_batch_axis")


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN is for NVIDIA GPUs")
@pytest.mark.parametrize("case", [c for c in CASES if c.name in CUDNN], ids=lambda case: case.name)
def test_cudnn(case):
    """It gives no lse, and so takes no cotangent of one; it takes even lengths."""
    case = dataclasses.replace(case, q_len=case.q_len // 2 * 2, kv_len=case.kv_len // 2 * 2)
    arguments, dout, dlse = in_dtype(case, "bfloat16").build()
    attention = lambda **a: (flash_attention(**a, implementation="cudnn"), jnp.zeros(dlse.shape))
    got, plain, expected = (f(arguments, dout, 0 * dlse) for f in (functools.partial(value_and_gradients, attention), unfused, in_float64))
    for name in got.keys() - {"lse"}:
        assert_as_exact_as_unfused(name, got[name], plain[name], expected[name], jnp.bfloat16)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("causal", "gqa", "packed")], ids=lambda case: case.name)
def test_forward_repeats_bitwise(case):
    for name in kernels():
        arguments, dout, dlse, _, _ = of_case(in_dtype(case, "bfloat16"))
        attention = functools.partial(flash_attention, implementation=name, return_residual=True)
        first = value_and_gradients(attention, arguments, dout, dlse)
        for _ in range(5):
            again = value_and_gradients(attention, arguments, dout, dlse)
            for part in ("out", "lse", "dkey", "dvalue"):
                np.testing.assert_array_equal(again[part], first[part])


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("causal", "gqa", "packed", "bias_shared_batch_hides")], ids=lambda case: case.name
)
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_deterministic_gradients_repeat_bitwise(case, head_dim):
    for name in kernels():
        arguments, dout, dlse, _, _ = of_case(dataclasses.replace(in_dtype(case, "bfloat16"), head_dim=head_dim))
        attention = functools.partial(flash_attention, implementation=name, return_residual=True, deterministic_backward=True)

        @jax.jit
        def gradients(arrays, dout, dlse, arguments=arguments, attention=attention):
            (out, lse), pullback = jax.vjp(lambda arrays: attention(**arguments | arrays), arrays)
            return pullback((dout.astype(out.dtype), dlse.astype(lse.dtype)))

        arrays = {n: arguments[n] for n in differentiable(arguments)}
        first = jax.device_get(gradients(arrays, dout, dlse))
        for _ in range(19):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(gradients(arrays, dout, dlse)), first)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="this machine has one device")
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("name", ["gqa", "packed", "bias_shared_batch_hides", "everything"])
def test_two_devices_divide_the_work(name, spec):
    divided = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), spec)
    for implementation in kernels():
        found = []

        def attention(found=found, implementation=implementation, **arguments):
            arguments |= {n: jax.lax.with_sharding_constraint(arguments[n], divided) for n in ("query", "key", "value")}
            out, lse = flash_attention(**arguments, implementation=implementation, return_residual=True)
            jax.debug.inspect_array_sharding(out, callback=found.append)
            return out, lse

        check(in_dtype(BY_NAME[name], "bfloat16"), attention)
        assert found
        assert all(sharding.is_equivalent_to(divided, 4) for sharding in found)
