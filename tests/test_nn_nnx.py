"""Flax nnx: the drop-in attention function against Flax's own, and our module against its linen twin, bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import normal
from nn_support import BATCH, EVERYTHING, FEATURES, LENGTH, SEGMENTS, assert_close, cast, check

from flash_jax import Mask, flash_attention
from flash_jax.nn import linen
from flash_jax.nn.nnx import GroupedQueryAttention, attention_fn

X = jnp.ones((1, 4, 8))


def flax_module(**options):
    return nnx.MultiHeadAttention(4, FEATURES, num_kv_heads=2, use_bias=False, decode=False, **options, rngs=nnx.Rngs(0))


def as_function(module, **options):
    """`(parameters, *inputs) -> output`, pure, and the parameters."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    return lambda params, *inputs: nnx.merge(graph, params, rest)(*inputs, **options), params


CALLS = {
    "causal": ({"is_causal": True}, jnp.float32, False),
    "float_mask": ({"mask": nnx.make_causal_mask(jnp.ones((BATCH, LENGTH)))}, jnp.bfloat16, False),
    "cross": ({"mask": (jnp.arange(LENGTH) < jnp.array([[7], [12]]))[:, None, None]}, jnp.float32, True),
}


@pytest.mark.parametrize("case", CALLS)
def test_attention_fn_equals_flax(case):
    options, dtype, cross = CALLS[case]
    # A dropout rate, though off, keeps Flax's own on the path that is all in one dtype.
    modules = [flax_module(dropout_rate=0.5, deterministic=True, **kw) for kw in ({"attention_fn": attention_fn}, {})]
    (function, params), (unfused, _) = (as_function(module, **options) for module in modules)
    check(function, unfused, params, *(normal(n, BATCH, LENGTH, FEATURES) for n in range(1 + cross)), dtype=dtype)


def test_attention_fn_in_flax_decoding():
    x = normal(0, BATCH, LENGTH, FEATURES)
    decoder = flax_module(attention_fn=attention_fn)
    decoder.decode = True
    decoder.init_cache(x.shape)
    step = nnx.jit(lambda module, x: module(x, is_causal=True))
    out = jnp.concatenate([step(decoder, x[:, n : n + 1]) for n in range(LENGTH)], axis=1)
    unfused, params = as_function(flax_module(dropout_rate=0.5, deterministic=True), is_causal=True)
    with jax.enable_x64(True):
        reference = unfused(*cast((params, x), jnp.float64))
    assert_close(out, unfused(params, x), reference)


def test_attention_fn_refuses_a_window_in_flax_decoding():
    decoder = flax_module(attention_fn=functools.partial(attention_fn, local_window_size=(3, 0)))
    decoder.init_cache((1, 4, FEATURES))
    with pytest.raises(ValueError, match=r"q_offset must be given when local_window_size counts positions .* got none with 1 and 4"):
        decoder(jnp.ones((1, 1, FEATURES)), decode=True)


def test_flax_modules_requests_are_refused():
    module = flax_module(attention_fn=attention_fn)
    x = jnp.ones((1, 4, FEATURES))
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        module(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match="input_positions must be None"):
        module(x, input_positions=jnp.arange(4)[None])


def test_dropout_through_flax_module():
    x = normal(0, BATCH, LENGTH, FEATURES)
    module = flax_module(attention_fn=attention_fn, dropout_rate=0.3)
    call = nnx.jit(lambda module, deterministic: module(x, deterministic=deterministic), static_argnums=1)
    first, second, off = call(module, False), call(module, False), call(module, True)
    assert not bool((first == second).any())
    assert bool((off == nnx.jit(lambda module: module(x))(flax_module(attention_fn=attention_fn))).all())


# ------------------------------------------------------------------------------------------------------- our module
def twins(x, y=None, **options):
    """The same layer in both APIs: linen's module and parameters, nnx's module with them."""
    theirs: Any = linen.GroupedQueryAttention(**options)
    params = theirs.init(jax.random.key(0), x, y, deterministic=True)["params"]
    features = {"in_features": x.shape[-1], "in_kv_features": None if y is None else y.shape[-1]}
    ours = GroupedQueryAttention(**features, **options, rngs=nnx.Rngs(1))
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(ours, nnx.Param))) == jax.tree.map(jnp.shape, params)
    nnx.update(ours, params)
    return theirs, {"params": params}, ours


