"""By which implementations: functions of a row's arrays, by name."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.api import dropout_mask, flash_attention
from flash_jax.bench.rows import Arrays, Row
from flash_jax.dispatch import NAMES

Attention = Callable[[Arrays], jax.Array]


def _ours(row: Row, implementation: str | None = None) -> Attention:
    return lambda arrays: flash_attention(**row.words(arrays), implementation=implementation)


def _jax_nn(row: Row, implementation: Literal["xla", "cudnn"] = "xla") -> Attention:
    return lambda arrays: jax.nn.dot_product_attention(**row.dense_words(arrays), implementation=implementation)


def _standard(row: Row) -> Attention:
    """Standard attention with dropout on its weights, which `jax.nn` has not: the paper's Algorithm 0, scores and weights in memory."""
    if not row.dropout:
        raise NotImplementedError("without dropout it is jax.nn")
    _decline(row, "bias", "density", "segments", "window", "num_kv_heads")

    def attention(arrays: Arrays) -> jax.Array:
        query, key, value = _qkv(arrays)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) / row.head_dim**0.5
        if row.is_causal:
            scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
        kept = dropout_mask(arrays["dropout_key"], row.dropout, scores.shape)
        weights = jnp.where(kept, jax.nn.softmax(scores) / (1 - row.dropout), 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)

    return attention


def call_tokamax(*qkv: jax.Array, **words) -> jax.Array:
    """`tokamax.dot_product_attention`, imported when it is called."""
    return _module("tokamax").dot_product_attention(*qkv, **words)


def _tokamax(row: Row) -> Attention:
    return lambda arrays: call_tokamax(**row.dense_words(arrays))


def _fa3(row: Row) -> Attention:
    """FlashAttention-3 as `dew_flash_attn` calls it."""
    _decline(row, "bias", "density", "dropout")
    window = row.window or (-1, -1)
    if row.segments:
        starts = _starts(row)
        return _packed(
            lambda *qkv: _module("dew_flash_attn").flash_mha_varlen(*qkv, starts, max(row.segments), is_causal=row.is_causal),
        )
    causal = row.is_causal and row.window is None
    return lambda arrays: _module("dew_flash_attn").flash_mha(*_qkv(arrays), is_causal=causal, window_size=window)


def _fa4(row: Row) -> Attention:
    """FlashAttention-4's kernels as `fa4_jax` calls them."""
    _decline(row, "bias", "density", "dropout")
    if row.segments:
        starts = jnp.asarray(_starts(row))
        return _packed(lambda *qkv: _module("fa4_jax").flash_attn_varlen(*qkv, starts, starts, causal=row.is_causal))
    words: dict[str, Any] = {"causal": row.is_causal} if row.window is None else {"window_size": row.window}
    return lambda arrays: _module("fa4_jax").flash_attn(*_qkv(arrays), **words)


def _decline(row: Row, *features: str) -> None:
    for feature in features:
        if getattr(row, feature):
            raise NotImplementedError(f"no {feature}")


def _qkv(arrays: Arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    return arrays["query"], arrays["key"], arrays["value"]


def _starts(row: Row) -> np.ndarray:
    """Of the sequences of all batch entries, laid end to end."""
    return np.cumsum((0, *row.segments * row.batch), dtype=np.int32)


def _packed(attention: Callable[..., jax.Array]) -> Attention:
    """`[batch, length, ...]` through a function of `[batch * length, ...]`."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    return lambda arrays: attention(*map(flat, _qkv(arrays))).reshape(arrays["query"].shape)


def _module(name: str) -> Any:
    return importlib.import_module(name)


SIDES: dict[str, Callable[[Row], Attention]] = {
    "flash_jax": _ours,  # what implementation=None chooses
    **{f"flash_jax:{name}": functools.partial(_ours, implementation=name) for name in NAMES},
    "jax.nn": _jax_nn,
    "jax.nn:cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "standard": _standard,
    "fa3": _fa3,
    "fa4": _fa4,
    "tokamax": _tokamax,
}
PACKAGES = {"fa3": "dew_flash_attn", "fa4": "fa4_jax", "tokamax": "tokamax"}


def default_sides(rows: Iterable[Row] = ()) -> list[str]:
    """Ours and every peer that this machine may run."""
    peers = ["jax.nn"] + ["jax.nn:cudnn"] * (jax.default_backend() == "gpu") + ["standard"] * any(row.dropout for row in rows)
    return ["flash_jax", *peers, *(side for side, package in PACKAGES.items() if importlib.util.find_spec(package) is not None)]
