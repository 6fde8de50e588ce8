"""TPU (v4, v5e, v5p, v6e, 7x): Pallas kernels for Mosaic.

A grid step owns one q tile of one head and walks over the tiles of the keys that VMEM holds. Which tiles it visits comes from the
static rule by arithmetic in the kernel, so a skipped tile costs nothing, or from a table of kinds in scalar memory where the mask
depends on data. The mask is evaluated in partial tiles only. Forward and backward have the same loops and the same schedule.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.backends import functions
from flash_jax.backends.base import Backend, Device, by_one_rule
from flash_jax.backends.tpu import backward as _backward
from flash_jax.backends.tpu import forward as _forward
from flash_jax.backends.tpu.config import KNOWN_KINDS, LANES, Config, Tiles, default_config
from flash_jax.problem import Operands, Problem

__all__ = ["BACKEND", "Config", "Tiles"]

Array = jax.Array


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
        reason = functions.why_not(function)
        if reason:
            return reason
    return None


def _in_kernel(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """What the kernels get: mask functions that are arithmetic, and float16, which the cores lack, as float32."""
    problem, operands = functions.hoist(problem, operands)
    if problem.dtype != np.float16:
        return problem, operands
    wide = lambda x: x.astype(jnp.float32)
    operands = operands._replace(query=wide(operands.query), key=wide(operands.key), value=wide(operands.value))
    return dataclasses.replace(problem, dtype=np.dtype(np.float32)), operands


def _is_empty(problem: Problem) -> bool:
    return 0 in (problem.batch, problem.q_len, problem.kv_len)


def forward(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `base.Backend.forward`."""
    if _is_empty(problem):
        return jnp.zeros(problem.out_shape, problem.dtype), jnp.full(problem.lse_shape, -jnp.inf, problem.compute_dtype)
    inner, operands = _in_kernel(problem, operands)
    out, lse = _forward.forward(inner, config.forward, config.vmem, operands)
    return out.astype(problem.dtype), lse


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    if _is_empty(problem):
        return {name: jnp.zeros_like(getattr(operands, name)) for name in wanted}
    inner, wide = _in_kernel(problem, operands)
    gradients = _backward.backward(inner, config, wide, out, lse, dout.astype(inner.dtype), dlse, wanted)
    return {name: x.astype(getattr(operands, name).dtype) for name, x in gradients.items()}


BACKEND = Backend("tpu", why_not, by_one_rule(default_config), forward, backward)
