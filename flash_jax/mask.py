"""Words to row bounds: the only file that knows what causal, window, prefix, chunk, length and segment mean.

Everything a user can say about visibility becomes one `visibility.Visibility`, which is all that the rest of the library reads.
"""

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flash_jax.align import LONGEST, Shape, align, as_labels, as_positions, collapse_batch
from flash_jax.problem import as_array, check_booleans, check_integers, static_int
from flash_jax.visibility import OPERAND_KINDS, MaskFunction, MaskOperands, MaskSpec, RowRule, Visibility, evaluate, interval

Array = jax.Array

_FAR = 2 * LONGEST  # any distance between two positions is smaller


# ----------------------------------------------------------------------------------------------- what a user says
@dataclass_transform(frozen_default=True)
def _term(data: Sequence[str] = (), static: Sequence[str] = ()):
    def register(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        return jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=list(static))

    return register


@_term()
class _Causal:
    """Key j is visible from row i iff j <= i + q_offset."""


@_term(static=("left", "right"))
class _Window:
    """i + q_offset - left <= j <= i + q_offset + right; `None` is unbounded."""

    left: int | None
    right: int | None


@_term(data=("length",))
class _Prefix:
    """j <= i + q_offset or j < length."""

    length: Any


@_term(static=("size",))
class _Chunked:
    """i + q_offset and j lie in the same chunk of `size` positions."""

    size: int


@_term(data=("query", "key"), static=("names",))
class _Lengths:
    """i < query and j < key, each `[*batch]` or `None`; names: what the user calls them."""

    query: Any
    key: Any
    names: tuple[str, str]


@_term(data=("query", "key"), static=("names",))
class _Segments:
    """query[i] == key[j]; ids `[*batch, len]`; names: likewise."""

    query: Any
    key: Any
    names: tuple[str, str]


@_term(data=("array",))
class _Dense:
    array: Any


@_term(data=("operands",), static=("function", "per"))
class _Function:
    function: Callable
    operands: tuple
    per: tuple[str, ...]


