"""Which tiles of the score matrix a kernel visits, and which of them need a mask.

A tile is `[block_q, block_kv]` scores. `EMPTY`: no score is visible, skip it. `FULL`: every score is, no mask needed.
`PARTIAL`: evaluate the mask. Classification may err towards PARTIAL, never the other way. Kinds join by minimum (a
conjunction of rules is empty where one is, full where all are); the transpose, for kernels that own a key tile, is
the transpose of the kinds. Rows past the end of a partial last tile never count; columns past it make the tile partial.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

EMPTY, PARTIAL, FULL = 0, 1, 2


def num_tiles(length: int, block: int) -> int:
    """Tiles that cover a length, the last one maybe partial."""
    return -(-length // block)


def numpy_or_jax(x) -> Any:
    """NumPy for what is known before tracing, else `jax.numpy`, which outside of a trace would compile every operation by itself."""
    return np if isinstance(x, np.ndarray) else jnp


def _tiles(x: Array, block: int, fill) -> Array:
    """`[..., length]` -> `[..., num_tiles, block]`, the tail filled."""
    length = x.shape[-1]
    n = num_tiles(length, block)
    if n * block != length:
        x = numpy_or_jax(x).pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n * block - length)], constant_values=fill)
    return x.reshape(*x.shape[:-1], n, block)


class Hull(NamedTuple):
    """Extremes of the row bounds over each q tile, int32 `[..., num_q_tiles]`.

    lo_min, hi_max: over rows that see a key (`hi_max <= lo_min` where none does): outside, nothing is visible.
    lo_max, hi_min: over all rows: between them, everything is.
    """

    lo_min: Array
    lo_max: Array
    hi_min: Array
    hi_max: Array


def hull(kv_lo: Array, kv_hi: Array, block_q: int) -> Hull:
    """From bounds int32 `[..., q_len]`."""
    far, xp = np.int32(2**31 - 1), numpy_or_jax(kv_lo)
    seen = kv_lo < kv_hi
    return Hull(
        lo_min=_tiles(xp.where(seen, kv_lo, far), block_q, far).min(-1),
        lo_max=_tiles(kv_lo, block_q, 0).max(-1),
        hi_min=_tiles(kv_hi, block_q, far).min(-1),
        hi_max=_tiles(xp.where(seen, kv_hi, 0), block_q, 0).max(-1),
    )


class Ranges(NamedTuple):
    """Tiles of each row of tiles, int32 `[..., num_q_tiles]`: visit `[begin, end)`, no mask in `[full_begin, full_end)`.

    `begin <= full_begin <= full_end <= end`.
    """

    begin: Array
    full_begin: Array
    full_end: Array
    end: Array


def interval_ranges(kv_lo: Array, kv_hi: Array, block_q: int, block_kv: int) -> Ranges:
    """Key tiles that each q tile visits, from bounds int32 `[..., q_len]` alone."""
    h, xp = hull(kv_lo, kv_hi, block_q), numpy_or_jax(kv_lo)
    begin = xp.where(h.lo_min < h.hi_max, h.lo_min // block_kv, 0)
    end = xp.where(h.lo_min < h.hi_max, -(-h.hi_max // block_kv), 0)
    full_begin = xp.clip(-(-h.lo_max // block_kv), begin, end)
    full_end = xp.clip(h.hi_min // block_kv, full_begin, end)
    return Ranges(begin, full_begin, full_end, end)


def ranges_of_kinds(kinds: Array) -> tuple[Ranges, Array]:
    """The hull of the tiles that are not empty, from kinds `[..., num_kv_tiles]`, and what these cost: 3 where full, 4 where masked.

    The hull may hold empty ones, which a mask then hides. measured: docs/dev/experiments.md, where a masked tile takes a third longer.
    """
    tiles = kinds.shape[-1]
    index = jnp.arange(tiles, dtype=jnp.int32)
    first = lambda x: jnp.where(x, index, tiles)
    last = lambda x: jnp.where(x, index + 1, 0)
    some, every = kinds != EMPTY, kinds == FULL
    cost = some.astype(jnp.int32) * 4 - every.astype(jnp.int32)
    terms = first(some), last(some), first(every), last(every), cost, every.astype(jnp.int32)
    join = (jnp.minimum, jnp.maximum, jnp.minimum, jnp.maximum, jnp.add, jnp.add)
    begin, end, full_begin, full_end, cost, num_full = jax.lax.reduce(
        terms,
        tuple(map(jnp.int32, (tiles, 0, tiles, 0, 0, 0))),
        lambda a, b: tuple(f(x, y) for f, x, y in zip(join, a, b, strict=True)),
        (kinds.ndim - 1,),
    )
    begin = jnp.minimum(begin, end)
    in_one_piece = full_end - full_begin == num_full
    full_begin = jnp.where(in_one_piece, full_begin, begin)
    return Ranges(begin, full_begin, jnp.where(in_one_piece, full_end, full_begin), end), cost


def interval_kinds(kv_lo: Array, kv_hi: Array, block_q: int, block_kv: int, kv_len: int) -> Array:
    """int8 `[..., num_q_tiles, num_kv_tiles]` from bounds int32 `[..., q_len]`."""
    first = np.arange(num_tiles(kv_len, block_kv), dtype=np.int32) * block_kv
    h = Hull(*(x[..., None] for x in hull(kv_lo, kv_hi, block_q)))
    some = (h.lo_min < first + block_kv) & (h.hi_max > first) & (h.lo_min < h.hi_max)
    every = (h.lo_max <= first) & (h.hi_min >= first + block_kv)
    return classify(some, every)


def label_kinds(q_labels: Array, kv_labels: Array, block_q: int, block_kv: int) -> Array:
    """int8 `[..., num_q_tiles, num_kv_tiles]` for "visible iff equal", from int32 labels `[..., len]`, sorted or not."""
    low, high = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    q_min, q_max = _tiles(q_labels, block_q, high).min(-1)[..., None], _tiles(q_labels, block_q, low).max(-1)[..., None]
    k_min, k_max = _tiles(kv_labels, block_kv, high).min(-1), _tiles(kv_labels, block_kv, low).max(-1)
    k_min, k_max = k_min[..., None, :], k_max[..., None, :]
    some = (q_min <= k_max) & (k_min <= q_max)
    return classify(some, (q_min == q_max) & (k_min == k_max) & (q_min == k_min))


def dense_kinds(visible: Array, block_q: int, block_kv: int, q_len: int, kv_len: int) -> Array:
    """int8 `[..., num_q_tiles, num_kv_tiles]` of a boolean array `[..., 1 | q_len, 1 | kv_len]`."""

    def reduce(x, operation, fill):
        if x.shape[-1] != 1 or kv_len == 1:
            x = operation(_tiles(x, block_kv, fill), axis=-1)
        if x.shape[-2] != 1 or q_len == 1:
            x = jnp.swapaxes(operation(_tiles(jnp.swapaxes(x, -1, -2), block_q, fill), axis=-1), -1, -2)
        return jnp.broadcast_to(x, (*x.shape[:-2], num_tiles(q_len, block_q), num_tiles(kv_len, block_kv)))

    return classify(reduce(visible, jnp.any, False), reduce(visible, jnp.all, True))


def block_kinds(blocks: Array, block_sizes: tuple[int, int], block_q: int, block_kv: int, q_len: int, kv_len: int) -> Array:
    """int8 kinds of a block map `[..., num_q_blocks, num_kv_blocks]` whose blocks need not match the tiles.

    Counts the visible blocks that a tile touches by an integral image: O(blocks) memory.
    """
    counts = jnp.pad(jnp.cumsum(jnp.cumsum(blocks.astype(jnp.int32), -1), -2), [(0, 0)] * (blocks.ndim - 2) + [(1, 0), (1, 0)])

    def span(length, block, size):  # first and one past the last mask block that each tile touches
        first = jnp.arange(num_tiles(length, block), dtype=jnp.int32) * block
        return first // size, -(-jnp.minimum(first + block, length) // size)

    (q0, q1), (k0, k1) = span(q_len, block_q, block_sizes[0]), span(kv_len, block_kv, block_sizes[1])
    at = lambda rows, columns: counts[..., rows[:, None], columns]
    visible = at(q1, k1) - at(q0, k1) - at(q1, k0) + at(q0, k0)
    return classify(visible > 0, visible == ((q1 - q0)[:, None] * (k1 - k0)))


def classify(some: Array, every: Array) -> Array:
    """int8 kinds of tiles, from whether some score of each is visible, and whether every one is."""
    xp = numpy_or_jax(some)
    return xp.where(some, xp.where(every, FULL, PARTIAL), EMPTY).astype(np.int8)


class TileLists(NamedTuple):
    """For each row of tiles the column tiles to visit: full ones first, then partial ones, each ascending.

    index: int32 `[..., rows, columns]`; entries from `end` on are meaningless.
    full_end, end: int32 `[..., rows]`: entries `[0, full_end)` need no mask, `[full_end, end)` do.
    """

    index: Array  # pyright: ignore[reportIncompatibleMethodOverride] (tuple.index)
    full_end: Array
    end: Array


def tile_lists(kinds: Array) -> TileLists:
    """Compact kinds `[..., rows, columns]`; swap the last two axes first for the transposed schedule."""
    index = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
    return TileLists(index, (kinds == FULL).sum(-1, dtype=jnp.int32), (kinds != EMPTY).sum(-1, dtype=jnp.int32))
