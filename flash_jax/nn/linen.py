"""Attention for `flax.linen`."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.linear import default_kernel_init

from flash_jax.api import flash_attention
from flash_jax.mask import Mask
from flash_jax.nn import common
from flash_jax.nn.common import attention_fn as attention_fn

__all__ = ["GroupedQueryAttention", "attention_fn"]

Array = jax.Array


class GroupedQueryAttention(nn.Module):
    """Attention layer with grouped-query heads, rotary positions, window, sinks, soft cap, packed sequences, dropout and a cache.

    The projections are Flax's `DenseGeneral`, named `query`, `key`, `value`, `out` as in `flax.linen.MultiHeadDotProductAttention`:
    with the defaults the parameters of the two are interchangeable. For sharding wrap the initialisers in
    `flax.linen.with_partitioning`.

    Decoding: with `decode=True`, `init` on inputs as long as the longest sequence makes the collection 'cache'. Then each
    `apply(..., mutable=['cache'])` takes the next tokens, one or many at a time (a prompt at once), and is causal. Tokens beyond the
    cache's length give NaN.

    Attributes:
      num_heads: query heads.
      num_kv_heads: key and value heads; default `num_heads`. Query head n reads key head `n // (num_heads // num_kv_heads)`.
      head_dim: default `features of inputs_q / num_heads`.
      out_features: default the features of inputs_q.
      is_causal: row i sees keys `j <= i`.
      local_window_size: `(left, right)` or one number for both, inclusive; None is unbounded.
      rope_theta: base of the rotary embedding of queries and keys, such as 10000.0; None for none.
      use_sinks: a learned logit a head (parameter `sinks`) that takes probability and gives no value.
      logits_soft_cap: `cap * tanh(s / cap)` on the scaled scores; None for none.
      dropout_rate: probability of dropping an attention weight, in [0, 1).
      broadcast_dropout: drop the same weights in every batch entry and head.
      deterministic: True drops nothing. May be given in the call instead.
      decode: keep and use the cache.
      dtype: of the computation; default inferred from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the matrix products; see `attention_fn`.
      use_bias: projections add a bias.
      kernel_init, bias_init: initialisers of the projections.
      out_kernel_init, out_bias_init: of the output projection; default the same.
      sinks_init: initialiser of the sinks.
      attention_fn: called with the parameters of `flash_attention`, only those that are set: `functools.partial(flash_attention,
        implementation="xla")`, or `jax.nn.dot_product_attention` where it suffices.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    rope_theta: float | None = None
    use_sinks: bool = False
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    deterministic: bool | None = None
    decode: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    use_bias: bool = True
    kernel_init: Callable = default_kernel_init
    bias_init: Callable = jax.nn.initializers.zeros
    out_kernel_init: Callable | None = None
    out_bias_init: Callable | None = None
    sinks_init: Callable = jax.nn.initializers.zeros
    attention_fn: Callable[..., Array] = flash_attention

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Array | Mask | None = None,
        bias: Array | None = None,
        q_segment_ids: Array | None = None,
        kv_segment_ids: Array | None = None,
        positions: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
    ) -> Array:
        """Attention from `inputs_q` to `inputs_k` (default: to itself), projected in and out.

        Args:
          inputs_q: `[*batch, q_len, features]`.
          inputs_k: `[*batch, kv_len, kv_features]`; default inputs_q.
          inputs_v: likewise; default inputs_k.
          mask: broadcasts to `[*batch, num_heads, q_len, kv_len]` (kv_len is the cache's when decoding), boolean or numbers, other
            than 0 = visible; or a `flash_jax.Mask`, such as `Mask.lengths(...)`.
          bias: float, added to the scores; broadcasts likewise.
          q_segment_ids: integers `[*batch, q_len]`: only equal ids see each other.
          kv_segment_ids: integers `[*batch, kv_len]`; default q_segment_ids in self-attention.
          positions: integers `[q_len]` or `[*batch, q_len]` for the rotary embedding; default 0, 1, ..., counted on over a cache.
            Packed sequences need none: only differences of positions matter.
          deterministic: wins over the module's.
          dropout_rng: PRNG key; default from the stream 'dropout'.

        Returns:
          `[*batch, q_len, out_features]`.
        """
        keys, values = common.same_or(inputs_q, inputs_k, inputs_v)
        features = inputs_q.shape[-1]
        num_kv_heads, head_dim = common.head_sizes(self.num_heads, self.num_kv_heads, self.head_dim, features)
        dense = functools.partial(
            nn.DenseGeneral, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision
        )
        project = functools.partial(dense, kernel_init=self.kernel_init, bias_init=self.bias_init)
        query = project((self.num_heads, head_dim), name="query")(inputs_q)
        key = project((num_kv_heads, head_dim), name="key")(keys)
        value = project((num_kv_heads, head_dim), name="value")(values)

        dropout_rate = common.active_dropout(self.dropout_rate, self.deterministic, deterministic)
        if dropout_rate and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        cache = variables = None
        if self.decode:
            is_initialized = self.has_variable("cache", "cached_key")
            variables = (
                self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype),
                self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype),
                self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32),
            )
            cache = common.Cache(*(v.value for v in variables)) if is_initialized else None
        out, cache = common.attend(
            self,
            query,
            key,
            value,
            cache,
            is_self_attention=inputs_k is None,
            sinks=self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype) if self.use_sinks else None,
            bias=bias,
            mask=mask,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            positions=positions,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
        )
        if cache is not None and variables is not None:
            for variable, x in zip(variables, cache, strict=True):
                variable.value = x
        return dense(
            self.out_features or features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(out)
