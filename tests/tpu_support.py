"""The TPU kernels on a CPU: Pallas interprets them; tiles small enough that the cases have several."""

import contextlib

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from flash_jax import api
from flash_jax.autodiff import attend
from flash_jax.backends import tpu
from flash_jax.backends.base import Device

DEVICE = Device("tpu", "TPU v6 lite")
WHOLE = tpu.Config(tpu.Tiles(32, 48, 96, pieces=2, band=8), tpu.Tiles(32, 24, 96, 2, pieces=2, band=8), 2**26)  # all keys resident
SLICED = tpu.Config(tpu.Tiles(32, 16, 32, 2), tpu.Tiles(32, 16, 32, 2), 2**26)  # keys in slices


def interpreted(params=True):
    """Kernels traced inside are interpreted: `True` plainly, `pltpu.InterpretParams` with a model of the memory."""
    return pltpu.force_tpu_interpret_mode(params)


def attention(config, interpret=interpreted, device=DEVICE):
    """`flash_attention(..., return_residual=True)` by the kernels, with these tiles (None: the device's)."""

    def call(**arguments):
        request = api.prepare(**arguments)
        reason = tpu.BACKEND.why_not(request.problem, device)
        assert reason is None, reason
        tiles = config or tpu.default_config(request.problem, device)
        with interpret() if interpret else contextlib.nullcontext():
            out, lse = attend(request.problem, tpu.BACKEND, tiles, device, request.operands)
        if request.sinks is not None:
            out, lse = api._with_sinks(out, lse, request.sinks)
        return out.reshape(*request.batch, *out.shape[1:]), lse.reshape(*request.batch, *lse.shape[1:])

    return call


def product_in_one_order(problem, a, b, axes):
    """`tile.dot`, each number summed from first to last.

    On a CPU, XLA sums in one of two orders, by the shape of the tile: a score of a 32 x 48 tile of the forward differs from that of
    the 48 x 32 tile of the backward, of 64 x 64 tiles none does.
    """
    a, b = (jnp.moveaxis(x.astype(problem.dtype), axis[0], 0) for x, axis in zip((a, b), axes, strict=True))
    add = lambda n, total: total + lax.dynamic_index_in_dim(a, n, 0).T * lax.dynamic_index_in_dim(b, n, 0)
    return lax.fori_loop(0, a.shape[0], add, jnp.zeros((a.shape[1], b.shape[1]), jnp.float32))