@_term(data=("blocks",), static=("block_q", "block_kv"))
class _Blocks:
    blocks: Any
    block_q: int
    block_kv: int


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees: a conjunction of rules, joined with `&`. A pytree; pass it as `mask=`.

    >>> mask = Mask.causal() & Mask.sliding_window(1023, 0) & Mask.segments(ids, ids)
    >>> flash_attention(query, key, value, mask=mask)

    Positions are counted from 0; query row `i` stands at position `i + q_offset`.
    """

    terms: tuple

    __array_ufunc__ = None  # NumPy leaves `array & mask` to `__rand__`

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"a Mask is joined with a Mask, got {type(other).__name__}. A boolean array goes to mask= beside the other words of the "
                "call, or becomes Mask.from_blocks(array, 1, 1)."
            )
        return Mask(self.terms + other.terms)

    def __rand__(self, other) -> "Mask":
        return self & other

    def __bool__(self) -> bool:
        raise TypeError("a Mask is neither true nor false, and `and`, `or`, `not` would drop rules silently. Join rules with &.")

    def _refuse(self, *_) -> "Mask":
        raise TypeError("Masks are joined with & only. A union or a complement is written as Mask.from_function or Mask.from_blocks.")

    __or__ = __ror__ = __invert__ = _refuse

    @property
    def counts_positions(self) -> bool:
        """Whether a rule reads `i + q_offset`."""
        return any(isinstance(term, (_Causal, _Window, _Prefix, _Chunked)) for term in self.terms)

    @staticmethod
    def causal() -> "Mask":
        """Key `j` is visible iff `j <= i + q_offset` (top-left aligned, as in `jax.nn`)."""
        return Mask((_Causal(),))

    @staticmethod
    def sliding_window(left: int | None, right: int | None) -> "Mask":
        """`i + q_offset - left <= j <= i + q_offset + right`, both ends inclusive; `None` is unbounded on that side."""
        return _window("Mask.sliding_window", left, right)

    @staticmethod
    def prefix(length) -> "Mask":
        """The prefix-LM rule: `j <= i + q_offset` or `j < length`. `length`: an int, or integers `[*batch]`."""
        if not _is_static(length):
            check_integers("Mask.prefix: length", length)
        elif length < 0:
            raise ValueError(f"Mask.prefix: length must be non-negative, got {length}. Without a prefix it is Mask.causal().")
        return Mask((_Prefix(length),))

    @staticmethod
    def chunked(size: int) -> "Mask":
        """Row and key lie in the same chunk of `size` consecutive positions."""
        size = static_int("Mask.chunked: size", size)
        if size < 1:
            raise ValueError(f"Mask.chunked: size must be at least 1, got {size}.")
        return Mask((_Chunked(size),))

    @staticmethod
    def lengths(query=None, key=None) -> "Mask":
        """`i < query` and `j < key`; integers `[*batch]` or `None` for no limit."""
        return Mask((_Lengths(query, key, ("Mask.lengths: query", "Mask.lengths: key")),))

    @staticmethod
    def segments(query, key) -> "Mask":
        """`query[i] == key[j]`; integers `[*batch, q_len]` and `[*batch, kv_len]` whose values fit in int32; no id is special."""
        return Mask((_Segments(query, key, ("Mask.segments: query", "Mask.segments: key")),))

    @staticmethod
    def from_function(function: Callable, *operands, per: Sequence[str] = ()) -> "Mask":
        """Visible iff `function(batch, head, q_index, kv_index, *operands)`, a scalar function of int32 indices.

        `function` is written for one element: each argument is a scalar and the result a boolean scalar, joined with `&`, `|`, `~`
        (Python's `and`, `or`, `not` cannot be traced). `q_index` is the row number (`q_offset` is not added). Operands are read at
        the element: `per[n]` says how operand `n` is laid out, `"query"` (`[*batch, q_len]`), `"key"` (`[*batch, kv_len]`),
        `"head"` (`[*batch, num_heads]`) or `"scalar"` (`[*batch]`); leading axes may be left out. Arrays that `function` closes
        over, traced or not, work too; kernels serve them where each is indexed by row, key or head alone (`ids[batch, q_index] ==
        ids[batch, kv_index]`).
        """
        if not callable(function):
            raise TypeError(f"Mask.from_function: function must be callable, got {type(function).__name__}.")
        if isinstance(per, str) or not isinstance(per, Sequence):
            raise TypeError(f"Mask.from_function: per must be a sequence of {OPERAND_KINDS}, such as ('key',), got {per!r}.")
        per = tuple(per)
        if len(per) != len(operands):
            raise ValueError(f"Mask.from_function: per must name one layout for each of the {len(operands)} operands, got {per}.")
        for kind in per:
            if kind not in OPERAND_KINDS:
                raise ValueError(f"Mask.from_function: per entries must be among {OPERAND_KINDS}, got {kind!r}.")
        _check_parameters(function, 4 + len(operands))
        return Mask((_Function(function, tuple(operands), per),))

    @staticmethod
    def from_blocks(blocks, block_q: int, block_kv: int) -> "Mask":
        """Block-sparse attention: key `j` is visible from row `i` iff `blocks[..., i // block_q, j // block_kv]`.

        `blocks`: booleans, right-aligned to `[*batch, num_heads, ceil(q_len / block_q), ceil(kv_len / block_kv)]`.
        """
        block_q, block_kv = (static_int(f"Mask.from_blocks: {name}", n) for name, n in (("block_q", block_q), ("block_kv", block_kv)))
        if block_q < 1 or block_kv < 1:
            raise ValueError(f"Mask.from_blocks: block_q and block_kv must be at least 1, got {block_q} and {block_kv}.")
        check_booleans("Mask.from_blocks: blocks", blocks)
        return Mask((_Blocks(blocks, min(block_q, _FAR), min(block_kv, _FAR)),))


jax.tree_util.register_dataclass(Mask, data_fields=["terms"], meta_fields=[])


def segment_ids(cu_seqlens, length: int) -> Array:
    """Segment ids `[length]` of sequences packed one after another, for `q_segment_ids` and `kv_segment_ids`.

    Args:
      cu_seqlens: integers `[num_sequences + 1]`, the start of each sequence and the end of the last:
        sequence `n` fills positions `cu_seqlens[n]` up to `cu_seqlens[n + 1] - 1`. They rise from 0 to at most `length`,
        which is checked unless they are traced.
      length: static length of the packed axis.

    Returns:
      int32 `[length]`: `n` inside sequence `n`; positions past the last sequence get `num_sequences`, so padding sees padding only.
    """
    cu_seqlens, length = as_array("segment_ids: cu_seqlens", cu_seqlens), static_int("segment_ids: length", length)
    if not 0 <= length <= LONGEST:
        raise ValueError(f"segment_ids: length must be from 0 to 2**29, got {length}.")
    if cu_seqlens.ndim != 1 or cu_seqlens.size == 0 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids: cu_seqlens must be a vector of integers [num_sequences + 1], got {cu_seqlens.dtype}{list(cu_seqlens.shape)}."
        )
    if not isinstance(cu_seqlens, Tracer):
        starts = np.asarray(cu_seqlens)
        if starts[0] != 0 or starts[-1] > length or np.any(np.diff(starts) < 0):
            raise ValueError(
                f"segment_ids: cu_seqlens must rise from 0 to at most length, got {starts} and {length}. It holds where each sequence "
                "starts and where the last one ends: np.concatenate([[0], np.cumsum(lengths)])."
            )
    positions = jnp.arange(length, dtype=jnp.int32)
    return jnp.searchsorted(cu_seqlens[1:].astype(jnp.int32), positions, side="right").astype(jnp.int32)


# -------------------------------------------------------------------------------------------------- translation
def resolve(mask: Mask, shape: Shape, q_offset=0) -> Visibility:
    """Words to bounds and predicates, with every check on what the words hold."""
    static, dynamic = _Interval(shape.kv_len), _DynamicInterval()
    if _is_static(q_offset):
        static.offset = _static_offset(q_offset)
    else:
        dynamic.offset = as_positions("q_offset", q_offset, shape)
    segments: list[_Segments] = []
    operands = MaskOperands()
    functions, block_sizes = [], []
    for term in mask.terms:
        match term:
            case _Causal():
                static.says_causal = True
                static.narrow(None, 0)
            case _Window(left, right):
                static.narrow(left, right)
            case _Prefix(length):
                static.says_prefix = True
                if _is_static(length):
                    static.prefix = _tighter(static.prefix, max(0, min(operator.index(length), LONGEST)), min)
                else:
                    length = as_positions("Mask.prefix: length", length, shape)
                    dynamic.prefix = length if dynamic.prefix is None else jnp.minimum(dynamic.prefix, length)
            case _Chunked(size):
                if static.chunk not in (None, size):
                    raise NotImplementedError(
                        f"Mask.chunked: two sizes, {static.chunk} and {size}, cannot be joined. Use Mask.from_function."
                    )
                static.chunk = size
            case _Lengths(query, key, names):
                if query is not None:
                    query = as_positions(names[0], query, shape)
                    dynamic.q_length = query if dynamic.q_length is None else jnp.minimum(dynamic.q_length, query)
                if key is not None:
                    key = as_positions(names[1], key, shape)
                    dynamic.kv_length = key if dynamic.kv_length is None else jnp.minimum(dynamic.kv_length, key)
            case _Segments(query, key, names):
                query = as_labels(names[0], query, shape, shape.q_len)
                key = as_labels(names[1], key, shape, shape.kv_len)
                segments.append(_Segments(query, key, names))
            case _Dense(array):
                array = align("mask", array, shape, (shape.num_heads, shape.q_len, shape.kv_len))
                operands = operands._replace(dense=(*operands.dense, array))
            case _Blocks(blocks, block_q, block_kv):
                trailing = (shape.num_heads, -(-shape.q_len // block_q), -(-shape.kv_len // block_kv))
                blocks = align("Mask.from_blocks: blocks", blocks, shape, trailing, broadcast=(False, True, False, False))
                operands = operands._replace(blocks=(*operands.blocks, blocks))
                block_sizes.append((block_q, block_kv))
            case _Function():
                function, arrays = _close(term, shape)
                functions.append(function)
                operands = operands._replace(functions=(*operands.functions, arrays))
            case _:
                raise TypeError(f"mask: unknown rule {term!r}.")
    if static.says_causal and static.says_prefix:
        raise ValueError("mask: prefix already contains the causal rule; is_causal=True or Mask.causal() together with it would undo it.")
    if segments:
        operands = operands._replace(q_labels=segments[0].query, kv_labels=segments[0].key)
    for extra in segments[1:]:  # one pair of labels skips tiles; further ones are plain predicates
        function, arrays = _close(_Function(_equal_labels, (extra.query, extra.key), ("query", "key")), shape)
        functions.append(function)
        operands = operands._replace(functions=(*operands.functions, arrays))
    if functions:
        operands = operands._replace(batch_ids=jnp.arange(math.prod(shape.batch), dtype=jnp.int32))
    rule = static.rule()
    if dynamic.is_used:
        lo, hi = dynamic.bounds(rule, shape.q_len)
        operands, rule = operands._replace(kv_lo=lo, kv_hi=hi), None
    spec = MaskSpec(rule, bool(segments), len(operands.dense), tuple(block_sizes), tuple(functions))
    return Visibility(spec, operands)


def _equal_labels(batch, head, q_id, kv_id, q_label, kv_label):
    del batch, head, q_id, kv_id
    return q_label == kv_label


@dataclasses.dataclass
class _Interval:
    """The static part of the interval while terms are collected."""

    kv_len: int
    offset: int = 0
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    chunk: int | None = None
    says_causal: bool = False
    says_prefix: bool = False

    def narrow(self, left, right):
        self.left = _tighter(self.left, left, min)
        self.right = _tighter(self.right, right, min)

    def rule(self) -> RowRule:
        prefix, right = self.prefix, self.right
        if self.says_prefix:
            if right is not None:
                raise NotImplementedError("mask: prefix cannot be joined with a window bounded on the right. Use Mask.from_function.")
            right = 0
        chunk = self.chunk if self.chunk is None else min(self.chunk, _FAR)
        return RowRule(self.kv_len, self.offset, self.left, right, prefix, chunk)


@dataclasses.dataclass
class _DynamicInterval:
    """The data-dependent part: int32 `[1 | batch]` each, or None."""

    offset: Array | None = None
    prefix: Array | None = None
    q_length: Array | None = None
    kv_length: Array | None = None

    @property
    def is_used(self) -> bool:
        return any(x is not None for x in (self.offset, self.prefix, self.q_length, self.kv_length))

    def bounds(self, rule: RowRule, q_len: int) -> tuple[Array, Array]:
        q_ids = jnp.arange(q_len, dtype=jnp.int32)[None]
        offset = rule.offset if self.offset is None else self.offset[:, None]
        prefix = rule.prefix
        if self.prefix is not None:
            dynamic_prefix = self.prefix[:, None]
            prefix = dynamic_prefix if prefix is None else jnp.minimum(prefix, dynamic_prefix)
        lo, hi = interval(rule, q_ids, offset, prefix)
        if self.kv_length is not None:
            length = jnp.maximum(self.kv_length, 0)[:, None]
            lo, hi = jnp.broadcast_arrays(lo, jnp.minimum(hi, length))
            lo = jnp.minimum(lo, hi)
        if self.q_length is not None:
            seen = q_ids < self.q_length[:, None]
            lo, hi = jnp.where(seen, lo, rule.kv_len), jnp.where(seen, hi, rule.kv_len)
        return lo, hi


def _tighter(a, b, smaller):
    return b if a is None else a if b is None else smaller(a, b)


def _is_static(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _static_offset(q_offset) -> int:
    offset = operator.index(q_offset)
    if abs(offset) >= LONGEST:
        raise ValueError(f"q_offset must lie within +-2**29, got {offset}.")
    return offset


def _window(name: str, left, right) -> Mask:
    return Mask((_Window(_window_side(f"{name}: left", left), _window_side(f"{name}: right", right)),))


def _window_side(name: str, value) -> int | None:
    if value is None:
        return None
    value = static_int(name, value)
    if value < 0:
        raise ValueError(f"{name} must be non-negative, got {value}. Use 0 for none on that side, None for all.")
    return min(value, _FAR)


def _check_parameters(function: Callable, count: int) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell
        return
    try:
        signature.bind(*(None,) * count)
    except TypeError:
        raise TypeError(
            f"Mask.from_function: function must take batch, head, q_index, kv_index and each operand, {count} arguments, got {signature}."
        ) from None


def words(mask) -> Mask:
    """The `mask` argument as a `Mask`: None is no rule, an array a dense one."""
    if mask is None:
        return Mask(())
    if callable(mask):
        raise TypeError(
            f"mask must be a boolean array or a Mask, got {mask!r}. A rule of Mask is called, as in Mask.causal(); "
            "a function of yours becomes one by Mask.from_function(function)."
        )
    return mask if isinstance(mask, Mask) else Mask((_Dense(mask),))


def offset_rows(q_offset, shape: Shape) -> Array:
    """q_offset as int32 `[1 | batch, 1]`, to be added to row numbers."""
    if _is_static(q_offset):
        return jnp.full((1, 1), _static_offset(q_offset), jnp.int32)
    return as_positions("q_offset", q_offset, shape)[:, None]


def window(local_window_size) -> Mask:
    """`jax.nn`'s local_window_size: `w` means `(w, w)`."""
    if isinstance(local_window_size, (tuple, list)):
        if len(local_window_size) != 2:
            raise ValueError(f"local_window_size must be one integer or (left, right), got {local_window_size!r}.")
        return _window("local_window_size", *local_window_size)
    return _window("local_window_size", local_window_size, local_window_size)


def lengths(query_seq_lengths, key_value_seq_lengths) -> Mask:
    """The call's lengths."""
    return Mask((_Lengths(query_seq_lengths, key_value_seq_lengths, ("query_seq_lengths", "key_value_seq_lengths")),))


def segments(q_segment_ids, kv_segment_ids) -> Mask:
    """The call's segments."""
    return Mask((_Segments(q_segment_ids, kv_segment_ids, ("q_segment_ids", "kv_segment_ids")),))


def _close(term: _Function, shape: Shape) -> tuple[MaskFunction, tuple[Array, ...]]:
    """Trace the scalar function once; what it closes over becomes operands."""
    trailing = {"query": (shape.q_len,), "key": (shape.kv_len,), "head": (shape.num_heads,), "scalar": ()}
    arrays = [
        collapse_batch(f"Mask.from_function operand {n} (per {kind})", array, shape, trailing[kind])
        for n, (array, kind) in enumerate(zip(term.operands, term.per, strict=True))
    ]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    scalars = [jax.ShapeDtypeStruct((), a.dtype) for a in arrays]
    try:
        closed, out = jax.make_jaxpr(term.function, return_shape=True)(index, index, index, index, *scalars)
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            "Mask.from_function: the function must be arithmetic on its arguments, got Python's and, or, not, if or a < b < c on them. "
            "Use &, |, ~ and jnp.where."
        ) from error
    out = jax.tree.leaves(out)
    if len(out) != 1 or out[0].shape != () or out[0].dtype != jnp.bool_:
        raise TypeError(f"Mask.from_function: the function must return one boolean scalar for scalar indices, got {out}.")
    captured = [jnp.asarray(c) for c in closed.consts]
    types = [*[index] * 4, *scalars, *(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in captured)]
    given = len(types) - len(captured)
    as_arguments = jax.make_jaxpr(lambda *x: evaluate(closed.jaxpr, (*x[given:], *x[:given])))(*types).jaxpr
    return MaskFunction(as_arguments, term.per + ("captured",) * len(captured)), (*arrays, *(c[None] for c in captured))
