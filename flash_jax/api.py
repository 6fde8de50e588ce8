"""`flash_attention`, the one public call; `explain`, which says what it will do; `dropout_mask`, which writes out what it drops."""

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from flash_jax import dispatch, dropout
from flash_jax import mask as masks
from flash_jax.align import LONGEST, Shape, align
from flash_jax.autodiff import attend
from flash_jax.mask import Mask
from flash_jax.problem import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    Operands,
    Problem,
    as_array,
    check_flag,
    check_qkv,
    fold_batch,
    static_float,
    static_int,
    static_scale,
    unfold_batch,
)
from flash_jax.promotion import promoting

Query = Float[Array, "*batch q_len heads head_dim"]
Key = Float[Array, "*batch kv_len kv_heads head_dim"]
Value = Float[Array, "*batch kv_len kv_heads v_head_dim"]


def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[ArrayLike, "*batch"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "*batch"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    q_segment_ids: Int[ArrayLike, "*batch q_len"] | None = None,
    kv_segment_ids: Int[ArrayLike, "*batch kv_len"] | None = None,
    q_offset: int | Int[Array, "*batch"] = 0,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    deterministic_backward: bool = False,
    block_sizes: tuple[int, int] | None = None,
) -> Any:
    """Exact softmax attention in linear memory, forward and backward.

        out = softmax(soft_cap(scale * query . key) + bias, over visible keys) . value

    A strict superset of `jax.nn.dot_product_attention`: its parameters keep their names, order and meaning. The softmax is
    computed tile after tile and never stored (FlashAttention, arXiv 2205.14135, Algorithms 1 and 4).

    Args:
      query: `[*batch, q_len, heads, head_dim]`, float32, bfloat16, float16 or float64.
      key: `[*batch, kv_len, kv_heads, head_dim]`, the same dtype. `heads` is a multiple of `kv_heads`; query head `n`
        reads key head `n // (heads // kv_heads)` (GQA, MQA).
      value: `[*batch, kv_len, kv_heads, v_head_dim]`; `v_head_dim` may differ from `head_dim`. Both from 1 to 512.
      bias: added after scale and soft cap; any float dtype, right-aligned to `[*batch, heads, q_len, kv_len]`, each axis full or
        1. Its gradient has its own shape. An entry of -inf hides the key.
      mask: booleans aligned like `bias`, True = visible; or a `Mask`, a rule that costs no q_len * kv_len array.
      scale: factor of `query . key`; default `1 / sqrt(head_dim)`. A number, or a (traced) scalar array with gradient.
      is_causal: row i sees keys `j <= i + q_offset`. Top-left aligned when lengths differ; bottom-right is
        `q_offset = kv_len - q_len`.
      query_seq_lengths: integers `[*batch]`: rows from there on give 0.
      key_value_seq_lengths: integers `[*batch]`: keys from there on are hidden.
      local_window_size: `(left, right)`: row i sees `i + q_offset - left <= j <= i + q_offset + right`, both ends inclusive; None on a
        side is unbounded; `w` means `(w, w)`.
      implementation: None chooses (see `explain`); a name, or a sequence of names in order of preference.
      return_residual: return `(out, lse)`.
      q_segment_ids: int32 values `[*batch, q_len]`, given together with `kv_segment_ids`: only equal ids see each other. See
        `segment_ids` for packed sequences.
      kv_segment_ids: int32 values `[*batch, kv_len]`.
      q_offset: key position of query row 0, for decoding, chunks and bottom-right alignment; an int, or integers `[*batch]`.
      logits_soft_cap: `cap * tanh(s / cap)` on the scaled scores, before bias and mask.
      sinks: `[heads]`, one further logit a head that takes probability and gives no value; neither scaled nor capped; part of
        lse; has a gradient. -inf: none for that head.
      dropout_rate: probability of dropping a weight, in [0, 1); kept ones are multiplied by `1 / (1 - rate)`.
      dropout_key: PRNG key, typed or raw; needed when the rate is not 0. Which weights drop is a function of (key, batch entry,
        head, i + q_offset, j) alone, the same for every implementation; `dropout_mask` writes it out. Inside `shard_map` fold
        the mesh position into the key.
      broadcast_dropout: drop the same weights in every batch entry and head.
      deterministic_backward: gradients are bitwise repeatable; a kernel may be slower with it.
      block_sizes: `(block_q, block_kv)` for the tiles instead of the tuned ones.

    Returns:
      out `[*batch, q_len, heads, v_head_dim]` in the inputs' dtype; with `return_residual` also lse `[*batch, q_len, heads]`, the
      natural log-sum-exp of the logits, float32 (float64 for float64), differentiable.
      A row that sees no key has out 0, lse -inf and zero gradients (`jax.nn` returns the mean of `value`). Whatever keys hold that
      no row sees, NaN included, reaches nothing.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it, what came and what was expected.
      NotImplementedError: the implementation asked for cannot serve this call, and why. `"xla"` serves every call. Or rules that no
        implementation joins, see `Mask`.
    """
    arguments = {name: x for name, x in locals().items() if name not in ("implementation", "return_residual")}
    check_flag("return_residual", return_residual)
    request = prepare(**arguments, wants_lse=return_residual or sinks is not None)
    device = dispatch.current_device(query, key, value)
    problem = request.problem
    unfold = functools.partial(unfold_batch, like=as_array("query", query), count=len(request.batch))
    backend, explanation = dispatch.choose(problem, device, implementation)
    if 0 in (problem.batch, problem.q_len, problem.kv_len):  # nothing to visit; the derivative rules need not know
        out = jnp.zeros(problem.out_shape, problem.dtype)
        lse = jnp.full(problem.lse_shape, -jnp.inf, problem.compute_dtype)
    elif backend.whole is not None:
        return unfold(backend.whole(problem, request.operands))
    else:
        out, lse = attend(problem, backend, explanation.config, device, request.operands)
    if request.sinks is not None:
        out, lse = _with_sinks(out, lse, request.sinks)
    out, lse = unfold(out), unfold(lse)
    return (out, lse) if return_residual else out


