"""What is visible, as the reference, the tile schedule and every kernel read it; `mask` makes it from the user's words.

* An interval: query row `q` sees the keys in `[kv_lo(q), kv_hi(q))`, both non-decreasing in `q`. It is a `RowRule` when
  everything about it is known before tracing (a kernel evaluates it on its own row numbers), else two int32 arrays.
* Predicates that are not intervals, all of which must hold as well: equal labels, boolean arrays, block maps, functions.

The functions at the end evaluate these at given rows and keys. Shapes broadcast: whatever the layout of the tile, rows and keys
line up against it; the reference evaluates one tile that spans everything, the implementations partial tiles.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage] (a name that its module does not list)

from flash_jax import schedule
from flash_jax.varying import vary_alike

Array = jax.Array

OPERAND_KINDS = ("query", "key", "head", "scalar")


@dataclasses.dataclass(frozen=True)
class RowRule:
    """A static interval rule: `rule(q_ids) -> (kv_lo, kv_hi)`, elementwise int32, usable inside a kernel; of NumPy rows NumPy bounds.

    With position `p = q_id + offset`: `kv_lo = max(0, p - left, chunk start)` and
    `kv_hi = min(kv_len, max(p + right + 1, prefix), chunk end)`, then clipped so that `0 <= kv_lo <= kv_hi <= kv_len`.
    """

    kv_len: int
    offset: int = 0
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    chunk: int | None = None

    def __call__(self, q_ids) -> tuple[Any, Any]:
        return interval(self, q_ids, self.offset, self.prefix)

    def unclipped(self, q_ids) -> tuple[Any | None, Any | None]:
        """The bounds before they are clipped, None where there is none: of a key that exists they say the same, with fewer operations."""
        return _unclipped(self, q_ids + self.offset, self.prefix)

    @property
    def is_trivial(self) -> bool:
        """Every row sees every key."""
        return self.left is None and self.right is None and self.chunk is None


def interval(rule: RowRule, q_ids, offset, prefix):
    """`RowRule.__call__` with an offset and a prefix that may be arrays."""
    position = q_ids + offset
    xp = schedule.numpy_or_jax(position)
    lo, hi = _unclipped(rule, position, prefix)
    lo = xp.zeros_like(position) if lo is None else xp.minimum(xp.maximum(lo, 0), rule.kv_len)
    hi = xp.full_like(position, rule.kv_len) if hi is None else xp.minimum(hi, rule.kv_len)
    return lo, xp.maximum(hi, lo)


def _unclipped(rule: RowRule, position, prefix):
    xp = schedule.numpy_or_jax(position)
    lo = None if rule.left is None else position - rule.left
    hi = None if rule.right is None else position + (rule.right + 1)
    if hi is not None and prefix is not None:
        hi = xp.maximum(hi, prefix)
    if rule.chunk is not None:
        size, rem = xp.int32(rule.chunk), np.fmod if xp is np else jax.lax.rem
        start = position - rem(rem(position, size) + size, size)  # the remainder of a negative position is positive
        lo = start if lo is None else xp.maximum(lo, start)
        hi = start + rule.chunk if hi is None else xp.minimum(hi, start + rule.chunk)
    return lo, hi


@dataclasses.dataclass(frozen=True)
class MaskFunction:
    """A scalar predicate of `(batch, head, q_id, kv_id, *operands)` with its captured arrays made operands.

    `kinds[n]` lays out operand `n`: one of `OPERAND_KINDS`, or `"captured"` for an array read whole.
    """

    jaxpr: Any
    kinds: tuple[str, ...]

    @property
    def reads_head(self) -> bool:
        """Whether the result can differ by head."""
        return self._uses(1) or "head" in self.kinds

    @property
    def reads_batch(self) -> bool:
        """Whether the result can differ by batch entry though the operands do not."""
        return self._uses(0)

    def _uses(self, n: int) -> bool:
        index = self.jaxpr.invars[n]  # an int32, so never the result itself
        return any(index is v for equation in self.jaxpr.eqns for v in equation.invars)

    def __call__(self, batch, head, q_id, kv_id, *operands):
        (visible,) = evaluate(self.jaxpr, (batch, head, q_id, kv_id, *operands))
        return visible


_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}  # and the parameter that holds the function


def called(equation) -> ClosedJaxpr | None:
    """The function that an equation does nothing but call."""
    name = equation.primitive.name
    return equation.params[_CALLS[name]] if name in _CALLS else None


def bind(equation, inputs: Sequence) -> Sequence:
    """The results of one equation."""
    if equation.primitive.name == "pvary":  # how values vary is a matter of where the function is evaluated, not of where it was traced
        return inputs
    results = equation.primitive.bind(*vary_alike(inputs), **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def evaluate(jaxpr, values: Sequence, bind: Callable[[Any, Sequence], Sequence] = bind) -> list:
    """A function on its constants and arguments, equation by equation; called functions are looked into."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
    number = lambda v: np.asarray(v.val, v.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    read = lambda v: number(v) if isinstance(v, Literal) else known[v]
    for equation in jaxpr.eqns:
        inputs, inner = [read(v) for v in equation.invars], called(equation)
        results = bind(equation, inputs) if inner is None else evaluate(inner.jaxpr, (*inner.consts, *inputs), bind)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


class MaskSpec(NamedTuple):
    """The static half of a `Visibility`: hashable, part of `Problem`.

    rule: the interval, or None when the bounds are operands.
    has_labels: the operands have q_labels and kv_labels.
    num_dense: how many boolean arrays they have.
    block_sizes: (block_q, block_kv) of each block map.
    """

    rule: RowRule | None
    has_labels: bool = False
    num_dense: int = 0
    block_sizes: tuple[tuple[int, int], ...] = ()
    functions: tuple[MaskFunction, ...] = ()

    @property
    def has_patterns(self) -> bool:
        """Boolean arrays, block maps or functions, whose visible tiles may lie anywhere; of the other rules they are mostly a range."""
        return bool(self.num_dense or self.block_sizes or self.functions)

    @property
    def evaluates_scores(self) -> bool:
        """Boolean arrays or functions, which say nothing of a tile before it is looked at score by score."""
        return bool(self.num_dense or self.functions)

    @property
    def is_interval(self) -> bool:
        """The interval is all there is."""
        return not (self.has_labels or self.has_patterns)

    @property
    def hides_nothing(self) -> bool:
        """Known before tracing: every row sees every key."""
        return self.is_interval and self.rule is not None and self.rule.is_trivial


class MaskOperands(NamedTuple):
    """The array half of a `Visibility`. A leading axis of 1 is shared by the whole batch.

    kv_lo, kv_hi: int32 `[1 | batch, q_len]`, or None when `MaskSpec.rule` says it.
    q_labels, kv_labels: int32 `[1 | batch, len]` or None; visible only where equal.
    dense: booleans `[1 | batch, 1 | num_heads, 1 | q_len, 1 | kv_len]`, True = visible.
    blocks: booleans `[1 | batch, 1 | num_heads, num_q_blocks, num_kv_blocks]`, with `MaskSpec.block_sizes`.
    functions: operands of each `MaskSpec.functions`: `[1 | batch, len]` by kind, captured ones whole with a leading axis of 1.
    batch_ids: int32 `[batch]`, the batch index that functions see, or None without functions.
    """

    kv_lo: Array | None = None
    kv_hi: Array | None = None
    q_labels: Array | None = None
    kv_labels: Array | None = None
    dense: tuple[Array, ...] = ()
    blocks: tuple[Array, ...] = ()
    functions: tuple[tuple[Array, ...], ...] = ()
    batch_ids: Array | None = None


class Visibility(NamedTuple):
    """Both halves of what is visible."""

    spec: MaskSpec
    operands: MaskOperands


def row_bounds(spec: MaskSpec, operands: MaskOperands, q_len: int) -> tuple[Array, Array]:
    """kv_lo, kv_hi: int32 `[1 | batch, q_len]`, whoever says them."""
    if spec.rule is None:
        assert operands.kv_lo is not None and operands.kv_hi is not None
        return operands.kv_lo, operands.kv_hi
    lo, hi = spec.rule(jnp.arange(q_len, dtype=jnp.int32))
    return lo[None], hi[None]


def static_bounds(spec: MaskSpec, q_len: int) -> tuple[np.ndarray, np.ndarray] | None:
    """`row_bounds` if they are known before tracing."""
    if spec.rule is None:
        return None
    lo, hi = spec.rule(np.arange(q_len, dtype=np.int32))
    return lo[None], hi[None]


def tile_kinds(
    spec: MaskSpec, operands: MaskOperands, lengths: tuple[int, int], tiles: tuple[int, int], of_functions: Iterable[Array]
) -> Array:
    """Kinds of tiles (see `schedule`), int8 `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`.

    lengths: q_len, kv_len. tiles: block_q, block_kv. of_functions: the kinds of the mask functions, which each implementation evaluates
    in its own way.
    """
    terms = kinds_of_rules(spec, operands, lengths, tiles)
    terms += [schedule.dense_kinds(x, *tiles, *lengths) for x in operands.dense]
    terms += [schedule.block_kinds(x, sizes, *tiles, *lengths) for x, sizes in zip(operands.blocks, spec.block_sizes, strict=True)]
    return functools.reduce(jnp.minimum, [*terms, *of_functions])


def kinds_of_rules(spec: MaskSpec, operands: MaskOperands, lengths: tuple[int, int], tiles: tuple[int, int]) -> list[Array]:
    """Kinds of tiles by row bounds alone, and by labels alone if there are some: int8 `[1 | batch, 1, num_q_tiles, num_kv_tiles]`."""
    one_head = lambda x: x[:, None]
    kv_lo, kv_hi = static_bounds(spec, lengths[0]) or row_bounds(spec, operands, lengths[0])
    kinds = [jnp.asarray(schedule.interval_kinds(one_head(kv_lo), one_head(kv_hi), *tiles, lengths[1]))]
    if operands.q_labels is not None and operands.kv_labels is not None:
        kinds.append(schedule.label_kinds(one_head(operands.q_labels), one_head(operands.kv_labels), *tiles))
    return kinds


def on_all_scores(spec: MaskSpec, operands: MaskOperands, num_heads: int, lengths: tuple[int, int]) -> Array:
    """Booleans `[1 | batch, 1 | num_heads, 1 | q_len, kv_len]`, every rule joined: to be reduced at once if memory is to stay linear."""
    q_ids, kv_ids = (jnp.arange(n, dtype=jnp.int32) for n in lengths)
    seen = jnp.ones((1, 1, 1, lengths[1]), bool)
    if spec.rule is None or not spec.rule.is_trivial:
        seen &= in_interval(*row_bounds(spec, operands, lengths[0]), kv_ids)[:, None]
    if operands.q_labels is not None and operands.kv_labels is not None:
        seen &= equal_labels(operands.q_labels, operands.kv_labels)[:, None]
    for array in operands.dense:
        seen &= array
    for blocks, block_sizes in zip(operands.blocks, spec.block_sizes, strict=True):
        seen &= in_blocks(blocks, block_sizes, q_ids, kv_ids)
    for function, arrays in zip(spec.functions, operands.functions, strict=True):
        seen &= by_function_on_all_heads(function, operands.batch_ids, num_heads, q_ids, kv_ids, arrays)
    return seen


def in_interval(kv_lo: Array, kv_hi: Array, kv_ids: Array) -> Array:
    """`[..., block_q]` bounds and `[block_kv]` key positions -> booleans `[..., block_q, block_kv]`."""
    return (kv_lo[..., None] <= kv_ids) & (kv_ids < kv_hi[..., None])


def equal_labels(q_labels: Array, kv_labels: Array) -> Array:
    """`[..., block_q]` and `[..., block_kv]` -> booleans `[..., block_q, block_kv]`."""
    return q_labels[..., :, None] == kv_labels[..., None, :]


def in_blocks(blocks: Array, block_sizes: tuple[int, int], q_ids: Array, kv_ids: Array) -> Array:
    """Block map `[..., num_q_blocks, num_kv_blocks]` at `q_ids`, `kv_ids` -> booleans `[..., block_q, block_kv]`."""
    rows = jnp.take(blocks, q_ids // block_sizes[0], axis=-2, mode="clip")
    return jnp.take(rows, kv_ids // block_sizes[1], axis=-1, mode="clip")


def by_function(function: MaskFunction, batch: Array, head: Array, q_ids: Array, kv_ids: Array, operands: tuple[Array, ...]) -> Array:
    """A scalar mask function over a tile -> booleans `[batch, head, block_q, block_kv]`.

    `batch` `[b]`, `head` `[h]`, `q_ids` and `kv_ids` are the indices that the function sees. Operands have a leading axis 1 or
    b; after it `"query"` ones have `block_q`, `"key"` ones `block_kv`, `"head"` ones `h` entries; captured ones are whole.
    """

    def axes(kind: str) -> list[int | None]:
        return [0 if function.kinds[n] == kind else None for n in range(len(operands))]

    batch = jnp.broadcast_to(batch, max(batch.shape[0], *(x.shape[0] for x in operands), 1))  # one index may be shared by all
    shared = [operand.shape[0] == 1 and batch.shape[0] != 1 for operand in operands]
    operands = tuple(operand[0] if one else operand for operand, one in zip(operands, shared, strict=True))
    per_batch = [None if one else 0 for one in shared]
    on_tile = jax.vmap(function, (None, None, None, 0, *axes("key")))
    on_tile = jax.vmap(on_tile, (None, None, 0, None, *axes("query")))
    on_tile = jax.vmap(on_tile, (None, 0, None, None, *axes("head")))
    on_tile = jax.vmap(on_tile, (0, None, None, None, *per_batch))
    return on_tile(batch, head, q_ids, kv_ids, *operands)


def by_function_on_all_heads(
    function: MaskFunction, batch_ids, num_heads: int, q_ids: Array, kv_ids: Array, operands: tuple[Array, ...]
) -> Array:
    """`by_function` for all batch entries and heads; once for all of those to which the function is the same."""
    if not function.reads_batch and all(x.shape[0] == 1 for x in operands):
        batch_ids = batch_ids[:1]
    heads = jnp.arange(num_heads if function.reads_head else 1, dtype=jnp.int32)
    return by_function(function, batch_ids, heads, q_ids, kv_ids, operands)
