"""NVIDIA Hopper (H100, H200): Pallas kernels for Mosaic GPU, forward and backward.

Mosaic is imported when a call first asks for these kernels, so that other machines do not pay for it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from flash_jax.backends.base import Backend, Device
from flash_jax.problem import Operands, Problem

__all__ = ["BACKEND", "is_hopper"]

Array = jax.Array

_CARDS = ("H100", "H200", "H800", "H20", "GH200")
_MISCOMPILING_CUDA = (12080, 12091)  # from, below: ptxas of these runtimes miscompiles the masked loop


def is_hopper(device: Device) -> bool:
    """Whether the kernels are for this card."""
    return device.platform == "gpu" and any(card in device.kind.split() for card in _CARDS)


def why_not(problem: Problem, device: Device) -> str | None:
    """See `base.Backend.why_not`."""
    if not is_hopper(device):
        return f"device: the kernels are for NVIDIA Hopper cards ({', '.join(_CARDS)}), got {device.kind} ({device.platform})."
    from flash_jax.backends.hopper import backward, launch

    return launch.declines(problem) or backward.declines(problem) or _why_not_cuda(problem)


def _why_not_cuda(problem: Problem) -> str | None:
    from jax._src.lib import cuda_versions  # None without the CUDA plugin, as when compiling ahead of time

    if cuda_versions is None or (problem.mask.hides_nothing and problem.kv_len % 128 == 0):  # else the last key tile is masked
        return None
    version = cuda_versions.cuda_runtime_get_version()
    if _MISCOMPILING_CUDA[0] <= version < _MISCOMPILING_CUDA[1]:
        return f"CUDA runtimes 12.8.0 to 12.9.0 miscompile masked loops, got {version}; install 12.9.1 or later."
    return None


def default_config(problem: Problem, device: Device) -> tuple[Any, str]:
    """See `launch.default_config`."""
    from flash_jax.backends.hopper import launch

    return launch.default_config(problem, device)


def _forward(problem: Problem, config: Any, operands: Operands) -> tuple[Array, Array]:
    from flash_jax.backends.hopper import launch

    # The barrier: where a scan over layers stacks `out`, XLA of JAX 0.11 moves a copy of the kernel into the update, and so runs it twice.
    return jax.lax.optimization_barrier(launch.out_and_lse(problem, config, operands))


def _backward(
    problem: Problem, config: Any, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    from flash_jax.backends.hopper import backward

    del config
    bias = operands.bias
    if bias is not None and bias.dtype == np.float64:
        problem = dataclasses.replace(problem, bias_dtype=np.dtype(np.float32))
        operands = operands._replace(bias=bias.astype(np.float32))
    with jax.enable_x64(False):  # Mosaic's indices are of 32 bits, whatever a Python integer becomes
        gradients = backward.backward(problem, operands, out, lse, dout, dlse, wanted)
    return gradients if bias is None or "bias" not in gradients else gradients | {"bias": gradients["bias"].astype(bias.dtype)}


BACKEND = Backend("hopper", why_not, default_config, _forward, _backward, is_partitioned=True)
