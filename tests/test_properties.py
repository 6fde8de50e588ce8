"""What holds for any input, forward and backward: the order of tiles, packing, padding, repetition.

Bounds, schedules, merging and tile sizes have theirs in test_mask, test_schedule, test_softmax and test_tile_sizes.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tolerance import close

from flash_jax import flash_attention

BATCH, LENGTH, HEADS, D, TILE = 2, 12, 2, 4, 3
RANDOM = np.random.default_rng(0)
normal = lambda *shape: RANDOM.standard_normal(shape, np.float32)
QKV = tuple(normal(BATCH, LENGTH, HEADS, D) for _ in range(3))
BIAS = normal(1, HEADS, LENGTH, LENGTH)
DOUT, DLSE = normal(BATCH, LENGTH, HEADS, D), normal(BATCH, LENGTH, HEADS)
few = settings(max_examples=5)


@functools.partial(jax.jit, static_argnames=("block_sizes", "is_causal"))
def results(qkv, dout, dlse, bias=None, **options):
    """Out and lse, and the gradients of query, key, value and bias."""
    attention = lambda *a: flash_attention(*a, **options, return_residual=True, implementation="xla")
    out, pullback = jax.vjp(attention, *qkv, bias)
    return *out, *pullback((dout, dlse))


@few
@example([3, 2, 1, 0])
@given(st.permutations(range(LENGTH // TILE)))
def test_the_order_of_tiles_does_not_matter(order):
    """Keys, values and bias permuted by whole tiles are the same attention, and so are their gradients."""
    index = (np.asarray(order)[:, None] * TILE + np.arange(TILE)).ravel()
    query, key, value = QKV
    run = functools.partial(results, dout=DOUT, dlse=DLSE, block_sizes=(TILE, TILE))
    out, lse, dq, dk, dv, dbias = run(QKV, bias=BIAS)
    expected = out, lse, dq, dk[:, index], dv[:, index], dbias[..., index]
    close(run((query, key[:, index], value[:, index]), bias=BIAS[..., index]), expected)


@few
@given(st.lists(st.sampled_from([1, 3, 4]), min_size=2, max_size=3), st.permutations(range(4)), st.booleans())
def test_packed_sequences_are_separate_calls(lengths, names, is_causal):
    """Whatever the segments are called, in whatever order; the rest of the length is one more, of padding."""
    lengths = [*lengths, LENGTH - sum(lengths)]
    ids = np.repeat(names[: len(lengths)], lengths)[None]
    packed = results(QKV, DOUT, DLSE, q_segment_ids=ids, kv_segment_ids=ids, is_causal=is_causal, block_sizes=(TILE, 5))
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        if length:
            cut = lambda x, part=slice(end - length, end): x[:, part]
            alone = results(tuple(map(cut, QKV)), cut(DOUT), cut(DLSE), is_causal=is_causal)
            close(tuple(map(cut, packed[:5])), alone[:5])


@few
@given(
    st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH),
    st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)
@pytest.mark.parametrize("block_sizes", [None, (TILE, 5)], ids=str)
def test_padding_of_any_length_may_hold_anything(block_sizes, q_lengths, kv_lengths, poison):
    """Rows of the query and of the cotangents past one length, keys and values past the other."""
    number = lambda lengths: np.asarray(lengths, np.int32)
    run = functools.partial(
        results, query_seq_lengths=number(q_lengths), key_value_seq_lengths=number(kv_lengths), is_causal=True, block_sizes=block_sizes
    )

    def poisoned(x, lengths):
        inside = (np.arange(LENGTH) < number(lengths)[:, None]).reshape(BATCH, LENGTH, *[1] * (x.ndim - 2))
        return np.where(inside, x, np.float32(poison))

    query, key, value = QKV
    arrays = poisoned(query, q_lengths), poisoned(key, kv_lengths), poisoned(value, kv_lengths)
    expected = run(QKV, DOUT, DLSE)
    assert all(np.isfinite(x).all() for x in expected[2:5])
    jax.tree.map(np.testing.assert_array_equal, run(arrays, poisoned(DOUT, q_lengths), poisoned(DLSE, q_lengths)), expected)


@few
@given(st.integers(0, 2**32 - 1), st.floats(0, 1e4))
def test_results_repeat_bitwise(seed, size):
    random = np.random.default_rng(seed)
    qkv = tuple((size * random.standard_normal((BATCH, LENGTH, HEADS, D))).astype(np.float32) for _ in range(3))
    first, again = (results(qkv, DOUT, DLSE, bias=BIAS, is_causal=True, block_sizes=(TILE, 5)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, again, first)