def explain(
    query, key, value, bias=None, mask=None, *, implementation=None, return_residual=False, device=None, **options
) -> dispatch.Explanation:
    """What `flash_attention` would do with these arguments, without computing anything.

    Takes the arguments of `flash_attention`, arrays or `jax.ShapeDtypeStruct`s, checks them alike, and returns the implementation
    chosen, its tiles and why these, and for each other implementation the reason why it does not run. `print` it.

    `device`, a string, asks for other hardware by the name that JAX gives it, `jax.devices()[0].device_kind` there: "cpu", "TPU v6 lite",
    "NVIDIA H100 80GB HBM3". Shorter names such as "H100" choose the same implementation, but only the whole name finds tiles that were
    measured. What is neither "cpu" nor starts with "TPU" counts as a GPU.

    Raises:
      TypeError, ValueError: `device` is no string, or one in lower case other than "cpu"; otherwise as `flash_attention`.
    """
    inspect.signature(flash_attention).bind(query, key, value, bias, mask, **options)
    check_flag("return_residual", return_residual)
    static = {
        name: options.pop(name) for name in ("local_window_size", "logits_soft_cap", "dropout_rate", "block_sizes") if name in options
    }
    arguments = dict(query=query, key=key, value=value, bias=bias, mask=mask, **options)
    static["wants_lse"] = return_residual or options.get("sinks") is not None
    leaves, tree = jax.tree.flatten(arguments)
    is_array = [isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) for x in leaves]
    problem = None

    def trace(*arrays):
        nonlocal problem
        arrays = iter(arrays)
        filled = [next(arrays) if traced else x for x, traced in zip(leaves, is_array, strict=True)]
        problem = prepare(**jax.tree.unflatten(tree, filled), **static).problem

    jax.eval_shape(trace, *(x for x, traced in zip(leaves, is_array, strict=True) if traced))
    assert problem is not None
    where = dispatch.current_device(query, key, value) if device is None else dispatch.named_device(device)
    return dispatch.choose(problem, where, implementation)[1]


