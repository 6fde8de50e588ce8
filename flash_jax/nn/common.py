"""What the two Flax APIs share: the argument rules, rotary positions, and attention over a cache. Every rule is here once."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flash_jax.api import flash_attention
from flash_jax.dropout import check_rate
from flash_jax.mask import Mask
from flash_jax.problem import as_array, as_integers, check_flag, static_float
from flash_jax.promotion import promoting

Array = jax.Array


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    is_causal: bool = False,
    input_positions: Array | None = None,
    **options,
) -> Array:
    """`flash_attention` under the signature that Flax's attention modules call.

    >>> flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=flash_jax.nn.linen.attention_fn)
    >>> flax.nnx.MultiHeadAttention(8, 512, attention_fn=flash_jax.nn.nnx.attention_fn, rngs=rngs)
    >>> functools.partial(attention_fn, local_window_size=(1023, 0))  # options of flash_attention

    Over a cache a row's number is not its position, which Flax does not pass: with q_len != kv_len a rule that counts positions needs
    `q_offset`. Decoding without such a rule needs none.

    Unlike Flax's own function a query that sees no key gives 0, and dropout draws from `flash_jax.dropout_mask`'s bits.

    Args:
      query: `[*batch, q_len, num_heads, head_dim]`.
      key: `[*batch, kv_len, num_kv_heads, head_dim]`.
      value: `[*batch, kv_len, num_kv_heads, v_head_dim]`.
      bias: float, added to the scores; broadcasts to `[*batch, num_heads, q_len, kv_len]`.
      mask: likewise; boolean or numbers, other than 0 = visible. Or a `flash_jax.Mask`.
      broadcast_dropout: drop the same weights in every batch entry and head.
      dropout_rng: PRNG key; needed when weights are dropped.
      dropout_rate: probability of dropping a weight, in [0, 1).
      deterministic: True drops nothing, whatever the rate.
      dtype: query, key and value are cast to it; default their common dtype.
      precision: of the matrix products, as `jax.default_matmul_precision`: None, a name, a `jax.lax.Precision`, a
        `jax.lax.DotAlgorithmPreset`, or a pair of equal ones.
      module: must be None: it asks to `sow` the weights, which are never stored.
      force_fp32_for_softmax: either; the softmax is in float32 always (float64 for float64).
      qk_attn_weights_einsum: must be None: the products happen tile by tile, not in an einsum.
      attn_weights_value_einsum: must be None, likewise.
      is_causal: row i sees keys `j <= i`.
      input_positions: must be None: this function rotates nothing; `GroupedQueryAttention` does.
      options: further keywords of `flash_attention`.

    Returns:
      `[*batch, q_len, num_heads, v_head_dim]`.

    Raises:
      NotImplementedError: an argument that must be None is not.
      ValueError, TypeError: as `flash_attention`; and a rule that counts positions without `q_offset`, as above.
    """
    del force_fp32_for_softmax
    if module is not None:
        raise NotImplementedError(
            "module (from sow_weights=True) must be None: the attention weights are never stored, so there is nothing to sow. "
            "Use Flax's own attention function to look at them."
        )
    for name, einsum in (("qk_attn_weights_einsum", qk_attn_weights_einsum), ("attn_weights_value_einsum", attn_weights_value_einsum)):
        if einsum is not None:
            raise NotImplementedError(f"{name} must be None, got {einsum!r}: the products are computed tile by tile, not by an einsum.")
    if input_positions is not None:
        raise NotImplementedError(
            "input_positions must be None: attention_fn applies no rotary embedding. "
            "Use GroupedQueryAttention(rope_theta=...) of flash_jax.nn and its positions."
        )
    check_flag("is_causal", is_causal)
    counting = {
        "is_causal": is_causal,
        "mask": isinstance(mask, Mask) and mask.counts_positions,
        "local_window_size": options.get("local_window_size") is not None,
    }
    q_len, kv_len = query.shape[-3], key.shape[-3]
    if q_len != kv_len and any(counting.values()) and options.get("q_offset") is None:
        raise ValueError(
            f"q_offset must be given when {' and '.join(name for name, counts in counting.items() if counts)} counts positions and q_len "
            f"differs from kv_len, got none with {q_len} and {kv_len}: over a cache query 0 does not stand at key 0. Pass q_offset (0 if "
            "it does), or use GroupedQueryAttention of flash_jax.nn, whose cache knows its place."
        )
    return call(
        flash_attention,
        query,
        key,
        value,
        mask=mask,
        dtype=dtype,
        precision=precision,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        bias=bias,
        is_causal=is_causal,
        **options,
    )


def call(
    function: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | Mask | None,
    dtype: Any,
    precision: Any,
    dropout_rate: float,
    dropout_rng: Array | None,
    broadcast_dropout: bool,
    **options,
) -> Array:
    """Flax's words in those of `flash_attention`. `function` gets only what is set, so one that knows less can stand in."""
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    if mask is not None:
        options["mask"] = mask if isinstance(mask, Mask) or callable(mask) else as_array("mask", mask) != 0
    if check_rate("dropout_rate", dropout_rate):
        if dropout_rng is None:
            raise ValueError(
                "dropout_rng is required when dropout_rate is not 0 and deterministic is False, got None. Pass a jax.random.key."
            )
        options |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng, "broadcast_dropout": broadcast_dropout}
    options = {name: x for name, x in options.items() if x is not None and not (name == "is_causal" and x is False)}
    with _matmul_precision(precision):
        return function(query, key, value, **options)


