"""From products to logits on a tile, and the derivative: scale, soft cap, bias, in this order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_jax.softmax import LOG2E

Array = jax.Array


def logits(
    qk: Array, scale, soft_cap: float | None, bias: Array | None, tanh: Callable[[Array], Array] = jnp.tanh, unit: float = LOG2E
) -> tuple[Array, Array | None]:
    """`unit * (cap * tanh(scale * qk / cap) + bias)`, by default in the base-2 units of `softmax`.

    Args:
      qk: products `q . k` of a tile, float32 (or float64).
      scale: Python float or an array that broadcasts against `qk`.
      soft_cap: the cap, or None for no cap.
      bias: broadcasts against `qk`, in its dtype; or None.
      tanh: how a backend computes it.
      unit: `LOG2E`, or 1 for natural units, in which no finite bias overflows.

    Returns:
      The logits and, with a soft cap, `tanh(scale * qk / cap)` for the derivative (else None).
    """
    if soft_cap is None:
        capped, s = None, qk * (scale * unit)
    else:
        capped = tanh(qk * (scale / soft_cap))
        s = capped * (soft_cap * unit)
    return (s if bias is None else s + (bias if unit == 1 else base_2(bias))), capped


def base_2(x: Array) -> Array:
    """`log2(e) * x`, finite where x is: a row of equal `finfo.min` weighs its keys alike, only -inf hides them."""
    limit = jnp.finfo(x.dtype).max
    return jnp.where(jnp.isinf(x), x, jnp.clip(x * LOG2E, -limit, limit))


def dscores(dlogits: Array, tanh: Array | None) -> Array:
    """Cotangent of the scaled scores `scale * qk` from that of the logits (which is also the bias's)."""
    return dlogits if tanh is None else dlogits * (1 - tanh * tanh)
