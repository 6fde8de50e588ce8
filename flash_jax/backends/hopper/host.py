"""Host-side preparation that forward and backward share: padding, bounds known before tracing, keys that somebody sees, tile kinds."""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import schedule
from flash_jax.problem import Operands, Problem
from flash_jax.visibility import row_bounds

Array = jax.Array

ROW_TILE = 8  # the copy engine takes lengths that are multiples of this; the rest of a tile it fills with zeros, or leaves out


def pad(x: Array, sizes: dict[int, int], fill=0) -> Array:
    """Grow axes to the given sizes."""
    return jnp.pad(x, [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)], constant_values=fill)


def static_bounds(problem: Problem) -> tuple[np.ndarray, np.ndarray] | None:
    """kv_lo, kv_hi `[1, q_len]` if they are known now."""
    if problem.mask.rule is None:
        return None
    with jax.ensure_compile_time_eval():
        lo, hi = problem.mask.rule(jnp.arange(problem.q_len, dtype=jnp.int32))
        return np.asarray(lo)[None], np.asarray(hi)[None]


def transposed_bounds(problem: Problem, operands: Operands, length: int):
    """q_lo, q_hi int32 `[1 | batch, length]`: key k is seen by the queries in `[q_lo(k), q_hi(k))`. NumPy if known now."""
    static = static_bounds(problem)
    if static is not None:
        keys = np.arange(length)
        q_lo, q_hi = (np.searchsorted(bound[0], keys, side="right").astype(np.int32)[None] for bound in (static[1], static[0]))
        return q_lo, q_hi
    keys = jnp.arange(length, dtype=jnp.int32)
    kv_lo, kv_hi = row_bounds(problem.mask, operands.mask, problem.q_len)
    count = lambda bound: (bound[:, :, None] <= keys).sum(1, dtype=jnp.int32)
    return count(kv_hi), count(kv_lo)


def seen_keys(problem: Problem, operands: Operands) -> Array | None:
    """Booleans `[1 | batch, kv_len]`: every key that a query sees, and few others; None where that is all of them."""
    mask, terms = operands.mask, []
    q_lo, q_hi = transposed_bounds(problem, operands, problem.kv_len)
    if problem.mask.rule is None or not bool((q_lo < q_hi).all()):
        terms.append(jnp.asarray(q_lo < q_hi))
    if mask.q_labels is not None:
        terms.append((mask.kv_labels[:, :, None] == mask.q_labels[:, None, :]).any(-1))
    for dense in mask.dense:
        terms.append(jnp.broadcast_to(dense.any((1, 2)), (dense.shape[0], problem.kv_len)))
    for blocks, (_, block_kv) in zip(mask.blocks, problem.mask.block_sizes, strict=True):
        terms.append(jnp.repeat(blocks.any((1, 2)), block_kv, axis=-1)[:, : problem.kv_len])
    seen = None
    for term in terms:
        seen = term if seen is None else seen & term
    return seen


def tile_kinds(problem: Problem, operands: Operands, block_q: int, block_kv: int) -> Array:
    """int8 `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`."""
    mask, lengths = operands.mask, (problem.q_len, problem.kv_len)
    kinds = schedule.interval_kinds(*row_bounds(problem.mask, mask, problem.q_len), block_q, block_kv, problem.kv_len)[:, None]
    if mask.q_labels is not None:
        kinds = jnp.minimum(kinds, schedule.label_kinds(mask.q_labels, mask.kv_labels, block_q, block_kv)[:, None])
    for dense in mask.dense:
        kinds = jnp.minimum(kinds, schedule.dense_kinds(dense, block_q, block_kv, *lengths))
    for blocks, sizes in zip(mask.blocks, problem.mask.block_sizes, strict=True):
        kinds = jnp.minimum(kinds, schedule.block_kinds(blocks, sizes, block_q, block_kv, *lengths))
    return kinds