@promoting
def dropout_mask(key: Array, rate: float, shape: tuple[int, ...], *, broadcast_dropout: bool = False, q_offset: int | Array = 0) -> Array:
    """The keep mask that `flash_attention` applies, written out: True = kept (and multiplied by `1 / (1 - rate)`).

    Args:
      key: PRNG key, as `dropout_key`.
      rate: probability of dropping, in [0, 1).
      shape: `(*batch, num_heads, q_len, kv_len)`.
      broadcast_dropout: one mask for all batch entries and heads.
      q_offset: as in `flash_attention`, an int or integers `[*batch]`; the bits belong to the position `i + q_offset`.

    Returns:
      Booleans of the given shape. O(q_len * kv_len) memory: for tests and for comparing with other code.
    """
    key, rate = dropout.check_key("key", key), dropout.check_rate("rate", rate)
    check_flag("broadcast_dropout", broadcast_dropout)
    sizes = tuple(static_int("shape", n) for n in shape) if isinstance(shape, Sequence) else ()
    if len(sizes) < 3 or min(sizes) < 0 or max(sizes) > LONGEST:
        raise ValueError(f"shape must be (*batch, num_heads, q_len, kv_len), each from 0 to 2**29, got {shape}.")
    *batch, num_heads, q_len, kv_len = sizes
    rows = _dropout_row_keys(key, Shape(tuple(batch), num_heads, q_len, kv_len), q_offset, broadcast_dropout)
    kept = dropout.keep(rows[..., None], jnp.arange(kv_len, dtype=jnp.int32), rate)
    return jnp.broadcast_to(kept, (math.prod(batch), num_heads, q_len, kv_len)).reshape(sizes)


class Request(NamedTuple):
    """What a call asks for. batch: the user's batch axes."""

    batch: tuple[int, ...]
    problem: Problem
    operands: Operands
    sinks: Array | None


@promoting
def prepare(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    q_offset=0,
    logits_soft_cap=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_key=None,
    broadcast_dropout=False,
    deterministic_backward=False,
    block_sizes=None,
    wants_lse=False,
) -> Request:
    """Every check; the user's words as `Problem` and `Operands`, the batch axes folded into one."""
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    check_qkv(query, key, value)
    for name, flag in (
        ("is_causal", is_causal),
        ("broadcast_dropout", broadcast_dropout),
        ("deterministic_backward", deterministic_backward),
    ):
        check_flag(name, flag)
    *batch, q_len, num_heads, head_dim = query.shape
    kv_len, num_kv_heads, v_head_dim = value.shape[-3:]
    shape = Shape(tuple(batch), num_heads, q_len, kv_len)
    size = math.prod(batch)

    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids must be given together, got only one of them.")
    words = masks.words(mask)
    if is_causal:
        words &= Mask.causal()
    if local_window_size is not None:
        words &= masks.window(local_window_size)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        words &= masks.lengths(query_seq_lengths, key_value_seq_lengths)
    if q_segment_ids is not None:
        words &= masks.segments(q_segment_ids, kv_segment_ids)
    visibility = masks.resolve(words, shape, q_offset)

    if isinstance(bias, Mask):
        raise TypeError("bias must be an array of floats, got a Mask. It goes to mask=.")
    if bias is not None:
        bias = as_array("bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must have a float dtype, got {bias.dtype}. Boolean masks go to mask.")
        bias = align("bias", bias, shape, (num_heads, q_len, kv_len), dtype=bias.dtype)
    problem = Problem(
        batch=size,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=np.dtype(query.dtype),
        mask=visibility.spec,
        scale=static_scale(scale, head_dim),
        logits_soft_cap=_soft_cap(logits_soft_cap),
        dropout_rate=dropout.check_rate("dropout_rate", dropout_rate),
        bias_shape=None if bias is None else bias.shape,
        bias_dtype=None if bias is None else np.dtype(bias.dtype),
        matmul_precision=jax.config.jax_default_matmul_precision,
        wants_lse=wants_lse,
        deterministic_backward=deterministic_backward,
        block_sizes=_block_sizes(block_sizes),
    )
    row_keys = None
    if dropout_key is not None:
        dropout_key = dropout.check_key("dropout_key", dropout_key)
    if problem.dropout_rate:
        if dropout_key is None:
            raise ValueError("dropout_key is required when dropout_rate is not 0, got None. Pass a jax.random.key.")
        row_keys = _dropout_row_keys(dropout_key, shape, q_offset, broadcast_dropout)
    operands = Operands(
        query=fold_batch(query, len(batch)),
        key=fold_batch(key, len(batch)),
        value=fold_batch(value, len(batch)),
        bias=bias,
        scale=_scale_operand(scale, problem),
        mask=visibility.operands,
        dropout_row_keys=row_keys,
    )
    return Request(tuple(batch), problem, operands, _sinks(sinks, num_heads))


