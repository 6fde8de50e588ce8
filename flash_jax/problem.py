"""Problem (what is asked, static and hashable) and Operands (the arrays), with every check on shape and dtype."""

import dataclasses
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from flash_jax.visibility import MaskOperands, MaskSpec

Array = jax.Array

FLOAT32_TINY, FLOAT32_MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem without its arrays: the static argument of the derivative rules, all that `why_not` sees.

    Legend: the user's batch axes are folded into one; `group = num_heads // num_kv_heads`.

    scale: factor of q.k, or None when it is an operand (a traced scalar).
    logits_soft_cap: cap of `cap * tanh(s / cap)`, or None.
    dropout_rate: probability of dropping; 0 means no dropout.
    bias_shape, bias_dtype: `[1 | batch, 1 | num_heads, 1 | q_len, 1 | kv_len]`, or None without bias.
    mask: the static half of the visibility.
    matmul_precision: `jax.default_matmul_precision` where `flash_attention` was called; None: float32 products are not rounded.
    wants_lse: the caller uses lse (return_residual, sinks).
    deterministic_backward: gradients must be bitwise repeatable.
    block_sizes: (block_q, block_kv) that the user asked for, or None.
    """

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype
    mask: MaskSpec
    scale: float | None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: np.dtype | None = None
    matmul_precision: str | None = None
    wants_lse: bool = False
    deterministic_backward: bool = False
    block_sizes: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def compute_dtype(self) -> np.dtype:
        """dtype of scores, softmax, accumulators and lse: float32, or float64 for float64 inputs."""
        return np.promote_types(self.dtype, np.float32) if self.dtype.kind == "f" else np.dtype(np.float32)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.q_len, self.num_heads, self.v_head_dim)

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.q_len, self.num_heads)


class Operands(NamedTuple):
    """The arrays of a problem. A leading axis of 1 is shared by the whole batch.

    query, key, value: `[batch, q_len, num_heads, head_dim]`, `[batch, kv_len, num_kv_heads, head_dim | v_head_dim]`.
    bias: added to the scaled and capped scores, `Problem.bias_shape`, any float dtype; or None.
    scale: compute dtype `[1 | batch]`, or None when `Problem.scale` says it.
    mask: the arrays of the visibility.
    dropout_row_keys: uint32 `[1 | batch, 1 | num_heads, q_len]`, or None without dropout; see `flash_jax.dropout`.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    scale: Array | None
    mask: MaskOperands
    dropout_row_keys: Array | None


DIFFERENTIABLE = ("query", "key", "value", "bias", "scale")  # fields of Operands that have gradients


def as_array(name: str, x) -> Array:
    """`x` as an array, or an error that names the argument."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {error}") from None


def as_integers(name: str, x) -> Array:
    """`as_array` of any integer dtype."""
    x = as_array(name, x)
    check_integers(name, x)
    return x


def check_integers(name: str, x) -> None:
    """Any integer dtype, of an array or a shape, or of what `as_array` takes."""
    if not jnp.issubdtype(_dtype(name, x), jnp.integer):
        raise TypeError(f"{name} must hold integers, got {_dtype(name, x)}.")


def check_booleans(name: str, x) -> None:
    """Likewise."""
    if _dtype(name, x) != jnp.bool_:
        raise TypeError(f"{name} must be boolean (True = visible), got {_dtype(name, x)}. Additive masks go to bias.")


def _dtype(name: str, x) -> np.dtype:
    return x.dtype if hasattr(x, "dtype") else as_array(name, x).dtype


def fold_batch(x: Array, count: int) -> Array:
    """The first `count` axes as one, divided over a mesh with explicit axes by all that divides them."""
    shape, sharding = (math.prod(x.shape[:count]), *x.shape[count:]), jax.typeof(x).sharding
    spec = sharding.spec
    names = tuple(name for axis in spec[:count] if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,)))
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=PartitionSpec(names, *spec[count:])) if names else None)


def unfold_batch(x: Array, like: Array, count: int) -> Array:
    """The first axis as the first `count` axes of `like`, and divided as these."""
    shape, sharding = (*like.shape[:count], *x.shape[1:]), jax.typeof(x).sharding
    spec = jax.typeof(like).sharding.spec[:count]
    divided = any(axis is not None for axis in spec)
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=PartitionSpec(*spec, *sharding.spec[1:])) if divided else None)


def static_int(name: str, x) -> int:
    """A size that must be known before tracing; booleans are not sizes."""
    try:
        if isinstance(x, (bool, np.bool_)):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be a Python or NumPy integer known before tracing, got {type(x).__name__}.") from None


def static_float(name: str, x) -> float:
    """A number that must be known before tracing."""
    if isinstance(x, Tracer):
        raise TypeError(f"{name} must be a number known before tracing, got a tracer. Close over it or mark it static in jit.")
    dtype = getattr(x, "dtype", np.dtype(float) if isinstance(x, (int, float)) and not isinstance(x, bool) else None)
    if dtype is None or not (jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating)) or np.ndim(x) != 0:
        raise TypeError(f"{name} must be a number, got {type(x).__name__}.")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer of {int(x).bit_length()} bits.") from None


def check_flag(name: str, flag) -> None:
    """A yes or no that must be known before tracing."""
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, known before tracing, got {type(flag).__name__}.")


def check_qkv(query: Array, key: Array, value: Array) -> None:
    """Rank, dtype and shape rules of the three inputs, `[*batch, len, heads, head_dim]`."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape [*batch, len, heads, head_dim] with at least 3 axes, got {list(x.shape)}.")
        for axis, size in zip(("len", "heads", "head_dim"), x.shape[-3:], strict=True):
            if not isinstance(size, int):
                raise ValueError(f"{name}: {axis} must be a number, got {size}. Only batch axes may be symbolic; pad to a fixed length.")
        if not jnp.issubdtype(x.dtype, jnp.floating) or np.dtype(x.dtype).itemsize == 1:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got dtype {x.dtype}.")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}. Cast them alike.")
    if not query.ndim == key.ndim == value.ndim:
        raise ValueError(f"query, key and value must have one rank, got {query.ndim}, {key.ndim}, {value.ndim}.")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in all but the last axis, got {list(key.shape)} and {list(value.shape)}.")
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key must have the same batch axes, got {list(query.shape)} and {list(key.shape)}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, got {query.shape[-1]} and {key.shape[-1]}.")
    for name, x in (("query", query), ("value", value)):
        if not 1 <= x.shape[-1] <= 512:
            raise ValueError(f"{name}: head_dim must be from 1 to 512, got {x.shape[-1]}.")
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a positive multiple of the key and value heads, got {num_heads} and {num_kv_heads}: query "
            f"{list(query.shape)}, key {list(key.shape)}, whose axes are [*batch, len, heads, head_dim]."
        )


def static_scale(scale, head_dim: int) -> float | None:
    """The scale as a Python float, or None when it is an array to be passed as an operand."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool):
        if not abs(scale) <= FLOAT32_MAX:
            raise ValueError(f"scale must be finite in float32, got {scale}.")
        return float(scale)
    return None