SELF = normal(0, BATCH, LENGTH, FEATURES)
CROSS = (SELF, normal(1, BATCH, 9, 6))
TWINS: dict[str, tuple[dict[str, Any], tuple, dict[str, Any]]] = {
    "plain": ({"num_heads": 2, "out_features": 5}, (SELF,), {}),
    "everything": (EVERYTHING, (SELF,), {"q_segment_ids": SEGMENTS}),
    "cross": (
        {"num_heads": 2, "num_kv_heads": 1, "rope_theta": 1e4, "dtype": jnp.bfloat16, "precision": "highest"},
        CROSS,
        {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS[:, :9], "mask": Mask.lengths(key=jnp.array([3, 9]))},
    ),
    "bias": ({"num_heads": 2}, (SELF,), {"bias": normal(2, 2, LENGTH, LENGTH), "mask": jnp.ones((BATCH, 1, 1, LENGTH))}),
    "positions": ({"num_heads": 2, "rope_theta": 1e4}, (SELF,), {"positions": jnp.arange(LENGTH) // 2}),
}


@pytest.mark.parametrize("case", TWINS)
def test_equals_linen(case):
    options, inputs, call = TWINS[case]
    theirs, params, ours = twins(*inputs, **options)
    out = nnx.jit(lambda module: module(*inputs, **call))(ours)
    expected = jax.jit(lambda params: theirs.apply(params, *inputs, **call))(params)
    assert out.dtype == expected.dtype == options.get("dtype", jnp.float32)
    assert bool((out == expected).all())


def test_gradients_equal_linens():
    theirs, params, ours = twins(SELF, **EVERYTHING)
    grads = nnx.jit(nnx.grad(lambda module: jnp.sum(jnp.square(module(SELF)))))(ours)
    expected = jax.jit(jax.grad(lambda params: jnp.sum(jnp.square(theirs.apply(params, SELF)))))(params)["params"]
    assert float(jnp.abs(expected["sinks"]).min()) > 0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.to_pure_dict(grads), expected))


def test_decoding_equals_linens():
    theirs, params, ours = twins(SELF, **EVERYTHING)
    theirs = theirs.clone(decode=True)
    cache = theirs.init(jax.random.key(0), SELF)["cache"]
    decoder = nnx.view(ours, decode=True, batch_size=BATCH, max_length=LENGTH)
    assert not ours.decode
    step = nnx.jit(lambda module, x: module(x))
    expect = jax.jit(lambda cache, x: theirs.apply({**params, "cache": cache}, x, mutable=["cache"]))
    start = 0
    for n in (6, 1, 1, 4):
        x, start = SELF[:, start : start + n], start + n
        expected, variables = expect(cache, x)
        cache = variables["cache"]
        assert bool((step(decoder, x) == expected).all())
    assert decoder.cached_key is not None
    assert bool((decoder.cached_key[...] == cache["cached_key"]).all())
    assert bool(jnp.isnan(step(decoder, x[:, :1])).all())  # beyond the cache


def test_dropout():
    _, params, ours = twins(SELF, num_heads=2, dropout_rate=0.3, broadcast_dropout=False)
    key = jax.random.key(7)
    call = nnx.jit(lambda module, rngs: module(SELF, deterministic=False, rngs=rngs))
    out = call(ours, nnx.Rngs(dropout=key))
    theirs = linen.GroupedQueryAttention(2, dropout_rate=0.3, broadcast_dropout=False, deterministic=False)
    expected = jax.jit(theirs.apply)(params, SELF, dropout_rng=nnx.Rngs(dropout=key).dropout())
    assert bool((out == expected).all())
    own = nnx.jit(lambda module: module(SELF, deterministic=False))
    assert not bool((own(ours) == own(ours)).any())  # the module's own stream moves on
    assert bool((nnx.view(ours, deterministic=True)(SELF) == twins(SELF, num_heads=2)[2](SELF)).all())


def test_attention_fn_gets_what_is_set():
    seen = []

    def record(query, key, value, **options):
        seen.append(options)
        return flash_attention(query, key, value, **options)

    module = functools.partial(GroupedQueryAttention, 2, 8, attention_fn=record, rngs=nnx.Rngs(0))
    module()(X)
    module(is_causal=True, logits_soft_cap=2.0)(X)
    assert seen == [{}, {"is_causal": True, "logits_soft_cap": 2.0}]
    stock = GroupedQueryAttention(2, 8, is_causal=True, attention_fn=jax.nn.dot_product_attention, rngs=nnx.Rngs(0))
    assert stock(X).shape == X.shape


def test_rejects():
    module = GroupedQueryAttention(1, 8, dropout_rate=0.1, deterministic=False, keep_rngs=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rngs is required in the call"):
        module(X)
    with pytest.raises(ValueError, match="decode=True needs a cache"):
        nnx.view(module, decode=True, deterministic=True)(X)
    with pytest.raises(ValueError, match="batch_size and max_length must be given together, got 3 and None"):
        nnx.view(module, batch_size=3)
    make = functools.partial(GroupedQueryAttention, 1, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"positions must have shape \[4\] or \[1, 4\], got \[3\]"):
        make(rope_theta=1e4)(X[:1, :4], positions=jnp.arange(3))
    with pytest.raises(ValueError, match=r"rope_theta must be positive and finite, got -1\.0"):
        make(rope_theta=-1)(X)
    with pytest.raises(TypeError, match=r"local_window_size.*got bool"):
        make(local_window_size=False)(X)
