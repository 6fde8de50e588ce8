"""Which tiles are skipped and which are not masked, against the booleans themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_jax import Mask, schedule, visibility
from flash_jax import mask as masks
from flash_jax.align import Shape
from flash_jax.schedule import EMPTY, FULL, PARTIAL

TILES = st.sampled_from([(1, 1), (4, 3), (5, 8), (32, 32)])
LENGTHS = st.sampled_from([(11, 13), (12, 12)])  # with and without tails; few shapes, few compilations
SEEDS = st.integers(0, 2**32 - 1)

# One compilation for each pair of lengths and tiles.
interval_kinds = jax.jit(schedule.interval_kinds, static_argnums=(2, 3, 4))
interval_ranges = jax.jit(schedule.interval_ranges, static_argnums=(2, 3))
label_kinds = jax.jit(schedule.label_kinds, static_argnums=(2, 3))
dense_kinds = jax.jit(schedule.dense_kinds, static_argnums=(1, 2, 3, 4))
block_kinds = jax.jit(schedule.block_kinds, static_argnums=(1, 2, 3, 4, 5))
tile_lists = jax.jit(schedule.tile_lists)


def tiles_of(visible, block_q, block_kv):
    """`(some, every)` of each tile `[..., num_q_tiles, num_kv_tiles]`, tail scores that do not exist left out, by loops."""
    q_len, kv_len = visible.shape[-2:]
    rows, columns = range(0, q_len, block_q), range(0, kv_len, block_kv)
    tile = lambda q, k: visible[..., q : q + block_q, k : k + block_kv]
    collect = lambda reduce: np.stack([np.stack([reduce(tile(q, k), (-2, -1)) for k in columns], -1) for q in rows], -2)
    return collect(np.any), collect(np.all)


def assert_sound(kinds, some, every):
    """What makes the result right: nothing visible is skipped, nothing hidden goes unmasked."""
    kinds = np.asarray(kinds)
    assert kinds.dtype == np.int8
    kinds = np.broadcast_to(kinds, some.shape)
    assert not some[kinds == EMPTY].any()
    assert every[kinds == FULL].all()


def assert_exact(kinds, some, every):
    """What makes it fast: no tile is visited or masked without need."""
    np.testing.assert_array_equal(np.broadcast_to(kinds, some.shape), np.where(some, np.where(every, FULL, PARTIAL), EMPTY))


def columns_all_exist(kv_len, block_kv):
    """Whether a key tile lies inside the keys, `[num_kv_tiles]`."""
    return (np.arange(-(-kv_len // block_kv)) + 1) * block_kv <= kv_len


# --------------------------------------------------------------------------------------------------- intervals
def interval_masks(random, kv_len):
    """One conjunction of interval rules."""
    mask = Mask(())
    side = lambda: None if random.random() < 0.3 else int(random.integers(0, kv_len))
    if random.random() < 0.3:
        mask &= Mask.prefix(int(random.integers(0, kv_len))) & Mask.sliding_window(side(), None)
    else:
        mask &= Mask.sliding_window(side(), side())
        mask = mask & Mask.causal() if random.random() < 0.5 else mask
    mask = mask & Mask.chunked(int(random.integers(1, kv_len + 2))) if random.random() < 0.4 else mask
    return mask & Mask.lengths(*(random.integers(0, 18, 2) if random.random() < 0.5 else None for _ in range(2)))


def bounds_of_rules(seed, q_len, kv_len):
    random = np.random.default_rng(seed)
    offset = int(random.integers(-15, 16)) if random.random() < 0.5 else random.integers(-15, 16, 2)
    spec, operands = masks.resolve(interval_masks(random, kv_len), Shape((2,), 1, q_len, kv_len), offset)
    lo, hi = visibility.row_bounds(spec, operands, q_len)
    return lo, hi, np.asarray(visibility.in_interval(lo, hi, jnp.arange(kv_len)))


@settings(max_examples=60)
@given(SEEDS, LENGTHS, TILES)
def test_intervals_of_rules_are_exact(seed, lengths, tiles):
    (q_len, kv_len), (block_q, block_kv) = lengths, tiles
    lo, hi, visible = bounds_of_rules(seed, q_len, kv_len)
    some, every = tiles_of(visible, block_q, block_kv)
    kinds = interval_kinds(lo, hi, block_q, block_kv, kv_len)
    assert_sound(kinds, some, every)
    assert_exact(kinds, some, every & columns_all_exist(kv_len, block_kv))
    check_ranges(lo, hi, block_q, block_kv, kinds)


@settings(max_examples=60)
@given(SEEDS, LENGTHS, TILES)
def test_any_monotone_bounds_are_sound(seed, lengths, tiles):
    """Rows of an interval that jumps, or sees nothing, in the middle of a tile."""
    (q_len, kv_len), (block_q, block_kv) = lengths, tiles
    random = np.random.default_rng(seed)
    lo = np.sort(random.integers(0, kv_len + 1, (3, q_len)))
    hi = np.maximum(lo, np.sort(random.integers(0, kv_len + 1, (3, q_len)))).astype(np.int32)
    visible = (lo[..., None] <= np.arange(kv_len)) & (np.arange(kv_len) < hi[..., None])
    lo, hi = jnp.asarray(lo, jnp.int32), jnp.asarray(hi)
    kinds = interval_kinds(lo, hi, block_q, block_kv, kv_len)
    assert_sound(kinds, *tiles_of(visible, block_q, block_kv))
    assert not (np.asarray(kinds) == FULL)[..., ~columns_all_exist(kv_len, block_kv)].any()
    check_ranges(lo, hi, block_q, block_kv, kinds)


def check_ranges(lo, hi, block_q, block_kv, kinds):
    """Ranges are ordered, and are runs of the kinds."""
    kinds = np.asarray(kinds)
    ranges = interval_ranges(lo, hi, block_q, block_kv)
    before_tracing = schedule.interval_ranges(np.asarray(lo), np.asarray(hi), block_q, block_kv)
    assert all(type(x) is np.ndarray for x in before_tracing)
    np.testing.assert_array_equal(ranges, before_tracing)
    begin, full_begin, full_end, end = (np.asarray(x)[..., None] for x in ranges)
    assert ((begin >= 0) & (begin <= full_begin) & (full_begin <= full_end) & (full_end <= end) & (end <= kinds.shape[-1])).all()
    n = np.arange(kinds.shape[-1])
    np.testing.assert_array_equal((begin <= n) & (n < end), kinds != EMPTY)
    np.testing.assert_array_equal((full_begin <= n) & (n < full_end), kinds == FULL)


def test_causal_tiles_written_out():
    lo, hi = visibility.RowRule(kv_len=10, right=0)(jnp.arange(9))
    expected = [[PARTIAL, EMPTY, EMPTY], [FULL, PARTIAL, EMPTY], [FULL, FULL, PARTIAL]]  # one row and two columns in the tail
    np.testing.assert_array_equal(interval_kinds(lo, hi, 4, 4, 10), expected)
    ranges = interval_ranges(lo, hi, 4, 4)
    np.testing.assert_array_equal(ranges, [[0, 0, 0], [0, 0, 0], [0, 1, 2], [1, 2, 3]])


@pytest.mark.parametrize(
    "rule",
    [
        visibility.RowRule(kv_len=13, offset=-4, right=0, chunk=5),
        visibility.RowRule(kv_len=13, offset=3, left=2, right=1),
        visibility.RowRule(kv_len=13, right=0, prefix=6),
    ],
    ids=str,
)
def test_numpy_rows_give_the_same_bounds_in_numpy(rule):
    bounds = rule(np.arange(11, dtype=np.int32))
    assert all(type(x) is np.ndarray and x.dtype == np.int32 for x in bounds)
    np.testing.assert_array_equal(bounds, rule(jnp.arange(11, dtype=jnp.int32)))


# --------------------------------------------------------------------------------------------------- predicates
@settings(max_examples=60)
@given(SEEDS, LENGTHS, TILES, st.booleans())
def test_labels(seed, lengths, tiles, is_sorted):
    (q_len, kv_len), (block_q, block_kv) = lengths, tiles
    random = np.random.default_rng(seed)
    choices = np.array([-(2**31), -1, 0, 1, 2**31 - 1], np.int32)  # the values that fill a tail among them
    q_labels, kv_labels = (choices[random.integers(0, random.integers(1, 6), (2, n))] for n in (q_len, kv_len))
    if is_sorted:
        q_labels, kv_labels = np.sort(q_labels), np.sort(kv_labels)
    kinds = np.asarray(label_kinds(jnp.asarray(q_labels), jnp.asarray(kv_labels), block_q, block_kv))
    some, every = tiles_of(q_labels[:, :, None] == kv_labels[:, None, :], block_q, block_kv)
    assert_sound(kinds, some, every)
    np.testing.assert_array_equal(kinds == FULL, every)
    if block_q == block_kv == 1:
        assert_exact(kinds, some, every)


@pytest.mark.parametrize("tiles", [(4, 4), (8, 4), (3, 5)], ids=str)
def test_packed_sequences_skip_every_empty_tile(tiles):
    """Sorted labels without gaps: the ranges of two tiles overlap exactly where a label is in both."""
    labels = np.repeat(np.arange(5, dtype=np.int32), [7, 1, 12, 4, 9])[None]
    kinds = label_kinds(jnp.asarray(labels), jnp.asarray(labels), *tiles)
    assert_exact(kinds, *tiles_of(labels[:, :, None] == labels[:, None, :], *tiles))


@settings(max_examples=60)
@given(SEEDS, LENGTHS, TILES, st.sampled_from(["full", "rows", "columns", "one"]), st.sampled_from([0.03, 0.5, 0.97]))
def test_dense(seed, lengths, tiles, layout, density):
    (q_len, kv_len), (block_q, block_kv) = lengths, tiles
    shape = {"full": (q_len, kv_len), "rows": (q_len, 1), "columns": (1, kv_len), "one": (1, 1)}[layout]
    dense = np.random.default_rng(seed).random((2, 3, *shape)) < density
    kinds = dense_kinds(jnp.asarray(dense), block_q, block_kv, q_len, kv_len)
    visible = np.broadcast_to(dense, (2, 3, q_len, kv_len))
    some, every = tiles_of(visible, block_q, block_kv)
    assert_sound(kinds, some, every)
    assert_exact(kinds, some, every)


@settings(max_examples=60)
@given(SEEDS, LENGTHS, TILES, st.sampled_from([(1, 1), (3, 5), (32, 4)]), st.sampled_from([0.1, 0.5, 0.9]))
def test_blocks_that_do_not_match_the_tiles(seed, lengths, tiles, block_sizes, density):
    (q_len, kv_len), (block_q, block_kv) = lengths, tiles
    shape = (2, 1, -(-q_len // block_sizes[0]), -(-kv_len // block_sizes[1]))
    blocks = np.random.default_rng(seed).random(shape) < density
    kinds = block_kinds(jnp.asarray(blocks), block_sizes, block_q, block_kv, q_len, kv_len)
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    some, every = tiles_of(blocks[..., i // block_sizes[0], j // block_sizes[1]], block_q, block_kv)
    assert_sound(kinds, some, every)
    assert_exact(kinds, some, every)


@settings(max_examples=30)
@given(SEEDS, TILES)
def test_kinds_join_by_minimum(seed, tiles):
    q_len, kv_len = 11, 13
    lo, hi, visible = bounds_of_rules(seed, q_len, kv_len)
    dense = np.random.default_rng(seed).random((2, q_len, kv_len)) < 0.8
    joined = jnp.minimum(interval_kinds(lo, hi, *tiles, kv_len), dense_kinds(jnp.asarray(dense), *tiles, q_len, kv_len))
    assert_sound(joined, *tiles_of(visible & dense, *tiles))


# --------------------------------------------------------------------------------------------------- lists
@settings(max_examples=60)
@given(SEEDS, st.sampled_from([(1, 1), (3, 5), (4, 2)]), st.booleans())
def test_tile_lists(seed, shape, transposed):
    kinds = np.random.default_rng(seed).integers(0, 3, (2, *shape)).astype(np.int8)
    kinds = kinds.swapaxes(-1, -2) if transposed else kinds
    index, full_end, end = (np.asarray(x) for x in tile_lists(jnp.asarray(kinds)))
    assert index.dtype == full_end.dtype == end.dtype == np.int32
    for row in np.ndindex(kinds.shape[:-1]):
        listed = index[row][: end[row]]
        assert listed[: full_end[row]].tolist() == np.flatnonzero(kinds[row] == FULL).tolist()
        assert listed[full_end[row] :].tolist() == np.flatnonzero(kinds[row] == PARTIAL).tolist()


def test_the_transpose_visits_the_same_tiles():
    lo, hi, _ = bounds_of_rules(3, 11, 13)
    kinds = interval_kinds(lo, hi, 2, 3, 13)

    def visited(kinds, flip):
        index, full_end, end = (np.asarray(x) for x in tile_lists(kinds))
        tiles = set()
        for batch, row in np.ndindex(end.shape):
            for n in range(end[batch, row]):
                q, k = (index[batch, row, n], row) if flip else (row, index[batch, row, n])
                tiles.add((int(batch), int(q), int(k), bool(n < full_end[batch, row])))
        return tiles

    ours = visited(kinds, flip=False)
    assert ours
    assert ours == visited(jnp.swapaxes(kinds, -1, -2), flip=True)
