"""Dropout bits: what they are, that they never change, that they look random, and that attention applies exactly them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from flash_jax import dropout, dropout_mask, flash_attention

KEYS = {
    "typed": jax.random.key(0),
    "raw": jnp.array([0, 42], jnp.uint32),
    "four words": jnp.array([0xDEADBEEF, 1, 2, 0xFFFFFFFF], jnp.uint32),
}

# Row keys of batch entry 1, head 0 at positions 0, 1, -1; bits of entry 0, head 1, position 1 at COLUMNS. They must never change:
# a saved key would give other weights.
COLUMNS = [0, 1, 2, 1000, 2**31 - 1]
GOLDEN = {
    "typed": ([0x355F1F03, 0x7F52A50A, 0xE363CDC6], [0x39AB28DF, 0xC6C982DC, 0xDFA3EBC8, 0x94185144, 0x799DF149]),
    "raw": ([0x8BB56A1A, 0x05AAD494, 0xCEAFE002], [0xBFCEB690, 0x9C0D5749, 0xF6EE167D, 0x83978DB8, 0x21F32606]),
    "four words": ([0x6385BBB0, 0xF647FE2B, 0x403CD45E], [0x457729D8, 0xBB4DD38D, 0x4A4AC245, 0x19B71F71, 0x2D41A51E]),
}
GOLDEN_MASK = ["10010011", "11001001", "01101010", "01110000", "00011101", "01011001", "00001100", "10100100"]


def numpy_mix(row_key, position):
    """The mixer in 64-bit integers modulo 2^32."""
    row_key, position = np.broadcast_arrays(np.asarray(row_key, np.uint64), np.asarray(position, np.uint64))
    modulo = np.uint64(2**32 - 1)
    x = row_key ^ (position * np.uint64(0x9E3779B9) & modulo)
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x7FEB352D) & modulo
    x ^= x >> np.uint64(15)
    x = (x + row_key & modulo) * np.uint64(0x846CA68B) & modulo
    return x ^ (x >> np.uint64(16))


def numpy_bits(key_words, batch, num_heads, positions, kv_len):
    """Bits `[batch, num_heads, q_len, kv_len]`, and the row keys."""
    state = 0x9E3779B9
    for word in np.asarray(key_words):
        state = numpy_mix(state, word)
    b, h, q, j = np.ogrid[:batch, :num_heads, : len(positions), :kv_len]
    rows = numpy_mix(numpy_mix(numpy_mix(state, b), h), np.asarray(positions)[q] % 2**32)
    return numpy_mix(rows, j), rows[..., 0]


def levels(key, shape, n=4, **options):
    """The bits cut into `n` equally likely levels, from the public masks alone."""
    return sum(np.asarray(dropout_mask(key, m / n, shape, **options)).astype(int) for m in range(1, n))


# --------------------------------------------------------------------------------------------------- which bits
@pytest.mark.parametrize("name", KEYS)
def test_golden_vectors(name):
    rows = dropout.row_keys(KEYS[name], 2, 2, jnp.array([[0, 1, -1]], jnp.int32))
    assert rows.dtype == jnp.uint32
    assert rows.shape == (2, 2, 3)
    golden_rows, golden_bits = GOLDEN[name]
    np.testing.assert_array_equal(rows[1, 0], np.array(golden_rows, np.uint32))
    bits = dropout._mix(rows[0, 1, 1], jnp.array(COLUMNS, jnp.uint32))
    np.testing.assert_array_equal(bits, np.array(golden_bits, np.uint32))


def test_golden_mask():
    mask = dropout_mask(jax.random.key(0), 0.5, (2, 2, 2, 8))
    assert ["".join(map(str, row)) for row in np.asarray(mask, int).reshape(8, 8)] == GOLDEN_MASK


@pytest.mark.parametrize("name", KEYS)
def test_bits_are_those_of_64_bit_arithmetic(name):
    key = KEYS[name]
    words = jax.random.key_data(key) if name == "typed" else key
    positions = np.array([-3, -2, 0, 1, 7, 2**29])
    bits, rows = numpy_bits(words, 3, 2, positions, 50)
    got = dropout.row_keys(key, 3, 2, jnp.asarray(positions, jnp.int32)[None])
    np.testing.assert_array_equal(got, rows)
    for rate in (0.0, 0.1, 0.5, 0.999, 1 - 2**-40):
        kept = dropout.keep(got[..., None], jnp.arange(50), rate)
        np.testing.assert_array_equal(kept, bits >= min(int(rate * 2**32), 2**32 - 1))


def test_typed_and_raw_keys_are_the_same():
    key = jax.random.key(5)
    typed, raw, numpy = (dropout_mask(k, 0.5, (2, 8, 64)) for k in (key, jax.random.key_data(key), np.asarray(jax.random.key_data(key))))
    np.testing.assert_array_equal(typed, raw)
    np.testing.assert_array_equal(typed, numpy)


def test_threshold():
    assert dropout.threshold(0) == 0
    assert dropout.threshold(0.25) == 2**30
    assert dropout.threshold(np.nextafter(1, 0)) == 2**32 - 1
    assert np.asarray(dropout_mask(jax.random.key(0), 0.0, (2, 8, 64))).all()


# --------------------------------------------------------------------------------------------------- how random
SHAPE = (4, 4, 128, 256)  # batch, heads, rows, keys: 2^19 bits


def assert_uncorrelated(a, b, what):
    """Two +-1 arrays: within 5 standard deviations of 0."""
    correlation = np.mean(a * b) * np.sqrt(a.size)
    assert abs(correlation) < 5, f"{what}: {correlation:.1f} standard deviations"


def assert_independent(a, b, what):
    """Chi-square of the table of pairs, 15 degrees of freedom for 4 levels each; above 50 has probability 1e-5."""
    table = np.bincount((4 * a + b).ravel(), minlength=16)
    expected = a.size / 16
    chi_square = ((table - expected) ** 2 / expected).sum()
    assert chi_square < 50, f"{what}: chi-square {chi_square:.1f}"


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_frequency(rate):
    kept = np.asarray(dropout_mask(jax.random.key(3), rate, SHAPE))
    for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (2, 3)):  # overall, for each key, row, (batch entry, head)
        n = np.prod([SHAPE[axis] for axis in axes])
        deviation = (kept.mean(axes) - (1 - rate)) / np.sqrt(rate * (1 - rate) / n)
        assert np.abs(deviation).max() < 5


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbours_are_independent(seed):
    bits = levels(jax.random.key(seed), SHAPE)
    signs = np.where(bits >= 2, 1, -1)
    for axis, name in enumerate(("batch entry", "head", "row", "key")):
        for distance in (1, 2, 3, 16, 64):
            if distance < SHAPE[axis]:
                ahead, behind = (np.arange(distance, SHAPE[axis]), np.arange(SHAPE[axis] - distance))
                what = f"{name}s {distance} apart"
                assert_uncorrelated(signs.take(ahead, axis), signs.take(behind, axis), what)
                assert_independent(bits.take(ahead, axis), bits.take(behind, axis), what)
    assert_independent(bits[..., 1:, 1:], bits[..., :-1, :-1], "diagonals")
    assert_independent(bits[..., 1:, :-1], bits[..., :-1, 1:], "counter-diagonals")
    off = ~np.eye(4, dtype=bool)
    assert_independent(bits[off], bits.swapaxes(0, 1)[off], "batch and head exchanged")


def test_neighbouring_keys_are_independent():
    raw = lambda *words: jnp.array(words, jnp.uint32)
    keys = [raw(0, 0), raw(0, 1), raw(1, 0), raw(1, 1), raw(0, 2), raw(2**31, 0), raw(0, 2**31), jax.random.fold_in(jax.random.key(0), 1)]
    drawn = [levels(key, (2, 64, 256)) for key in keys]
    for n, a in enumerate(drawn):
        for m, b in enumerate(drawn[:n]):
            assert_independent(a, b, f"keys {n} and {m}")


def test_rows_are_no_shifted_copies_of_each_other():
    signs = np.where(np.asarray(dropout_mask(jax.random.key(2), 0.5, (1, 33, 4096))), 1.0, -1.0)[0]
    spectrum = np.fft.fft(signs)
    shifted = np.fft.ifft(spectrum[1:] * spectrum[:-1].conj()).real / np.sqrt(4096)  # every cyclic shift of neighbouring rows
    assert np.abs(shifted).max() < 6


def test_row_keys_do_not_collide():
    rows = np.asarray(dropout.row_keys(jax.random.key(0), 4, 4, jnp.arange(256)[None]))
    assert np.unique(rows).size == rows.size


# --------------------------------------------------------------------------------------------------- what attention applies
Q_LEN, KV_LEN, HEADS, RATE = 10, 24, 2, 0.4


def shown(batch=(2,), block_sizes=None, **options):
    """The mask that attention applies: equal probabilities, and values that are the identity. `[*batch, heads, q_len, kv_len]`."""
    q, k = jnp.zeros((*batch, Q_LEN, HEADS, 4)), jnp.zeros((*batch, KV_LEN, HEADS, 4))
    v = jnp.broadcast_to(jnp.eye(KV_LEN)[:, None], (*batch, KV_LEN, HEADS, KV_LEN))
    out = flash_attention(q, k, v, dropout_rate=RATE, block_sizes=block_sizes, **options)
    out = np.asarray(jnp.swapaxes(out, -3, -2)) * KV_LEN * (1 - RATE)  # 1 where kept, 0 where not
    np.testing.assert_allclose(out, out > 0.5, rtol=1e-5)
    return out > 0.5


@pytest.mark.parametrize("block_sizes", [None, (4, 8), (3, 7)], ids=str)
def test_attention_applies_the_mask_whatever_the_tiles(block_sizes):
    key = jax.random.key(1)
    expected = dropout_mask(key, RATE, (2, HEADS, Q_LEN, KV_LEN))
    np.testing.assert_array_equal(shown(block_sizes=block_sizes, dropout_key=key), expected)


def test_the_backward_applies_the_same_mask():
    key = jax.random.key(1)
    q, k = jnp.zeros((2, Q_LEN, HEADS, 4)), jnp.zeros((2, KV_LEN, HEADS, 4))
    attend = functools.partial(flash_attention, q, k, dropout_rate=RATE, dropout_key=key, block_sizes=(4, 8))
    pullback = jax.vjp(attend, jnp.zeros((2, KV_LEN, HEADS, Q_LEN)))[1]
    dout = jnp.broadcast_to(jnp.eye(Q_LEN)[:, None], (2, Q_LEN, HEADS, Q_LEN))  # so dv is the transposed probabilities
    (dv,) = pullback(dout)
    kept = dropout_mask(key, RATE, (2, HEADS, Q_LEN, KV_LEN))
    np.testing.assert_allclose(dv, np.transpose(kept, (0, 3, 1, 2)) / (KV_LEN * (1 - RATE)), rtol=1e-5)


def test_broadcast_dropout():
    key = jax.random.key(4)
    got = shown(dropout_key=key, broadcast_dropout=True)
    np.testing.assert_array_equal(got, dropout_mask(key, RATE, got.shape, broadcast_dropout=True))
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1, :1], got.shape))
    np.testing.assert_array_equal(got[0, 0], dropout_mask(key, RATE, got.shape)[0, 0])


@pytest.mark.parametrize("q_offset", [7, np.array([3, -5])], ids=str)
@pytest.mark.parametrize("broadcast", [False, True])
def test_bits_belong_to_the_position(q_offset, broadcast):
    key = jax.random.key(6)
    got = shown(dropout_key=key, q_offset=q_offset, broadcast_dropout=broadcast)
    np.testing.assert_array_equal(got, dropout_mask(key, RATE, got.shape, q_offset=q_offset, broadcast_dropout=broadcast))
    whole = np.asarray(dropout_mask(key, RATE, (2, HEADS, Q_LEN + 10, KV_LEN), q_offset=-5, broadcast_dropout=broadcast))
    whole = np.concatenate([whole, np.asarray(dropout_mask(key, RATE, (2, HEADS, 5, KV_LEN), q_offset=15, broadcast_dropout=broadcast))], 2)
    for entry, first in enumerate(np.broadcast_to(q_offset, 2) + 5):
        np.testing.assert_array_equal(got[entry], whole[entry, :, first : first + Q_LEN])


def test_extra_batch_axes_are_counted_in_order():
    key = jax.random.key(8)
    offset = np.array([[0, 1, 2], [3, 4, 5]])
    got = shown(batch=(2, 3), dropout_key=key, q_offset=offset)
    np.testing.assert_array_equal(got, dropout_mask(key, RATE, got.shape, q_offset=offset))
    np.testing.assert_array_equal(got.reshape(6, *got.shape[2:]), dropout_mask(key, RATE, (6, *got.shape[2:]), q_offset=offset.ravel()))


@pytest.mark.parametrize("shared_key", [False, True])
def test_vmap_equals_separate_calls(shared_key):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((3, 2, n, HEADS, 8), np.float32)) for n in (Q_LEN, KV_LEN, KV_LEN))
    keys = jax.random.key(9) if shared_key else jax.random.split(jax.random.key(9), 3)
    attend = lambda q, k, v, key: flash_attention(q, k, v, dropout_rate=RATE, dropout_key=key)
    together = jax.vmap(attend, (0, 0, 0, None if shared_key else 0))(q, k, v, keys)
    for n in range(3):
        separate = attend(q[n], k[n], v[n], keys if shared_key else keys[n])
        np.testing.assert_allclose(together[n], separate, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_shard_map_needs_the_mesh_position_in_the_key():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    q, k = jnp.zeros((4, Q_LEN, HEADS, 4)), jnp.zeros((4, KV_LEN, HEADS, 4))
    v = jnp.broadcast_to(jnp.eye(KV_LEN)[:, None], (4, KV_LEN, HEADS, KV_LEN))
    spec, key = PartitionSpec("data"), jax.random.key(1)

    def masks(fold):
        def attend(q, k, v, key):
            key = jax.random.fold_in(key, jax.lax.axis_index("data")) if fold else key
            return flash_attention(q, k, v, dropout_rate=RATE, dropout_key=key)

        sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec()), out_specs=spec))
        return np.asarray(jnp.swapaxes(sharded(q, k, v, key), 1, 2)) > 0

    per_shard = [dropout_mask(jax.random.fold_in(key, n), RATE, (2, HEADS, Q_LEN, KV_LEN)) for n in range(2)]
    folded = masks(fold=True)
    np.testing.assert_array_equal(folded, np.concatenate(per_shard))
    assert (folded[:2] != folded[2:]).mean() > 0.3
    same = masks(fold=False)
    np.testing.assert_array_equal(same[:2], same[2:])
