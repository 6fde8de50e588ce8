"""Host-side preparation that forward and backward share: padding, bounds known before tracing, keys that somebody sees, tile kinds."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import schedule, visibility
from flash_jax.backends.hopper import functions
from flash_jax.problem import Operands, Problem
from flash_jax.visibility import row_bounds

Array = jax.Array

BOUNDS, LABELS = 1, 2  # see `notes`
ROW_TILE = 8  # the copy engine takes lengths that are multiples of this; the rest of a tile it fills with zeros, or leaves out


def pad(x: Array, sizes: dict[int, int], fill=0) -> Array:
    """Grow axes to the given sizes."""
    return jnp.pad(x, [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)], constant_values=fill)


def static_bounds(problem: Problem) -> tuple[np.ndarray, np.ndarray] | None:
    """kv_lo, kv_hi `[1, q_len]` if they are known now."""
    return visibility.static_bounds(problem.mask, problem.q_len)


def transposed_bounds(problem: Problem, operands: Operands, length: int):
    """q_lo, q_hi int32 `[1 | batch, length]`: key k is seen by the queries in `[q_lo(k), q_hi(k))`. NumPy if known now."""
    static = static_bounds(problem)
    if static is not None:
        keys = np.arange(length)
        q_lo, q_hi = (np.searchsorted(bound[0], keys, side="right").astype(np.int32)[None] for bound in (static[1], static[0]))
        return q_lo, q_hi
    keys = jnp.arange(length, dtype=jnp.int32)
    kv_lo, kv_hi = row_bounds(problem.mask, operands.mask, problem.q_len)
    rows_up_to = jax.vmap(lambda bound: jnp.searchsorted(bound, keys, side="right", method="scan_unrolled").astype(jnp.int32))
    return rows_up_to(kv_hi), rows_up_to(kv_lo)


def _seen_by_bounds(problem: Problem, operands: Operands):
    """Booleans `[1 | batch, kv_len]`: keys in the interval of some row; those of successive rows leave no gap. NumPy if known now."""
    lo, hi = static_bounds(problem) or row_bounds(problem.mask, operands.mask, problem.q_len)
    xp = schedule.numpy_or_jax(lo)
    first = xp.where(lo < hi, lo, problem.kv_len).min(1, keepdims=True)
    last = xp.where(lo < hi, hi, 0).max(1, keepdims=True)
    keys = np.arange(problem.kv_len, dtype=np.int32)
    return (first <= keys) & (keys < last)


def seen_keys(problem: Problem, operands: Operands) -> Array | None:
    """Booleans `[1 | batch, 1 | num_kv_heads, kv_len]`: keys that a query sees; None where that is all of them.

    Where an array or a function has to be evaluated on all scores, so is the whole mask; else it must be an interval.
    """
    if problem.mask.evaluates_scores:
        seen = visibility.on_all_scores(problem.mask, operands.mask, problem.num_heads, (problem.q_len, problem.kv_len))
        return by_kv_head(problem, seen).any((2, 3))
    assert problem.mask.is_interval
    seen = _seen_by_bounds(problem, operands)
    return None if isinstance(seen, np.ndarray) and seen.all() else jnp.asarray(seen)[:, None]


def by_kv_head(problem: Problem, x: Array) -> Array:
    """`[.., 1 | num_heads, ...]` as `[.., 1 | num_kv_heads, 1 | group, ...]`."""
    return x.reshape(x.shape[0], -1, 1 if x.shape[1] == 1 else problem.group, *x.shape[2:])


def unseen_tiles(problem: Problem, operands: Operands, block_kv: int) -> np.ndarray | Array | None:
    """int32 `[1 | batch, num_kv_tiles]`: 0 where a query certainly sees each key of the tile; None where that is so in every tile.

    With labels a key has one row that may prove it: that of its own number, or the last of its label if labels are sorted. So this
    takes O(kv_len log q_len), and a tile may be marked for nothing.
    """
    num_tiles = schedule.num_tiles(problem.kv_len, block_kv)
    if problem.mask.has_patterns:
        return np.ones((1, num_tiles), np.int32)
    if problem.mask.has_labels:
        seen = _seen_by_own_row(problem, operands)
    else:
        seen = _seen_by_bounds(problem, operands)
        if isinstance(seen, np.ndarray) and seen.all():
            return None
    unseen = (~seen).astype(np.int32)
    unseen = schedule.numpy_or_jax(seen).pad(unseen, [(0, 0), (0, num_tiles * block_kv - problem.kv_len)])
    return unseen.reshape(-1, num_tiles, block_kv).max(-1)


def _seen_by_own_row(problem: Problem, operands: Operands) -> Array:
    mask, keys = operands.mask, np.arange(problem.kv_len, dtype=np.int32)
    bounds = static_bounds(problem) or (mask.kv_lo, mask.kv_hi)

    def one(q_labels, kv_labels, kv_lo, kv_hi):
        if problem.q_len == problem.kv_len:
            return (q_labels == kv_labels) & (kv_lo <= keys) & (keys < kv_hi)
        row = jnp.searchsorted(q_labels, kv_labels, side="right", method="scan_unrolled").astype(jnp.int32) - 1
        row = jnp.maximum(row, 0)
        return (q_labels[row] == kv_labels) & (kv_lo[row] <= keys) & (keys < kv_hi[row])

    arrays = [jnp.asarray(x) for x in (mask.q_labels, mask.kv_labels, *bounds)]
    shared = [x.shape[0] == 1 for x in arrays]
    if all(shared):
        return one(*(x[0] for x in arrays))[None]
    return jax.vmap(one, [None if one_for_all else 0 for one_for_all in shared])(
        *(x[0] if one_for_all else x for x, one_for_all in zip(arrays, shared, strict=True))
    )


def notes(problem: Problem, operands: Operands, block_q: int, block_kv: int) -> Array:
    """Which rules may hide scores of a tile, of a mask with labels: int8 `[1 | batch, num_q_tiles, num_kv_tiles]`.

    The sum of `BOUNDS` where row bounds may and `LABELS` where labels may.
    """
    kinds = visibility.kinds_of_rules(problem.mask, operands.mask, (problem.q_len, problem.kv_len), (block_q, block_kv))
    by_bounds, by_labels = (jnp.where(kind[:, 0] == schedule.FULL, 0, bit) for kind, bit in zip(kinds, (BOUNDS, LABELS), strict=True))
    return (by_bounds | by_labels).astype(jnp.int8)


def tile_kinds(problem: Problem, operands: Operands, block_q: int, block_kv: int) -> Array:
    """int8 `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`."""
    of_functions = (functions.kinds(problem, operands, n, block_q, block_kv) for n in range(len(problem.mask.functions)))
    return visibility.tile_kinds(problem.mask, operands.mask, (problem.q_len, problem.kv_len), (block_q, block_kv), of_functions)
