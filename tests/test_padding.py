"""Whatever padding holds, NaN and infinities included, reaches no output and no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import close

from flash_jax import Mask, api, flash_attention, reference

BATCH, Q_LEN, KV_LEN, HEADS, D = 2, 9, 13, 2, 4
RANDOM = np.random.default_rng(0)
normal = lambda *shape: RANDOM.standard_normal(shape, np.float32)
ARRAYS = {
    "query": normal(BATCH, Q_LEN, HEADS, D),
    "key": normal(BATCH, KV_LEN, HEADS, D),
    "value": normal(BATCH, KV_LEN, HEADS, D),
    "bias": normal(BATCH, HEADS, Q_LEN, KV_LEN),
}
DOUT, DLSE = normal(BATCH, Q_LEN, HEADS, D), normal(BATCH, Q_LEN, HEADS)

CASES = {
    "known before tracing": {"is_causal": True, "q_offset": -4},
    "lengths": {"key_value_seq_lengths": np.array([5, 0]), "query_seq_lengths": np.array([9, 4])},
    "window, offset and lengths": {
        "local_window_size": (2, 1),
        "q_offset": np.array([-3, 8]),
        "key_value_seq_lengths": np.array([4, 12]),
        "query_seq_lengths": np.array([8, 9]),
    },
    "segments": {
        "q_segment_ids": np.array([[0] * 5 + [7] * 4, [9] * 9]),
        "kv_segment_ids": np.array([[0] * 5 + [8] * 8, [3] * 13]),
    },
    "dense": {"mask": RANDOM.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.15},
    # With the causal rule: in head 0 no row sees key 4, which each rule shows to some.
    "function": {"is_causal": True, "mask": Mask.from_function(lambda b, h, q, k: (k < 5) & (q > 2) & ((k != 4) | (q < 4 + h)))},
    "cap and dropout": {
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.3,
        "dropout_key": jax.random.key(0),
        "is_causal": True,
        "q_offset": -4,
        "key_value_seq_lengths": np.array([5, 3]),
    },
}


def poisoned(options, poison):
    """Arrays and cotangents with `poison` wherever nothing is visible: keys, values, scores of the bias, whole rows."""
    request = api.prepare(**ARRAYS, **options)
    seen = np.asarray(reference.visible_scores(request.problem, request.operands))
    keys, rows = (x.swapaxes(1, 2) for x in (seen.any(2), seen.any(3)))
    assert not keys.all()
    assert not rows.all()
    per = lambda where, x: np.where(where, x, np.float32(poison))
    arrays = {
        "query": per(rows[..., None], ARRAYS["query"]),
        "key": per(keys[..., None], ARRAYS["key"]),
        "value": per(keys[..., None], ARRAYS["value"]),
        "bias": per(seen, ARRAYS["bias"]),
    }
    return arrays, per(rows[..., None], DOUT), per(rows, DLSE)


@pytest.mark.parametrize("block_sizes", [None, (4, 4)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CASES)
def test_poison_reaches_nothing(name, with_bias, block_sizes):
    options = CASES[name]
    wanted = [name for name in ARRAYS if with_bias or name != "bias"]

    @jax.jit
    def run(arrays, dout, dlse):
        attend = lambda arrays: flash_attention(**arrays, **options, return_residual=True, block_sizes=block_sizes)
        results, pullback = jax.vjp(attend, {name: arrays[name] for name in wanted})
        return *results, *pullback((dout, dlse))

    expected = run(ARRAYS, DOUT, DLSE)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected[2:]))
    for poison in (jnp.nan, jnp.inf, -jnp.inf, 3e38):
        jax.tree.map(np.testing.assert_array_equal, run(*poisoned(options, poison)), expected)


@pytest.mark.parametrize("block_sizes", [None, (4, 4)], ids=str)
def test_a_value_that_is_seen_and_not_finite_changes_no_lse(block_sizes):
    options = {"is_causal": True, "return_residual": True, "implementation": "xla", "block_sizes": block_sizes}
    value = ARRAYS["value"].copy()
    value[0, 3, 1] = np.inf
    out, lse = flash_attention(ARRAYS["query"], ARRAYS["key"], value, **options)
    want, want_lse = flash_attention(*(ARRAYS[n] for n in ("query", "key", "value")), **options)
    np.testing.assert_array_equal(lse, want_lse)
    assert np.isinf(out[0, 3:, 1]).all()
    np.testing.assert_array_equal(out[:, :, 0], want[:, :, 0])
    np.testing.assert_array_equal(out[1], want[1])


def test_nan_in_a_bias_that_is_seen_is_no_mask():
    bias = ARRAYS["bias"].copy()
    bias[0, 1, 3, 4] = np.nan
    out = np.asarray(flash_attention(**(ARRAYS | {"bias": bias}), implementation="xla", block_sizes=(4, 4)))
    assert np.isnan(out[0, 3, 1]).all()
    assert np.isnan(out).sum() == D


def test_a_sink_of_minus_infinity_is_none():
    """Empty rows of that head have nothing at all: out 0, lse -inf, and no gradient."""
    args = (ARRAYS["query"], ARRAYS["key"], ARRAYS["value"])
    run = lambda *a, sinks: flash_attention(*a, key_value_seq_lengths=np.array([5, 0]), sinks=sinks, return_residual=True)

    def loss(*a, sinks=None):
        out, lse = run(*a, sinks=sinks)
        return (out * DOUT).sum() + jnp.where(jnp.isfinite(lse), lse * DLSE, 0).sum(), (out, lse)

    without, aux = jax.grad(loss, (0, 1, 2), has_aux=True)(*args)
    *gradients, dsinks = jax.grad(lambda *a: loss(*a[:3], sinks=a[3])[0], (0, 1, 2, 3))(*args, jnp.full(HEADS, -jnp.inf))
    np.testing.assert_array_equal(dsinks, np.zeros(HEADS))
    close((tuple(gradients), run(*args, sinks=jnp.full(HEADS, -jnp.inf))), (without, aux), 1e-6)
