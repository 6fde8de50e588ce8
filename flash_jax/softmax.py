"""The online softmax as row verbs: every implementation says its mathematics with these and with nothing else.

A row is a query. Its state is `m` (running maximum of the scores), `l` (sum of `2^(s - m)`) and `acc` (unnormalised
output, the same weights times v). Scores `s` are in base-2 units, `log2(e) * logit`, so that one `exp2` does the work of an
`exp` and the factor is folded into the scale once; `lse` leaves in natural units.

The verbs know no shapes: `s` is a tile of scores, everything else is one number a row. How a backend stores a row beside a
tile is said by `column`, which turns row numbers into something that broadcasts against the tile.

Source: FlashAttention (arXiv 2205.14135), Algorithm 1 and 4; Milakov and Gimelshein, arXiv 1805.02867.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

LOG2E = 1.4426950408889634  # log2(e): natural to base-2 units
LN2 = 0.6931471805599453  # ln(2): and back


def last_axis_column(row: Array) -> Array:
    """Rows `[..., block_q]` beside a tile `[..., block_q, block_kv]`."""
    return row[..., None]


def pivot(m: Array) -> Array:
    """What is subtracted from scores: m, or 0 as long as the row has seen no key, so that `2^(s - pivot)` is 0 there and never NaN."""
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def rescale(m: Array, s_max: Array, unit: float = 1) -> tuple[Array, Array, Array]:
    """Take the maximum of a new tile in: `(m_new, pivot, alpha)`.

    `alpha = 2^(m - m_new)` multiplies the old `l` and `acc`. unit: `LOG2E` where scores are in natural units, in which no finite bias
    overflows.
    """
    m_new = jnp.maximum(m, s_max)
    at = pivot(m_new)
    return m_new, at, probs(m, at, lambda row: row, unit)


def probs(s: Array, pivot: Array, column: Callable[[Array], Array] = last_axis_column, unit: float = 1) -> Array:
    """Unnormalised probabilities `2^(s - pivot)`; 0 where `s` is -inf. unit: see `rescale`."""
    return jnp.exp2(log2_probs(s, pivot, column, unit))


def log2_probs(s: Array, pivot: Array, column: Callable[[Array], Array] = last_axis_column, unit: float = 1) -> Array:
    """The exponent of `probs`."""
    x = s - column(pivot)
    return x if unit == 1 else x * unit


def finish(m: Array, l: Array, acc: Array, column: Callable[[Array], Array] = last_axis_column) -> tuple[Array, Array]:
    """`(out, lse)`: `acc / l` and the natural log-sum-exp; `(0, -inf)` for a row that has seen no key."""
    empty = l == 0
    inverse = 1 / jnp.where(empty, jnp.ones_like(l), l)
    lse = jnp.where(empty, jnp.full_like(l, -jnp.inf), (m + jnp.log2(jnp.where(empty, jnp.ones_like(l), l))) * LN2)
    return acc * column(inverse), lse


class State(NamedTuple):
    """What a row remembers."""

    m: Array
    l: Array
    acc: Array


def merge(a: State, b: State, column: Callable[[Array], Array] = last_axis_column) -> State:
    """The state after the tiles of `a` and of `b`: associative and commutative, with `(-inf, 0, 0)` neutral."""
    m, pivot, alpha = rescale(a.m, b.m)
    beta = jnp.exp2(b.m - pivot)
    return State(m, a.l * alpha + b.l * beta, a.acc * column(alpha) + b.acc * column(beta))


def lse_pivot(lse: Array, unit: float = LOG2E) -> Array:
    """The natural `lse` as pivot of the backward, by default in base 2; +inf for an empty row, so that all its probabilities are 0."""
    return jnp.where(lse == -jnp.inf, jnp.full_like(lse, jnp.inf), lse if unit == 1 else lse * unit)


def probs_from_lse(s: Array, pivot: Array, column: Callable[[Array], Array] = last_axis_column) -> Array:
    """Normalised probabilities `e^(logit - lse)` from `pivot = lse_pivot(lse)`."""
    return jnp.exp2(s - column(pivot))


_LOSES_L = 2.0**13  # |lse| from which its last bit, 2^-11 and more, is no longer small against log(l)


def any_lost_l(lse: Array) -> Array:
    """Whether an lse is so large that it has lost log(l): a finite bias of -1e9 on a whole row, say, makes one."""
    return jnp.any(jnp.isfinite(lse) & (jnp.abs(lse) > _LOSES_L))


def weights_from_states(m: Array, l: Array) -> tuple[Array, Array]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, exact whatever the size of m; 0 for an empty row."""
    seen = l > 0
    return jnp.where(seen, m, jnp.inf), jnp.where(seen, 1 / jnp.where(seen, l, 1), 0)


def dlogits(p: Array, dp: Array, delta: Array, column: Callable[[Array], Array] = last_axis_column) -> Array:
    """Cotangent of the logits: `p * (dp - delta)` with `delta = sum(out * dout) - dlse` a row."""
    return p * (dp - column(delta))
