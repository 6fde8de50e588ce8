"""The TPU kernels on a CPU: Pallas interprets them; tiles small enough that the cases have several."""

import contextlib

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
