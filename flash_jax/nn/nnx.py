"""Attention for `flax.nnx`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_kernel_init

from flash_jax.api import flash_attention
from flash_jax.mask import Mask
from flash_jax.nn import common
from flash_jax.nn.common import attention_fn as attention_fn

__all__ = ["GroupedQueryAttention", "attention_fn"]

Array = jax.Array


class GroupedQueryAttention(nnx.Module):
    """Attention layer with grouped-query heads, rotary positions, window, sinks, soft cap, packed sequences, dropout and a cache.

    The projections are Flax's `LinearGeneral`, in the attributes `query`, `key`, `value`, `out` as in `flax.nnx.MultiHeadAttention`:
    with the defaults the parameters of the two are interchangeable. For sharding wrap the initialisers in `flax.nnx.with_partitioning`.

    Decoding: with `decode=True` (in the constructor, by `nnx.view(model, decode=True)` or `model.set_attributes(decode=True)`) and
    after `init_cache`, each call takes the next tokens, one or many at a time (a prompt at once), and is causal. Tokens beyond the
    cache's length give NaN.

    Args:
      num_heads: query heads.
      in_features: features of inputs_q.
      num_kv_heads: key and value heads; default `num_heads`. Query head n reads key head `n // (num_heads // num_kv_heads)`.
      head_dim: default `in_features / num_heads`.
      out_features: default `in_features`.
      in_kv_features: features of inputs_k and inputs_v; default `in_features`.
      is_causal: row i sees keys `j <= i`.
      local_window_size: `(left, right)` or one number for both, inclusive; None is unbounded.
      rope_theta: base of the rotary embedding of queries and keys, such as 10000.0; None for none.
      use_sinks: a learned logit a head (parameter `sinks`) that takes probability and gives no value.
      logits_soft_cap: `cap * tanh(s / cap)` on the scaled scores; None for none.
      dropout_rate: probability of dropping an attention weight, in [0, 1).
      broadcast_dropout: drop the same weights in every batch entry and head.
      deterministic: True drops nothing. May be given in the call instead.
      decode: use the cache.
      dtype: of the computation; default inferred from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the matrix products; see `attention_fn`.
      use_bias: projections add a bias.
      kernel_init, bias_init: initialisers of the projections.
      out_kernel_init, out_bias_init: of the output projection; default the same.
      sinks_init: initialiser of the sinks.
      attention_fn: called with the parameters of `flash_attention`, only those that are set: `functools.partial(flash_attention,
        implementation="xla")`, or `jax.nn.dot_product_attention` where it suffices.
      rngs: for the parameters, and forked for dropout.
      keep_rngs: keep the fork in the module; if False, pass `rngs` to each call that drops.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        in_kv_features: int | None = None,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        rope_theta: float | None = None,
        use_sinks: bool = False,
        logits_soft_cap: float | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool | None = None,
        decode: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        use_bias: bool = True,
        kernel_init: Callable = default_kernel_init,
        bias_init: Callable = jax.nn.initializers.zeros,
        out_kernel_init: Callable | None = None,
        out_bias_init: Callable | None = None,
        sinks_init: Callable = jax.nn.initializers.zeros,
        attention_fn: Callable[..., Array] = flash_attention,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ):
        self.num_heads = num_heads
        self.num_kv_heads, self.head_dim = common.head_sizes(num_heads, num_kv_heads, head_dim, in_features)
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.rope_theta = rope_theta
        self.logits_soft_cap = logits_soft_cap
        self.dropout_rate = dropout_rate
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.decode = decode
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.attention_fn = attention_fn

        linear = functools.partial(
            nnx.LinearGeneral, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs
        )
        project = functools.partial(linear, kernel_init=kernel_init, bias_init=bias_init)
        kv_features = in_features if in_kv_features is None else in_kv_features
        self.query = project(in_features, (num_heads, self.head_dim))
        self.key = project(kv_features, (self.num_kv_heads, self.head_dim))
        self.value = project(kv_features, (self.num_kv_heads, self.head_dim))
        self.out = linear(
            (num_heads, self.head_dim),
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        self.sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), param_dtype)) if use_sinks else nnx.data(None)
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None
        self.cached_key: nnx.Cache[Array] | None = nnx.data(None)
        self.cached_value: nnx.Cache[Array] | None = nnx.data(None)
        self.cache_index: nnx.Cache[Array] | None = nnx.data(None)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = None) -> None:
        """Make an empty cache for inputs of shape `[*batch, max_len, features]`; dtype defaults to that of the computation."""
        dtype = dtype or self.dtype or self.param_dtype
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """For `nnx.view`: set the flags; with `batch_size` and `max_length` make an empty cache."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if (batch_size is None) != (max_length is None):
            raise ValueError(f"batch_size and max_length must be given together, got {batch_size} and {max_length}.")
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, 0))

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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Array:
        """Attention from `inputs_q` to `inputs_k` (default: to itself), projected in and out.

        Args:
          inputs_q: `[*batch, q_len, in_features]`.
          inputs_k: `[*batch, kv_len, in_kv_features]`; default inputs_q.
          inputs_v: likewise; default inputs_k.
          mask: broadcasts to `[*batch, num_heads, q_len, kv_len]` (kv_len is the cache's when decoding), boolean or numbers, other
            than 0 = visible; or a `flash_jax.Mask`, such as `Mask.lengths(...)`.
          bias: float, added to the scores; broadcasts likewise.
          q_segment_ids: integers `[*batch, q_len]`: only equal ids see each other.
          kv_segment_ids: integers `[*batch, kv_len]`; default q_segment_ids in self-attention.
          positions: integers `[q_len]` or `[*batch, q_len]` for the rotary embedding; default 0, 1, ..., counted on over a cache.
            Packed sequences need none: only differences of positions matter.
          deterministic: wins over the module's.
          rngs: where the dropout key comes from, the stream 'dropout'; default the module's own fork.

        Returns:
          `[*batch, q_len, out_features]`.
        """
        keys, values = common.same_or(inputs_q, inputs_k, inputs_v)
        cache = variables = None
        if self.decode:
            if self.cached_key is None or self.cached_value is None or self.cache_index is None:
                raise ValueError("decode=True needs a cache, got none. Call init_cache([*batch, max_len, features]) first.")
            variables = (self.cached_key, self.cached_value, self.cache_index)
            cache = common.Cache(*(v[...] for v in variables))
        dropout_rate = common.active_dropout(self.dropout_rate, self.deterministic, deterministic)
        out, cache = common.attend(
            self,
            self.query(inputs_q),
            self.key(keys),
            self.value(values),
            cache,
            is_self_attention=inputs_k is None,
            sinks=None if self.sinks is None else self.sinks[...],
            bias=bias,
            mask=mask,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            positions=positions,
            dropout_rate=dropout_rate,
            dropout_rng=self._dropout_key(rngs) if dropout_rate else None,
        )
        if cache is not None and variables is not None:
            for variable, x in zip(variables, cache, strict=True):
                variable[...] = x
        return self.out(out)

    def _dropout_key(self, rngs: nnx.Rngs | nnx.RngStream | None) -> Array:
        stream = self.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        if stream is None:
            raise ValueError("rngs is required in the call when dropout is on and the module was made with keep_rngs=False, got None.")
        return stream()
