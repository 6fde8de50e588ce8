"""tanh of a soft cap on a tile of scores; the hardware's own, `tanh.approx`, is good to 11 bits only. Not to be differentiated."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, math, nvvm, vector
from jax.experimental.mosaic.gpu import fragmented_array

from flash_jax.backends.hopper.pipeline import WGMMA, cond, constant
from flash_jax.softmax import LOG2E

# tanh(x) = x * (1 + x^2 * (c0 + c1 x^2 + ...)) on |x| <= 1: minimax of the absolute error, 3.2e-7 before rounding.
_COEFFICIENTS = -0.3332866991570064, 0.13275615322492518, -0.05142535663055811, 0.016532819912037148, -0.0029830834796939413
LARGEST_CAP = 1000.0  # of the polynomial: by 5e-7 times the cap its scores differ from those of `tanh_by_exponential`, the backward's


def tanh_by_exponential(x: jax.Array) -> jax.Array:
    """To 3e-7, absolute. An exponential and a reciprocal, both of the unit that softmax waits for already."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


def tanh_by_polynomial(x: jax.Array) -> jax.Array:
    """To 4e-7, absolute; x float32 `[64, n]`. No such unit where no |x| of a warp is above 1, as no score is above the cap."""
    return cond(any_above_one(x) != 0, tanh_by_exponential, _polynomial, x)


def _polynomial(x):
    y = x * x
    return x * (y * functools.reduce(lambda p, c: p * y + c, reversed(_COEFFICIENTS)) + 1)


def any_above_one(x: jax.Array) -> jax.Array:
    """1 if any |x| that this warp holds is above 1, else 0; NaN is not. Warps differ, so no barrier may depend on it."""
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=splat))
    def test(_, x):
        largest = functools.reduce(arith.maxnumf, [math.absf(pair) for pair in x.registers.flat])
        either = [vector.extract(largest, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([n])) for n in range(2)]
        one = arith.constant(ir.F32Type.get(), 1.0)
        is_above = arith.cmpf(arith.CmpFPredicate.OGT, arith.maxnumf(*either), one)
        word = arith.extui(ir.IntegerType.get_signless(32), nvvm.vote_sync(constant(-1), is_above, nvvm.VoteSyncKind.any))
        return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)

    return test(x)
