"""The reference itself: against `jax.nn.dot_product_attention`, its gradients by `jax.grad`, and a triple loop in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, Case
from oracle import reference_attention, value_and_gradients
from tolerance import assert_as_exact_as_unfused

from flash_jax import dropout_mask

# The cases that jax.nn can say too and in which every row sees a key: an empty row is where it differs.
JAX_NN = ["full", "causal", "causal_fewer_rows", "causal_more_rows", "window", "window_left", "dense_full", "dense_keys", "dense_heads"]
JAX_NN += [
    "bias_full",
    "bias_keys",
    "bias_heads",
    "bias_rows_gqa",
    "scale_negative",
    "scale_array",
    "gqa",
    "mqa",
    "one_key",
    "no_batch_axis",
]


@pytest.mark.parametrize("name", JAX_NN)
def test_equals_jax_nn(name):
    arguments, dout, dlse = BY_NAME[name].build()
    out_only = lambda attention: lambda **a: (attention(**a)[0], jnp.zeros_like(dlse))  # jax.nn's lse has no gradient
    jax_nn = lambda **a: jax.nn.dot_product_attention(**a, return_residual=True)
    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x
        exact = jax.tree.map(wide, arguments)
        expected = value_and_gradients(out_only(reference_attention), exact, dout, dlse)
        _, lse = reference_attention(**exact)
    got = value_and_gradients(out_only(jax_nn), arguments, dout, dlse)
    for x, y in ((got, expected), (value_and_gradients(out_only(reference_attention), arguments, dout, dlse), expected)):
        for n in y:
            assert_as_exact_as_unfused(f"{name}: {n}", x[n], got[n], y[n], np.float32)
    assert_as_exact_as_unfused("lse", jax_nn(**arguments)[1], reference_attention(**arguments)[1], lse, np.float32)


def _row(q, key, value, bias, seen, keep, *, scale, cap, sink, rate):
    """One row of attention, written as the sentence says it."""
    logits = []
    for j in range(len(key)):
        s = scale * sum(a * b for a, b in zip(q, key[j], strict=True))
        logits.append(cap * math.tanh(s / cap) + bias[j])
    visible = [j for j in range(len(key)) if seen[j]]
    if not visible:
        return [0.0] * len(value[0]), sink
    top = max([logits[j] for j in visible] + [sink])
    total = sum(math.exp(logits[j] - top) for j in visible) + math.exp(sink - top)
    weights = {j: math.exp(logits[j] - top) / total * keep[j] / (1 - rate) for j in visible}
    return [sum(weights[j] * value[j][d] for j in visible) for d in range(len(value[0]))], top + math.log(total)


def test_equals_a_triple_loop():
    arguments, _, _ = BY_NAME["everything"].build()
    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x
        out, lse = (np.asarray(x) for x in reference_attention(**jax.tree.map(wide, arguments)))
    a = {n: np.asarray(x) if isinstance(x, jax.Array) and n != "dropout_key" else x for n, x in arguments.items()}
    keep = np.asarray(dropout_mask(a["dropout_key"], 0.2, (2, 4, 70, 70)))
    i, j = np.arange(70)[:, None], np.arange(70)
    for b, h in ((0, 0), (1, 3)):
        seen = (j <= i) & (j >= i - 40) & (i < a["query_seq_lengths"][b]) & (j < a["key_value_seq_lengths"][b])
        seen &= a["mask"][b, 0] & (a["q_segment_ids"][b][:, None] == a["kv_segment_ids"][b])
        for row in range(0, 70, 7):
            keys, values = a["key"][b, :, h // 2], a["value"][b, :, h // 2]
            options = {"scale": float(a["scale"]), "cap": 3.0, "sink": float(a["sinks"][h]), "rate": 0.2}
            values_and_lse = _row(
                a["query"][b, row, h].astype(float),
                keys.astype(float),
                values.astype(float),
                a["bias"][0, h, row].astype(float),
                seen[row],
                keep[b, h, row],
                **options,
            )
            np.testing.assert_allclose(out[b, row, h], values_and_lse[0], atol=1e-12)
            np.testing.assert_allclose(lse[b, row, h], values_and_lse[1], atol=1e-12)


def test_gradients_by_finite_differences():
    case = Case("finite_differences", BY_NAME["everything"].options, num_heads=4, num_kv_heads=2)
    arguments, dout, dlse = case.build()
    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else x
        arguments, dout, dlse = jax.tree.map(wide, (arguments, dout, dlse))
        gradients = value_and_gradients(reference_attention, arguments, dout, dlse)

        @jax.jit
        def loss(arrays):
            out, lse = reference_attention(**(arguments | arrays))
            return (out * dout).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * dlse).sum()

        for name in ("query", "key", "value", "bias", "scale", "sinks"):
            x = arguments[name]
            direction = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape))
            step = 1e-6
            slope = (loss({name: x + step * direction}) - loss({name: x - step * direction})) / (2 * step)
            np.testing.assert_allclose(slope, (gradients[f"d{name}"] * direction).sum(), rtol=1e-6, atol=1e-7, err_msg=name)
