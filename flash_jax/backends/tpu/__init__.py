"""TPU (v4, v5e, v5p, v6e, 7x): Pallas kernels for Mosaic.

A grid step owns one q tile of one head and walks over the tiles of the keys that VMEM holds. Which tiles it visits comes from the
static rule by arithmetic in the kernel, so a skipped tile costs nothing, or from a table of kinds in scalar memory where the mask
depends on data. The mask is evaluated in partial tiles only. Forward and backward have the same loops and the same schedule.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from flash_jax.backends.base import Backend, Device
from flash_jax.backends.tpu import backward as _backward
from flash_jax.backends.tpu import forward as _forward
from flash_jax.backends.tpu.config import KNOWN_KINDS, LANES, Config, Tiles, default_config
from flash_jax.problem import Operands, Problem

__all__ = ["BACKEND", "Config", "Tiles"]

Array = jax.Array

# What Mosaic computes elementwise on a tile; the inner functions of `jit` are looked into.
_ELEMENTWISE = frozenset(
    """add sub mul neg abs sign max min eq ne lt le gt ge and or xor not select_n convert_element_type clamp rem div shift_left
    shift_right_logical shift_right_arithmetic integer_pow exp log tanh sqrt floor ceil round""".split()  # noqa: SIM905
)
_WORDS = ("int32", "uint32", "float32", "bool")


def why_not(problem: Problem, device: Device) -> str | None:
    """See `base.Backend.why_not`."""
    if device.platform != "tpu":
        return f"device: the kernels are for TPUs, got {device.platform}."
    if device.kind not in KNOWN_KINDS:
        return f"device: kernels exist for {', '.join(KNOWN_KINDS)}, got {device.kind!r}."
    if problem.dtype == np.float64:
        return "query: dtype float64 has no TPU arithmetic; float32, bfloat16 and float16 work."
    if problem.block_sizes and any(n < LANES or n % LANES for n in problem.block_sizes):
        return f"block_sizes: tiles are multiples of {LANES} rows and keys, got {problem.block_sizes}."
    for function in problem.mask.functions:
        reason = _why_not_function(function)
        if reason:
            return reason
    return None


def _why_not_function(function) -> str | None:
    if "captured" in function.kinds:
        return "mask: the function closes over an array, which a kernel cannot index; pass it to Mask.from_function as an operand."
    for variable in function.jaxpr.invars[4:]:
        if str(variable.aval.dtype) not in _WORDS:
            return f"mask: operands of the function must be {', '.join(_WORDS)} here, got {variable.aval.dtype}."
    names = _primitives(function.jaxpr) - _ELEMENTWISE
    return f"mask: the function uses {', '.join(sorted(names))}, which is not elementwise arithmetic." if names else None


def _primitives(jaxpr) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        inner = [x.jaxpr for x in equation.params.values() if isinstance(x, ClosedJaxpr)]
        names |= set().union(*map(_primitives, inner)) if inner else {equation.primitive.name}
    return names


def _in_kernel_dtypes(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """float16, which the cores lack, as float32."""
    if problem.dtype != np.float16:
        return problem, operands
    wide = lambda x: x.astype(jnp.float32)
    operands = operands._replace(query=wide(operands.query), key=wide(operands.key), value=wide(operands.value))
    return dataclasses.replace(problem, dtype=np.dtype(np.float32)), operands


def forward(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `base.Backend.forward`."""
    inner, operands = _in_kernel_dtypes(problem, operands)
    out, lse = _forward.forward(inner, config.forward, config.vmem, operands)
    return out.astype(problem.dtype), lse


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    inner, wide = _in_kernel_dtypes(problem, operands)
    gradients = _backward.backward(inner, config, wide, out, lse, dout.astype(inner.dtype), dlse, wanted)
    return {name: x.astype(getattr(operands, name).dtype) for name, x in gradients.items()}


BACKEND = Backend("tpu", why_not, default_config, forward, backward)
