"""Words to visibility: the row bounds of every rule against its sentence written out in NumPy, and masks as values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_jax import Mask, api, reference, segment_ids, visibility
from flash_jax import mask as masks
from flash_jax.align import Shape

BATCH, Q_LEN, KV_LEN = 2, 9, 13  # one shape in the properties: few compilations


def bounds(mask, q_offset=0, batch=(BATCH,), q_len=Q_LEN, kv_len=KV_LEN):
    """Whether the rule is static, and `[batch, q_len]` bounds."""
    spec, operands = masks.resolve(mask, Shape(batch, 1, q_len, kv_len), q_offset)
    lo, hi = (np.asarray(x) for x in visibility.row_bounds(spec, operands, q_len))
    return spec.rule is not None, *(np.broadcast_to(x, (int(np.prod(batch)), q_len)) for x in (lo, hi))


def seen(mask=None, batch=(BATCH,), q_len=Q_LEN, kv_len=KV_LEN, num_heads=2, **words):
    """All that is visible, `[*batch, num_heads, q_len, kv_len]`."""
    zeros = lambda length: jnp.zeros((*batch, length, num_heads, 1))
    request = api.prepare(zeros(q_len), zeros(kv_len), zeros(kv_len), mask=mask, **words)
    return np.asarray(reference.visible_scores(request.problem, request.operands)).reshape(*batch, num_heads, q_len, kv_len)


# ------------------------------------------------------------------------------------------------ row bounds
per_batch = st.lists(st.integers(-2, KV_LEN + 4), min_size=BATCH, max_size=BATCH).map(np.array)
side = st.none() | st.integers(0, KV_LEN + 2)
RULES = st.fixed_dictionaries(
    {
        "q_offset": st.integers(-15, 15) | st.lists(st.integers(-15, 15), min_size=BATCH, max_size=BATCH).map(np.array),
        "lower": st.sampled_from(["none", "causal", "prefix"]),
        "prefix": st.integers(0, KV_LEN + 4) | per_batch,
        "window": st.none() | st.tuples(side, side),
        "chunk": st.none() | st.integers(1, KV_LEN + 2),
        "query_length": st.none() | per_batch,
        "key_length": st.none() | per_batch,
    }
)


def column(x):
    """A number, or one a batch entry, beside `[batch, row, key]`."""
    return np.asarray(x).reshape(-1, 1, 1)


def written_out(rules):
    """`Mask`, and the booleans `[batch, row, key]` of its sentences."""
    i, j = np.arange(Q_LEN)[None, :, None], np.arange(KV_LEN)[None, None, :]
    p = i + column(rules["q_offset"])
    mask, visible = Mask(()), np.ones((BATCH, Q_LEN, KV_LEN), bool)
    if rules["lower"] == "causal":
        mask, visible = mask & Mask.causal(), visible & (j <= p)
    if rules["lower"] == "prefix":
        mask, visible = mask & Mask.prefix(rules["prefix"]), visible & ((j <= p) | (j < column(rules["prefix"])))
    if rules["window"]:
        left, right = rules["window"]
        right = None if rules["lower"] == "prefix" else right
        mask &= Mask.sliding_window(left, right)
        visible = visible & (True if left is None else p - left <= j) & (True if right is None else j <= p + right)
    if rules["chunk"]:
        mask, visible = mask & Mask.chunked(rules["chunk"]), visible & (p // rules["chunk"] == j // rules["chunk"])
    if rules["query_length"] is not None:
        mask, visible = mask & Mask.lengths(query=rules["query_length"]), visible & (i < column(rules["query_length"]))
    if rules["key_length"] is not None:
        mask, visible = mask & Mask.lengths(key=rules["key_length"]), visible & (j < column(rules["key_length"]))
    return mask, visible


@settings(max_examples=150)
@given(RULES)
def test_bounds_of_every_rule_and_conjunction(rules):
    mask, visible = written_out(rules)
    is_static, lo, hi = bounds(mask, rules["q_offset"])
    arrays = [rules[n] for n in ("q_offset", "query_length", "key_length")] + [rules["prefix"] if rules["lower"] == "prefix" else None]
    assert is_static == (not any(isinstance(x, np.ndarray) for x in arrays))
    assert ((lo >= 0) & (lo <= hi) & (hi <= KV_LEN)).all()
    assert (np.diff([lo, hi]) >= 0).all(), "both bounds never decrease from row to row"
    keys = np.arange(KV_LEN)
    np.testing.assert_array_equal((lo[..., None] <= keys) & (keys < hi[..., None]), visible)


@pytest.mark.parametrize("where", ["static", "jit", "array"])
def test_static_and_dynamic_rules_agree(where):
    mask = Mask.prefix(4) & Mask.sliding_window(6, None) & Mask.chunked(5)
    expected = bounds(mask, -2)
    assert expected[0]
    if where == "jit":  # the length of the prefix is a leaf, so it is traced there
        lo, hi = jax.jit(lambda m: visibility.row_bounds(*masks.resolve(m, Shape((1,), 1, Q_LEN, KV_LEN), -2), Q_LEN))(mask)
        got = (False, np.repeat(lo, BATCH, 0), np.repeat(hi, BATCH, 0))
    else:
        got = bounds(mask, {"static": np.int16(-2), "array": jnp.full(BATCH, -2)}[where])
    assert got[0] == (where == "static")
    np.testing.assert_array_equal(got[1:], expected[1:])


@pytest.mark.parametrize("far", [2**29, 2**31, 2**40, 2**70])
def test_far_windows_chunks_and_prefixes_do_not_overflow(far):
    for offset in (0, 2**29 - 1, -(2**29) + 1, jnp.array([2**31 - 1, -(2**31)]), np.array([2**40, -(2**40)])):
        _, lo, hi = bounds(Mask.sliding_window(far * 4, far * 4), offset)
        assert ((lo == 0) & (hi == KV_LEN)).all()
    for mask in (Mask.chunked(far), Mask.prefix(far), Mask.sliding_window(far, far) & Mask.chunked(far)):
        _, lo, hi = bounds(mask)
        assert ((lo == 0) & (hi == KV_LEN)).all()
    _, lo, hi = bounds(Mask.prefix(np.array([max(-far, -(2**63))])))
    np.testing.assert_array_equal(hi, bounds(Mask.causal())[2])


@pytest.mark.parametrize("length", [2**40, np.array([2**40, 2**32 + 1]), jnp.array([2**32 - 1, 2**31], jnp.uint32), np.int64(2**33)])
def test_far_lengths_do_not_wrap(length):
    _, lo, hi = bounds(Mask.lengths(length, length))
    assert ((lo == 0) & (hi == KV_LEN)).all()


def test_64_bit_ids_do_not_wrap():
    with pytest.raises(ValueError, match="q_segment_ids must fit in int32, got 0 to 4294967296"):
        seen(q_segment_ids=np.array([0] * (Q_LEN - 1) + [2**32]), kv_segment_ids=np.zeros(KV_LEN, int))


@pytest.mark.parametrize("integer", [int, np.int64, np.uint8, np.int8, jnp.int32, jnp.uint32, jnp.int16])
def test_any_integer_type(integer):
    n = lambda x: integer(x)
    i, j = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)
    np.testing.assert_array_equal(seen(local_window_size=(n(2), n(1)))[0, 0], (i - 2 <= j) & (j <= i + 1))
    np.testing.assert_array_equal(seen(local_window_size=n(3), q_offset=n(2))[0, 0], abs(i + 2 - j) <= 3)
    np.testing.assert_array_equal(seen(mask=Mask.chunked(n(4)) & Mask.prefix(n(3)))[0, 0], ((j <= i) | (j < 3)) & (i // 4 == j // 4))
    if integer is int:
        return
    vector = lambda x: np.asarray(x).astype(np.dtype(integer)) if integer in (np.int64, np.uint8, np.int8) else jnp.asarray(x, integer)
    got = seen(query_seq_lengths=vector([9, 4]), key_value_seq_lengths=vector([5, 13]))[:, 0]
    np.testing.assert_array_equal(got, np.stack([(i < 9) & (j < 5), (i < 4) & (j < 13)]))
    q_ids, kv_ids = np.arange(Q_LEN) % 3, np.arange(KV_LEN) // 5
    got = seen(q_segment_ids=vector(q_ids), kv_segment_ids=vector(kv_ids))
    np.testing.assert_array_equal(got, np.broadcast_to(q_ids[:, None] == kv_ids, got.shape))


# ------------------------------------------------------------------------------------------------ conjunctions
def one_of_each():
    random = np.random.default_rng(0)
    ids = lambda length: np.sort(random.integers(0, 3, (BATCH, length)))
    return {
        "causal": Mask.causal(),
        "window": Mask.sliding_window(4, None),
        "prefix": Mask.prefix(np.array([3, 8])),
        "chunked": Mask.chunked(5),
        "lengths": Mask.lengths(np.array([9, 5]), np.array([7, 13])),
        "segments": Mask.segments(ids(Q_LEN), ids(KV_LEN)),
        "other segments": Mask.segments(ids(Q_LEN), ids(KV_LEN)),
        "dense": masks.words(random.random((2, Q_LEN, KV_LEN)) < 0.7),
        "blocks": Mask.from_blocks(random.random((2, 3, 3)) < 0.7, 4, 5),
        "function": Mask.from_function(lambda b, h, q, k: (q + k + b + h) % 3 != 0),
    }


def test_joined_masks_are_the_and_of_both():
    each = one_of_each()
    alone = {name: seen(mask) for name, mask in each.items()}
    assert not any(x.all() for x in alone.values())
    names = list(each)
    for n, first in enumerate(names):
        second = names[(n + 3) % len(names)]
        if {first, second} == {"causal", "prefix"}:
            continue
        np.testing.assert_array_equal(seen(each[first] & each[second]), alone[first] & alone[second], err_msg=f"{first} & {second}")
    everything = [name for name in names if name != "prefix"]
    joined = each["causal"]
    for name in everything[1:]:
        joined &= each[name]
    np.testing.assert_array_equal(seen(joined), np.logical_and.reduce([alone[name] for name in everything]))


def test_words_are_the_masks():
    window, lengths = (3, 1), np.array([4, 11])
    got = seen(is_causal=True, local_window_size=window, key_value_seq_lengths=lengths, query_seq_lengths=lengths, q_offset=2)
    np.testing.assert_array_equal(got, seen(Mask.causal() & Mask.sliding_window(*window) & Mask.lengths(lengths, lengths), q_offset=2))
    np.testing.assert_array_equal(seen(local_window_size=3), seen(Mask.sliding_window(3, 3)))


def test_repeated_rules_are_the_tighter_of_each():
    both = Mask.prefix(3) & Mask.prefix(np.array([1, 9])) & Mask.lengths(key=np.array([4, 5])) & Mask.lengths(key=np.array([9, 2]))
    np.testing.assert_array_equal(seen(both), seen(Mask.prefix(np.array([1, 3])) & Mask.lengths(key=np.array([4, 2]))))
    np.testing.assert_array_equal(seen(Mask.chunked(4) & Mask.chunked(4)), seen(Mask.chunked(4)))
    np.testing.assert_array_equal(
        seen(Mask.sliding_window(2, None) & Mask.sliding_window(5, 3) & Mask.causal()), seen(Mask.sliding_window(2, 0))
    )


def test_prefix_with_causal_raises():
    for words in ({"mask": Mask.prefix(3), "is_causal": True}, {"mask": Mask.prefix(np.array([3, 4])) & Mask.causal()}):
        with pytest.raises(ValueError, match="prefix already contains the causal rule"):
            seen(**words)


def test_rules_that_cannot_be_joined_say_so():
    with pytest.raises(NotImplementedError, match=r"prefix cannot be joined with a window bounded on the right.*from_function"):
        seen(Mask.prefix(3) & Mask.sliding_window(2, 2))
    with pytest.raises(NotImplementedError, match=r"two sizes, 3 and 4.*from_function"):
        seen(Mask.chunked(3) & Mask.chunked(4))


# ------------------------------------------------------------------------------------------------ predicates
def test_functions_see_indices_operands_and_captured_arrays():
    random = np.random.default_rng(1)
    rows, columns = random.integers(0, 9, (BATCH, Q_LEN)), random.integers(0, 9, KV_LEN)
    heads, scalar = np.array([0, 4]), np.array([1, -2])
    table = jnp.asarray(random.random((BATCH, 2, KV_LEN)) < 0.7)
    function = lambda b, h, q, k, row, col, head, scalar: (row + head + scalar >= col) & table[b, h, k] & (q != k)
    operands = Mask.from_function(function, rows, columns, heads, scalar, per=("query", "key", "head", "scalar"))
    b, h, q, k = np.ogrid[:BATCH, :2, :Q_LEN, :KV_LEN]
    expected = (rows[b, q] + heads[h] + scalar[b] >= columns[k]) & np.asarray(table)[b, h, k] & (q != k)
    np.testing.assert_array_equal(seen(operands), expected)
    shifted = seen(operands & Mask.causal(), q_offset=2)
    np.testing.assert_array_equal(shifted, expected & (k <= q + 2))  # functions see row numbers, the other rules positions

    @jax.jit
    def traced(table, rows):
        inner = lambda b, h, q, k, row: table[b, h, k] & (row > 3)
        zeros = lambda length: jnp.zeros((BATCH, length, 2, 1))
        mask = Mask.from_function(inner, rows, per=("query",))
        request = api.prepare(zeros(Q_LEN), zeros(KV_LEN), zeros(KV_LEN), mask=mask)
        return reference.visible_scores(request.problem, request.operands)

    np.testing.assert_array_equal(traced(table, rows), np.asarray(table)[b, h, k] & (rows[b, q] > 3) & (k >= 0))


def test_a_function_that_depends_on_nothing():
    assert seen(Mask.from_function(lambda b, h, q, k: True)).all()
    assert not seen(Mask.from_function(lambda b, h, q, k: jnp.bool_(False))).any()


@pytest.mark.parametrize("lead", [(), (1,), (2,), (3, 2), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (4, 5), (3, 13), (100, 2)], ids=str)
def test_from_blocks(lead, sizes):
    block_q, block_kv = sizes
    blocks = np.random.default_rng(2).random((*lead, -(-Q_LEN // block_q), -(-KV_LEN // block_kv))) < 0.5
    i, j = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)
    got = seen(Mask.from_blocks(blocks, *sizes), batch=(2, 3))
    np.testing.assert_array_equal(got, np.broadcast_to(blocks[..., i // block_q, j // block_kv], got.shape))


@pytest.mark.parametrize("shape", [(), (13,), (9, 1), (2, 9, 13), (3, 1, 9, 13), (2, 1, 1, 1, 13), (2, 3, 2, 9, 13)], ids=str)
def test_dense_masks_align_right(shape):
    dense = np.random.default_rng(3).random(shape) < 0.6
    got = seen(dense, batch=(2, 3))
    np.testing.assert_array_equal(got, np.broadcast_to(dense, got.shape))


def test_extra_batch_axes():
    batch = (2, 3)
    random = np.random.default_rng(4)
    lengths, offset = random.integers(0, 14, batch), random.integers(-5, 6, batch)
    ids = np.sort(random.integers(0, 3, (*batch, KV_LEN)))
    i, j = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)
    got = seen(
        batch=batch, is_causal=True, q_offset=offset, key_value_seq_lengths=lengths, q_segment_ids=ids[..., :Q_LEN], kv_segment_ids=ids
    )
    per = lambda x: x[..., None, None]
    expected = (j <= i + per(offset)) & (j < per(lengths)) & (ids[..., :Q_LEN, None] == ids[..., None, :])
    np.testing.assert_array_equal(got, np.broadcast_to(expected[:, :, None], got.shape))
    fewer = seen(batch=batch, key_value_seq_lengths=lengths[0], q_segment_ids=ids[0, :, :Q_LEN], kv_segment_ids=ids[:, :1])
    expected = (j < per(lengths[0])) & (ids[:1, :, :Q_LEN, None] == ids[:, :1, None, :])
    np.testing.assert_array_equal(fewer, np.broadcast_to(expected[:, :, None], got.shape))


# ------------------------------------------------------------------------------------------------ masks as values
def rows_seen(mask):
    zeros = lambda length: jnp.zeros((1, length, 1, 1))
    request = api.prepare(zeros(Q_LEN), zeros(KV_LEN), zeros(KV_LEN), mask=mask)
    return reference.visible_scores(request.problem, request.operands)[0, 0]


def test_masks_go_through_transformations():
    ids = jnp.asarray(np.sort(np.random.default_rng(5).integers(0, 3, (3, KV_LEN))))
    stacked = Mask.causal() & Mask.segments(ids[:, :Q_LEN], ids) & Mask.lengths(key=jnp.array([13, 4, 0]))
    separate = [Mask.causal() & Mask.segments(row[:Q_LEN], row) & Mask.lengths(key=n) for row, n in zip(ids, (13, 4, 0), strict=True)]
    expected = np.stack([rows_seen(mask) for mask in separate])
    assert expected[:2].any((1, 2)).all()
    assert not expected[2].any()
    np.testing.assert_array_equal(jax.jit(rows_seen)(separate[0]), expected[0])
    np.testing.assert_array_equal(jax.vmap(rows_seen)(stacked), expected)
    np.testing.assert_array_equal(jax.lax.scan(lambda carry, mask: (carry, rows_seen(mask)), 0, stacked)[1], expected)


def test_mask_structure_says_what_is_static():
    mask = Mask.causal() & Mask.sliding_window(3, None) & Mask.chunked(4) & Mask.prefix(jnp.arange(2))
    assert [x.shape for x in jax.tree.leaves(mask)] == [(2,)]
    assert jax.tree.structure(mask) == jax.tree.structure(jax.tree.map(lambda x: x + 1, mask))
    assert jax.tree.structure(mask) != jax.tree.structure(Mask.causal() & Mask.sliding_window(2, None) & Mask.chunked(4) & Mask.prefix(0))


@pytest.mark.parametrize("array", [np.ones((2, 2), bool), jnp.ones((2, 2), bool)], ids=["numpy", "jax"])
def test_a_mask_is_joined_with_a_mask_only(array):
    for join in (lambda mask: mask & array, lambda mask: array & mask):
        with pytest.raises(TypeError, match=r"joined with a Mask, got \w+. A boolean array goes to mask="):
            join(Mask.causal())


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (lambda a, b: a and b, r"a Mask is neither true nor false, .* Join rules with &\."),
        (lambda a, b: not a, r"a Mask is neither true nor false"),
        (lambda a, b: a | b, r"Masks are joined with & only\. A union or a complement is written as Mask\.from_function"),
        (lambda a, b: np.ones((2, 2), bool) | b, r"Masks are joined with & only"),
        (lambda a, b: ~a, r"Masks are joined with & only"),
    ],
    ids=["and", "not", "|", "array |", "~"],
)
def test_rules_are_dropped_by_no_other_operator(misuse, sentence):
    with pytest.raises(TypeError, match=sentence):
        misuse(Mask.causal(), Mask.chunked(4))


# ------------------------------------------------------------------------------------------------ segment ids
@pytest.mark.parametrize("dtype", ["int32", "int8", "uint16"])
def test_segment_ids(dtype):
    cu_seqlens = np.array([0, 3, 3, 7], dtype)  # the second sequence is empty
    expected = [0, 0, 0, 2, 2, 2, 2, 3, 3]
    got = segment_ids(cu_seqlens, 9)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(jax.jit(segment_ids, static_argnums=1)(cu_seqlens, 9), expected)
    np.testing.assert_array_equal(segment_ids([0, 3, 3, 7], 7), expected[:7])