def _matmul_precision(precision) -> contextlib.AbstractContextManager:
    if precision is None:
        return contextlib.nullcontext()
    name = precision
    if isinstance(precision, (tuple, list)):
        if len(set(precision)) != 1:
            raise NotImplementedError(f"precision must be one for both factors of a product, got {precision!r}.")
        name = precision[0]
    if isinstance(name, jax.lax.Precision):
        name = name.name.lower()
    elif isinstance(name, jax.lax.DotAlgorithmPreset):
        name = name.name
    try:
        return jax.default_matmul_precision(name)
    except ValueError:
        raise ValueError(f"precision must be None or what jax.default_matmul_precision knows, got {precision!r}.") from None


def _positions(positions, batch: tuple[int, ...], length: int) -> Array:
    """Integers `[length]` or `[*batch, length]`, each batch axis full or 1."""
    positions = as_integers("positions", positions)
    *lead, last = positions.shape or (0,)
    fits = last == length and len(lead) in (0, len(batch)) and all(n in (1, m) for n, m in zip(lead, batch, strict=False))
    if not fits:
        raise ValueError(f"positions must have shape {[length]} or {[*batch, length]}, got {list(positions.shape)}.")
    return positions


@promoting
def rotary(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (RoFormer, arXiv 2104.09864).

    The feature pair `(n, n + head_dim / 2)` turns by the angle `position * theta^(-2 n / head_dim)`, in radians.

    Args:
      x: `[*batch, len, heads, head_dim]`, head_dim even.
      positions: integers `[len]` or `[*batch, len]`.
      theta: base of the frequencies.
    """
    theta = static_float("rope_theta", theta)
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be positive and finite, got {theta}. Use None for no rotary embedding.")
    if x.shape[-1] % 2:
        raise ValueError(f"rope_theta needs an even head_dim, got {x.shape[-1]}.")
    half = x.shape[-1] // 2
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angle = positions[..., None, None].astype(dtype) * theta ** (-jnp.arange(half, dtype=dtype) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Cache(NamedTuple):
    """Keys and values seen so far: `[*batch, max_len, num_kv_heads, head_dim]`, the first `filled` (int32 scalar) of them."""

    key: Array
    value: Array
    filled: Array

    def append(self, key: Array, value: Array) -> "Cache":
        *batch, max_len, num_kv_heads, head_dim = self.key.shape
        if key.shape != (*batch, key.shape[-3], num_kv_heads, head_dim) or key.shape[-3] > max_len:
            want = ", ".join(map(str, [*batch, f"at most {max_len}", num_kv_heads, head_dim]))
            raise ValueError(f"decode: keys must have the cache's shape [{want}], got {list(key.shape)}. Make a cache that fits.")
        zero = jnp.zeros_like(self.filled)
        start = (*(zero for _ in batch), self.filled, zero, zero)
        put = lambda into, x: jax.lax.dynamic_update_slice(into, x.astype(into.dtype), start)
        return Cache(put(self.key, key), put(self.value, value), self.filled + key.shape[-3])


def attend(
    module: Any,
    query: Array,
    key: Array,
    value: Array,
    cache: Cache | None,
    *,
    is_self_attention: bool,
    sinks: Array | None,
    bias: Array | None,
    mask: Array | Mask | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
    positions: Array | None,
    dropout_rate: float,
    dropout_rng: Array | None,
) -> tuple[Array, Cache | None]:
    """From projected heads to attended heads: `(out, cache)`. `module` is a `GroupedQueryAttention` of either API."""
    start = 0 if cache is None else cache.filled
    q_len, kv_len = query.shape[-3], key.shape[-3]
    if is_self_attention and kv_segment_ids is None:
        kv_segment_ids = q_segment_ids
    if cache is not None and not is_self_attention:
        raise NotImplementedError("inputs_k must be None with decode=True: the cache holds the keys of self-attention.")
    if cache is not None and q_segment_ids is not None:
        raise NotImplementedError("q_segment_ids must be None with decode=True: the cache holds one sequence a batch entry.")
    if positions is not None and (module.rope_theta is None or not is_self_attention):
        raise ValueError("positions are those of the rotary embedding in self-attention, got them without rope_theta or with inputs_k.")
    if module.rope_theta is not None:
        q_positions = start + jnp.arange(q_len) if positions is None else _positions(positions, query.shape[:-3], q_len)
        kv_positions = q_positions if is_self_attention else jnp.arange(kv_len)
        query, key = rotary(query, q_positions, module.rope_theta), rotary(key, kv_positions, module.rope_theta)
    if cache is not None:
        cache = cache.append(key, value)
        key, value = (x.astype(query.dtype) for x in (cache.key, cache.value))
    out = call(
        module.attention_fn,
        query,
        key,
        value,
        mask=mask,
        dtype=module.dtype,
        precision=module.precision,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=module.broadcast_dropout,
        bias=bias,
        is_causal=module.is_causal or cache is not None,
        local_window_size=module.local_window_size,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=None if cache is None else start,
        logits_soft_cap=module.logits_soft_cap,
        sinks=sinks,
    )
    if cache is not None:  # the last tokens overwrote earlier ones: a wrong answer must not look like one
        out = jnp.where(cache.filled <= cache.key.shape[-3], out, jnp.nan)
    return out, cache


def same_or(inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
    """Flax's rule for absent inputs: keys from the queries' inputs, values from the keys'."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_k must be given when inputs_v is, got None.")
    keys = inputs_q if inputs_k is None else inputs_k
    return keys, keys if inputs_v is None else inputs_v


def head_sizes(num_heads: int, num_kv_heads: int | None, head_dim: int | None, features: int) -> tuple[int, int]:
    """`(num_kv_heads, head_dim)` with their defaults: as many as query heads, and the features shared out among these."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
    if head_dim is None:
        if features % num_heads:
            raise ValueError(f"head_dim must be given when num_heads does not divide the features, got {num_heads} heads and {features}.")
        head_dim = features // num_heads
    return num_kv_heads, head_dim


def active_dropout(rate: float, in_module: bool | None, in_call: bool | None) -> float:
    """The rate to apply: 0 if deterministic. What the call says wins over what the module says; with a rate one must say it."""
    rate = check_rate("dropout_rate", rate)
    if rate == 0:
        return 0.0
    deterministic = in_module if in_call is None else in_call
    if deterministic is None:
        raise ValueError(f"deterministic must be True or False, in the module or in the call, when dropout_rate is {rate}, got neither.")
    return 0.0 if deterministic else rate
