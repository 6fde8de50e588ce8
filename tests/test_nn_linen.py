"""Flax linen: the drop-in attention function against Flax's own, and our module against a dense one written out here."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from helpers import normal
from nn_support import BATCH, EVERYTHING, FEATURES, LENGTH, SEGMENTS, assert_close, cast, check, dense_module, value_and_gradients

from flash_jax import Mask, dropout_mask, flash_attention
from flash_jax.nn.linen import GroupedQueryAttention, attention_fn

X = jnp.ones((1, 4, 8))


MASKS = {
    "none": None,
    "causal": nn.make_causal_mask(jnp.ones((BATCH, LENGTH))),  # float32
    "padding": nn.make_attention_mask(jnp.ones((BATCH, LENGTH)), jnp.arange(LENGTH) < jnp.array([[7], [12]])),
    "bool": jax.random.bernoulli(jax.random.key(3), 0.5, (BATCH, 2, LENGTH, LENGTH)).at[..., 0].set(True),
}


@pytest.mark.parametrize(
    ("mask", "dtype", "cross"),
    [("none", jnp.float32, True), ("causal", jnp.float32, False), ("padding", jnp.bfloat16, False), ("bool", jnp.float32, False)],
)
def test_attention_fn_equals_flax(mask, dtype, cross):
    flax = functools.partial(nn.MultiHeadDotProductAttention, 2, deterministic=True, dropout_rate=0.5, use_bias=False)
    modules = [flax(attention_fn=attention_fn), flax()]
    inputs = [normal(n, BATCH, LENGTH, FEATURES) for n in range(1 + cross)]
    params = modules[0].init(jax.random.key(0), *inputs)
    check(*(lambda p, *x, m=m: m.apply(p, *x, mask=MASKS[mask]) for m in modules), params, *inputs, dtype=dtype)


def test_attention_fn_takes_causality_and_options_by_partial():
    flax = functools.partial(nn.MultiHeadDotProductAttention, 2, use_bias=False)
    modules = [flax(attention_fn=functools.partial(attention_fn, is_causal=True, local_window_size=(3, 0))), flax()]
    x = normal(0, BATCH, LENGTH, FEATURES)
    i = jnp.arange(LENGTH)
    mask = ((i[:, None] >= i) & (i[:, None] - i <= 3))[None, None]
    params = modules[0].init(jax.random.key(0), x)
    check(lambda p, x: modules[0].apply(p, x), lambda p, x: modules[1].apply(p, x, mask=mask), params, x)


def test_attention_fn_in_flax_decoding():
    x = normal(0, BATCH, LENGTH, FEATURES)
    full = nn.MultiHeadDotProductAttention(2)
    decoder = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn, decode=True)
    variables = decoder.init(jax.random.key(0), x)
    params, cache = variables["params"], variables["cache"]
    step = jax.jit(lambda cache, x: decoder.apply({"params": params, "cache": cache}, x, mutable=["cache"]))
    outs = []
    for n in range(LENGTH):
        out, variables = step(cache, x[:, n : n + 1])
        cache = variables["cache"]
        outs.append(out)
    apply = lambda params, x: full.apply({"params": params}, x, mask=MASKS["causal"])
    unfused = apply(params, x)
    with jax.enable_x64(True):
        assert_close(jnp.concatenate(outs, 1), unfused, apply(*cast((params, x), jnp.float64)))


COUNTING = {
    "is_causal": {"is_causal": True},
    "local_window_size": {"local_window_size": (3, 0)},
    "mask": {"mask": Mask.prefix(3) & Mask.chunked(4)},
    "is_causal and local_window_size": {"is_causal": True, "local_window_size": 2},
}


@pytest.mark.parametrize("names", COUNTING)
def test_a_rule_that_counts_positions_needs_to_know_where_a_cache_stands(names):
    q, k, v = (normal(n, 1, length, 1, 8) for n, length in enumerate((1, 6, 6)))
    attend = functools.partial(attention_fn, **COUNTING[names])
    with pytest.raises(ValueError, match=f"q_offset must be given when {names} counts positions .* got none with 1 and 6: .*GroupedQuery"):
        attend(q, k, v)
    assert bool((attend(q, k, v, q_offset=4) == flash_attention(q, k, v, **COUNTING[names], q_offset=4)).all())
    assert attend(k, k, v).shape == k.shape  # as many queries as keys: both begin at 0
    assert attention_fn(q, k, v, mask=Mask.lengths(key=jnp.array([3]))).shape == q.shape


@pytest.mark.parametrize("names", ["is_causal", "local_window_size"])
def test_attention_fn_refuses_to_count_positions_in_flax_decoding(names):
    decoder = nn.MultiHeadDotProductAttention(2, attention_fn=functools.partial(attention_fn, **COUNTING[names]), decode=True)
    variables = decoder.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=f"q_offset must be given when {names} counts positions .* got none with 1 and 4"):
        decoder.apply(variables, X[:, :1], mutable=["cache"])


def dense_attention(q, k, v, kept, rate):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]))
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(kept, p / (1 - rate), 0), v)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_dropout_mask(broadcast):
    rate, key = 0.3, jax.random.key(5)
    q, k, v = (normal(n, BATCH, LENGTH, 2, 8) for n in range(3))
    attend = functools.partial(attention_fn, dropout_rng=key, dropout_rate=rate, broadcast_dropout=broadcast)
    out = jax.jit(attend)(q, k, v)
    kept = dropout_mask(key, rate, (BATCH, 2, LENGTH, LENGTH), broadcast_dropout=broadcast)
    assert bool((kept[0, 0] == kept[1, 1]).all()) == broadcast
    unfused = dense_attention(q, k, v, kept, rate)
    with jax.enable_x64(True):
        assert_close(out, unfused, dense_attention(*cast([q, k, v], jnp.float64), kept=kept, rate=rate))


def test_dropout_through_flax_module():
    module = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn, dropout_rate=0.3)
    x = normal(0, BATCH, LENGTH, FEATURES)
    params = module.init(jax.random.key(0), x, deterministic=True)
    apply = jax.jit(lambda seed: module.apply(params, x, rngs={"dropout": seed}, deterministic=False))
    a, b, c = (apply(jax.random.key(seed)) for seed in (1, 1, 2))
    assert bool((a == b).all())
    assert not bool((a == c).any())
    off: Any = module.apply(params, x, deterministic=True)
    without: Any = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn).apply(params, x)
    assert bool((off == without).all())
    assert not bool((a == off).any())


def test_dtype_promotion():
    q, k, v = (normal(n, 1, 4, 1, 8) for n in range(3))
    assert attention_fn(q.astype(jnp.bfloat16), k, v).dtype == jnp.float32
    assert attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    halves = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    assert bool((attention_fn(q, k, v, dtype=jnp.bfloat16) == flash_attention(*halves)).all())


@pytest.mark.parametrize(
    ("precision", "written"),
    [
        (None, "precision = [HIGHEST, HIGHEST]"),  # float32 products are not rounded
        ("default", "precision = [DEFAULT, DEFAULT]"),
        (jax.lax.Precision.HIGH, "precision = [HIGH, HIGH]"),
        ((jax.lax.Precision.HIGH, jax.lax.Precision.HIGH), "precision = [HIGH, HIGH]"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "lhs_precision_type = f32"),
    ],
)
def test_precision_reaches_every_product(precision, written):
    x = normal(0, 1, 8, 1, 8)
    loss = lambda x: attention_fn(x, x, x, precision=precision).sum()
    products = [line for line in jax.jit(jax.grad(loss)).lower(x).as_text().splitlines() if "dot_general" in line]
    assert len(products) >= 7  # two forward, five backward
    assert all(written in line for line in products)


REFUSED = {
    "module": ({"module": object()}, NotImplementedError, "module .* must be None"),
    "qk_einsum": ({"qk_attn_weights_einsum": jnp.einsum}, NotImplementedError, "qk_attn_weights_einsum must be None"),
    "value_einsum": ({"attn_weights_value_einsum": jnp.einsum}, NotImplementedError, "attn_weights_value_einsum must be None"),
    "positions": ({"input_positions": jnp.arange(4)}, NotImplementedError, "input_positions must be None"),
    "precision_pair": ({"precision": ("high", "highest")}, NotImplementedError, "precision must be one for both factors"),
    "precision": ({"precision": "best"}, ValueError, "precision must be None or what jax.default_matmul_precision knows, got 'best'"),
    "dropout_rng": ({"dropout_rate": 0.1}, ValueError, "dropout_rng is required"),
    "dropout_rate": ({"dropout_rate": 1.5, "dropout_rng": jax.random.key(0)}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.5"),
    "rate_boolean": ({"dropout_rate": False}, TypeError, "dropout_rate must be a number, got bool"),
    "cap_false": ({"logits_soft_cap": False}, TypeError, "logits_soft_cap must be a number, got bool"),
    "bias_false": ({"bias": False}, TypeError, "bias must have a float dtype, got bool"),
    "option": ({"windw": 3}, TypeError, "windw"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_attention_fn_refuses(case):
    options, error, sentence = REFUSED[case]
    x = normal(0, 1, 4, 1, 8)
    with pytest.raises(error, match=sentence):
        attention_fn(x, x, x, **options)


def test_flax_modules_requests_are_refused():
    x = normal(0, 1, 4, 8)
    einsum = nn.MultiHeadDotProductAttention(
        1, attention_fn=attention_fn, qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum
    )
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum must be None"):
        einsum.init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        nn.MultiHeadDotProductAttention(1, attention_fn=attention_fn).init(jax.random.key(0), x, sow_weights=True)


# ------------------------------------------------------------------------------------------------------- our module
def test_module_equals_flax_with_its_parameters():
    with_bias = [module(2).init(jax.random.key(0), X) for module in (GroupedQueryAttention, nn.MultiHeadDotProductAttention)]
    assert jax.tree.map(jnp.shape, with_bias[0]) == jax.tree.map(jnp.shape, with_bias[1])
    ours, flax = GroupedQueryAttention(2, use_bias=False), nn.MultiHeadDotProductAttention(2, use_bias=False)
    x, y = normal(0, BATCH, LENGTH, FEATURES), normal(1, BATCH, 9, FEATURES)
    params = flax.init(jax.random.key(0), x, y)
    check(lambda p, *x: ours.apply(p, *x), lambda p, *x: flax.apply(p, *x), params, x, y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_module_with_everything_equals_dense(dtype):
    module = GroupedQueryAttention(**EVERYTHING)
    x = normal(0, BATCH, LENGTH, FEATURES)
    params = module.init(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, params["params"])
    assert shapes["key"]["kernel"] == (FEATURES, 2, 8)
    assert shapes["sinks"] == (4,)
    assert "bias" not in shapes["out"]
    check(lambda p, x: module.apply(p, x, q_segment_ids=SEGMENTS), lambda p, x: dense_module(p, x, SEGMENTS), params, x, dtype=dtype)


def test_packed_equals_separate():
    module = GroupedQueryAttention(**EVERYTHING)
    x = normal(0, 1, LENGTH, FEATURES)
    params = module.init(jax.random.key(0), x)
    apply = jax.jit(module.apply)
    packed = apply(params, x, q_segment_ids=SEGMENTS[:1])
    restarted = apply(params, x, q_segment_ids=SEGMENTS[:1], positions=jnp.array([*range(4), *range(8)]))
    separate = jnp.concatenate([apply(params, part) for part in (x[:, :4], x[:, 4:])], axis=1)
    with jax.enable_x64(True):
        params, x = cast((params, x), jnp.float64)
        reference = jax.jit(dense_module)(params, x, SEGMENTS[:1])
    for out in (packed, restarted):
        assert_close(out, separate, reference)


def test_mask_and_bias_of_the_module():
    x = normal(0, BATCH, LENGTH, FEATURES)
    bias, lengths = normal(1, 2, LENGTH, LENGTH), jnp.array([7, 12])
    ours = GroupedQueryAttention(2)
    flax = nn.MultiHeadDotProductAttention(2, attention_fn=functools.partial(nn.dot_product_attention, bias=bias))
    params = flax.init(jax.random.key(0), x)
    unfused = jax.jit(lambda p, x: flax.apply(p, x, mask=MASKS["padding"]))
    with jax.enable_x64(True):
        reference = unfused(*cast((params, x), jnp.float64))
    for mask in (MASKS["padding"], Mask.lengths(key=lengths)):
        assert_close(jax.jit(ours.apply)(params, x, mask=mask, bias=bias), unfused(params, x), reference)


def test_decoding_equals_one_call():
    x = normal(0, BATCH, LENGTH, FEATURES)
    full, decoder = GroupedQueryAttention(**EVERYTHING), GroupedQueryAttention(**EVERYTHING, decode=True)
    variables: Any = decoder.init(jax.random.key(0), x)
    params, cache = {"params": variables["params"]}, variables["cache"]
    assert cache["cached_key"].shape == (BATCH, LENGTH, 2, 8)
    step = jax.jit(lambda cache, x: decoder.apply({**params, "cache": cache}, x, mutable=["cache"]))
    outs, start = [], 0
    for n in (5, 1, 1, 4, 1):  # a prompt, tokens one at a time, several at once
        out, variables = step(cache, x[:, start : start + n])
        cache, start = variables["cache"], start + n
        outs.append(out)
    assert int(cache["cache_index"]) == LENGTH
    one_segment = jnp.zeros((BATCH, LENGTH), jnp.int32)
    unfused = jax.jit(dense_module)(params, x, one_segment)
    with jax.enable_x64(True):
        reference = jax.jit(dense_module)(*cast((params, x), jnp.float64), one_segment)
    assert_close(jnp.concatenate(outs, 1), unfused, reference)
    assert_close(jax.jit(full.apply)(params, x), unfused, reference)
    beyond, _ = step(cache, x[:, :1])
    assert bool(jnp.isnan(beyond).all())


def test_sharded_over_batch_and_heads():
    mesh = jax.make_mesh((1, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = nn.with_partitioning(jax.nn.initializers.lecun_normal(), (None, "heads", None))
    out_heads = nn.with_partitioning(jax.nn.initializers.lecun_normal(), ("heads", None, None))
    options: dict[str, Any] = {**EVERYTHING, "kernel_init": heads, "out_kernel_init": out_heads}
    module = GroupedQueryAttention(**options)
    x = normal(0, BATCH, LENGTH, FEATURES)
    boxed = module.init(jax.random.key(0), x)
    params = meta.unbox(boxed)
    placed = jax.device_put(params, nn.get_sharding(boxed, mesh))
    assert placed["params"]["key"]["kernel"].sharding.spec == jax.sharding.PartitionSpec(None, "heads", None)
    weights = normal(9, BATCH, LENGTH, FEATURES)
    one, two = (value_and_gradients(lambda p, x: module.apply(p, x), weights, p, x) for p in (params, placed))
    with jax.enable_x64(True):
        segment = jnp.zeros((BATCH, LENGTH), jnp.int32)
        reference = value_and_gradients(lambda p, x: dense_module(p, x, segment), weights, *cast((params, x), jnp.float64))
    assert_close(two, one, reference)


def rejected(module, *inputs, **options):
    return lambda: module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs, **options)


ROTARY = GroupedQueryAttention(1, rope_theta=1e4)
REJECTED = {
    "heads": (rejected(GroupedQueryAttention(4, num_kv_heads=3), X), ValueError, "multiple of num_kv_heads, got 4 and 3"),
    "head_dim": (rejected(GroupedQueryAttention(3), X), ValueError, "head_dim must be given .* 3 heads and 8"),
    "odd": (rejected(GroupedQueryAttention(1, head_dim=3, rope_theta=1e4), X), ValueError, "rope_theta needs an even head_dim, got 3"),
    "deterministic": (rejected(GroupedQueryAttention(1, dropout_rate=0.1), X), ValueError, "deterministic must be True or False"),
    "inputs_v": (rejected(GroupedQueryAttention(1), X, None, X), ValueError, "inputs_k must be given when inputs_v is"),
    "positions": (rejected(GroupedQueryAttention(1), X, positions=jnp.arange(4)), ValueError, "without rope_theta or with inputs_k"),
    "positions_shape": (
        rejected(ROTARY, X, positions=jnp.arange(3)),
        ValueError,
        r"positions must have shape \[4\] or \[1, 4\], got \[3\]",
    ),
    "positions_batch": (rejected(ROTARY, X, positions=jnp.ones((2, 4), int)), ValueError, r"positions must have shape .*got \[2, 4\]"),
    "positions_dtype": (rejected(ROTARY, X, positions=jnp.ones(4)), TypeError, "positions must hold integers, got float32"),
    "theta": (rejected(GroupedQueryAttention(1, rope_theta=0), X), ValueError, "rope_theta must be positive and finite, got 0.0"),
    "theta_boolean": (rejected(GroupedQueryAttention(1, rope_theta=False), X), TypeError, "rope_theta must be a number, got bool"),
    "rate": (rejected(GroupedQueryAttention(1, dropout_rate=2), X), ValueError, r"dropout_rate must be in \[0, 1\), got 2.0"),
    "cap": (rejected(GroupedQueryAttention(1, logits_soft_cap=False), X), TypeError, "logits_soft_cap must be a number, got bool"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_module_rejects(case):
    call, error, sentence = REJECTED[case]
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize(
    ("inputs", "options", "error", "sentence"),
    [
        ((X[:, :1], X[:, :1]), {}, NotImplementedError, "inputs_k must be None with decode=True"),
        ((X,), {"q_segment_ids": jnp.zeros((1, 4), jnp.int32)}, NotImplementedError, "q_segment_ids must be None with decode=True"),
        ((jnp.ones((1, 5, 8)),), {}, ValueError, "decode: keys must have the cache's shape"),
        ((jnp.ones((2, 1, 8)),), {}, ValueError, "decode: keys must have the cache's shape"),
    ],
)
def test_decoding_rejects(inputs, options, error, sentence):
    module = GroupedQueryAttention(1, decode=True)
    variables = module.init(jax.random.key(0), X)
    with pytest.raises(error, match=sentence):
        module.apply(variables, *inputs, **options, mutable=["cache"])