def _dropout_row_keys(key: Array, shape: Shape, q_offset, broadcast_dropout: bool) -> Array:
    q_ids = jnp.arange(shape.q_len, dtype=jnp.int32) + masks.offset_rows(q_offset, shape)
    copies = (1, 1) if broadcast_dropout else (math.prod(shape.batch), shape.num_heads)
    return dropout.row_keys(key, *copies, q_ids)


_LARGEST_CAP = 1e30  # far above, scale / cap is no normal float32 number and the scores would become 0


def _soft_cap(logits_soft_cap) -> float | None:
    if logits_soft_cap is None:
        return None
    cap = static_float("logits_soft_cap", logits_soft_cap)
    if not FLOAT32_TINY <= cap <= FLOAT32_MAX:
        raise ValueError(f"logits_soft_cap must be positive and finite in float32, got {cap}. Use None for no cap.")
    if cap > _LARGEST_CAP:
        raise ValueError(f"logits_soft_cap must be at most {_LARGEST_CAP:g}, got {cap:g}. Use None for no cap.")
    return cap


def _block_sizes(block_sizes) -> tuple[int, int] | None:
    if block_sizes is None:
        return None
    try:
        if not isinstance(block_sizes, (Sequence, np.ndarray, jax.Array)):  # a set has no order
            raise TypeError
        block_q, block_kv = (static_int("block_sizes", n) for n in block_sizes)
    except (TypeError, ValueError):
        raise TypeError(f"block_sizes must be None or two integers (block_q, block_kv), got {block_sizes!r}.") from None
    if block_q < 1 or block_kv < 1:
        raise ValueError(f"block_sizes must be at least 1, got {(block_q, block_kv)}.")
    return block_q, block_kv


def _scale_operand(scale, problem: Problem) -> Array | None:
    if problem.scale is not None:
        return None
    scale = as_array("scale", scale)
    if scale.ndim != 0 or not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(f"scale must be a real number or a scalar array, got {scale.dtype}{list(scale.shape)}.")
    return scale.astype(problem.compute_dtype).reshape(1)


def _sinks(sinks, num_heads: int) -> Array | None:
    if sinks is None:
        return None
    sinks = as_array("sinks", sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise TypeError(f"sinks must have a float dtype, got {sinks.dtype}.")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks must have shape [{num_heads}], one logit a query head, got {list(sinks.shape)}.")
    return sinks


@promoting
def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """One further logit a head in the denominator, with `value` 0: plain arithmetic on `(out, lse)`."""
    sinks = jnp.broadcast_to(sinks.astype(lse.dtype), lse.shape)
    empty = lse == -jnp.inf
    nothing = empty & (sinks == -jnp.inf)
    total = jnp.where(nothing, -jnp.inf, jnp.logaddexp(lse, jnp.where(nothing, 0, sinks)))
    share = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, lse) - jnp.where(empty, 0, total)))
    return (out.astype(share.dtype) * share[..., None]).astype(out.dtype), total
