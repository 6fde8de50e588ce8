"""One slot's operands read by tile, the visible scores of a tile, and the loops over the tiles that hold any."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax import dropout, schedule, visibility
from flash_jax.backends.xla.layout import Arrays, Config, Split, arrange, at_slot, slice_tile
from flash_jax.problem import Operands, Problem
from flash_jax.varying import varying_like

Array = jax.Array


def keys_first(x: Array) -> Array:
    """`[batch_inner, head_inner, group, block_q, block_kv]` as a tile of scores, `[batch_inner, head_inner, block_kv, group, block_q]`."""
    return jnp.moveaxis(x, -1, 2)


class Seen(NamedTuple):
    """What is visible of a tile, broadcastable against it.

    scores: booleans `[batch_inner, head_inner, block_kv, group, block_q]`.
    keys: which keys some row of the tile sees, `[batch_inner, head_inner, block_kv]`.
    rows: which rows see some key of the tile, `[batch_inner, head_inner, group, block_q]`.
    """

    scores: Array
    keys: Array
    rows: Array

    def clean_keys(self, x: Array, axis: int) -> Array:
        """Zero the keys, on `axis` of a matrix, that no row sees: whatever padding holds must not meet 0 * NaN."""
        return jnp.where(jnp.expand_dims(self.keys, 5 - axis), x, jnp.zeros_like(x))

    def clean_rows(self, x: Array) -> Array:
        """Zero the rows of `[batch_inner, head_inner, group, block_q, dim]` that see no key."""
        return jnp.where(self.rows[..., None], x, jnp.zeros_like(x))


class AllSeen(NamedTuple):
    """Every score of the tile is visible."""

    scores: None = None

    def clean_keys(self, x: Array, axis: int) -> Array:
        del axis
        return x

    def clean_rows(self, x: Array) -> Array:
        return x


class Slot:
    """One slot's operands, read by tile: `i` numbers q tiles, `j` key tiles."""

    def __init__(self, problem: Problem, config: Config, split: Split, arrays: Arrays, slot: Array):
        self.problem, self.config, self.split = problem, config, split
        self.index = (slot // split.head_slots, lax.rem(slot, jnp.int32(split.head_slots)))
        self.arrays: Arrays = jax.tree.map(self.take, arrays)

    def take(self, x: Array) -> Array:
        return at_slot(x, *self.index)

    def rows(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[..., q_len, dim]`."""
        return slice_tile(x, x.ndim - 2, i, self.config.block_q)

    def row_numbers(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[..., q_len]`."""
        return slice_tile(x, x.ndim - 1, i, self.config.block_q)

    def keys(self, x: Array, j: Array) -> Array:
        """Tile `j` of `[..., 1, kv_len, dim]`, without the group axis."""
        return slice_tile(x, x.ndim - 2, j, self.config.block_kv)[:, :, 0]

    def transposed_keys(self, x: Array, j: Array) -> Array:
        """Tile `j` of `[..., 1, dim, kv_len]`, without the group axis."""
        return slice_tile(x, x.ndim - 1, j, self.config.block_kv)[:, :, 0]

    def tile(self, x: Array, i: Array, j: Array) -> Array:
        """Tile `(i, j)` of `[..., 1 | q_len, 1 | kv_len]`, keys before rows as in a tile of scores."""
        return keys_first(slice_tile(self.rows(x, i), x.ndim - 1, j, self.config.block_kv))

    def q_ids(self, i: Array) -> Array:
        return i * self.config.block_q + jnp.arange(self.config.block_q, dtype=jnp.int32)

    def kv_ids(self, j: Array) -> Array:
        return j * self.config.block_kv + jnp.arange(self.config.block_kv, dtype=jnp.int32)

    def bias(self, i: Array, j: Array) -> Array | None:
        if self.arrays.bias is None:
            return None
        return self.tile(self.arrays.bias, i, j).astype(self.problem.compute_dtype)

    def scale(self) -> float | Array:
        scale = self.problem.scale if self.arrays.scale is None else self.arrays.scale
        assert scale is not None
        return scale

    def kept(self, i: Array, j: Array) -> Array:
        assert self.arrays.dropout_row_keys is not None
        row_keys = self.row_numbers(self.arrays.dropout_row_keys, i)
        return dropout.keep(row_keys[:, :, None], self.kv_ids(j)[:, None, None], self.problem.dropout_rate)

    def drop(self, x: Array, i: Array, j: Array) -> Array:
        """Dropout on a tile: kept entries times `1 / (1 - rate)`, others 0."""
        if self.arrays.dropout_row_keys is None:
            return x
        return jnp.where(self.kept(i, j), x * (1 / (1 - self.problem.dropout_rate)), 0)

    def by_function(self, n: int, i: Array, j: Array) -> Array:
        """Mask function `n` on a tile."""
        function, split = self.problem.mask.functions[n], self.split
        heads = (split.head_inner, split.group) if function.reads_head else (1, 1)
        first = self.index[1] * (split.head_inner * split.group)
        head_ids = first + jnp.arange(heads[0] * heads[1], dtype=jnp.int32)

        def read(kind: str, x: Array) -> Array:  # leading axes batch_inner, head_inner, group
            match kind:
                case "query":
                    return self.row_numbers(x, i)[:, 0, 0]
                case "key":
                    return slice_tile(x, x.ndim - 1, j, self.config.block_kv)[:, 0, 0]
                case "head":
                    return x.reshape(x.shape[0], -1)
                case _:
                    return x[:, 0, 0]

        operands = tuple(read(kind, x) for kind, x in zip(function.kinds, self.arrays.functions[n], strict=True))
        assert self.arrays.batch_ids is not None
        batch_ids = self.arrays.batch_ids[:, 0, 0]
        seen = visibility.by_function(function, batch_ids, head_ids, self.q_ids(i), self.kv_ids(j), operands)
        return keys_first(seen.reshape(seen.shape[0], *heads, *seen.shape[2:]))

    def seen(self, i: Array, j: Array, masked: bool) -> Seen | AllSeen:
        """What is visible of a tile; `masked` unless the schedule knows that the mask hides none of it."""
        terms = []
        a = self.arrays
        if masked:
            kv_ids = self.kv_ids(j)
            kv_lo, kv_hi = self.row_numbers(a.kv_lo, i), self.row_numbers(a.kv_hi, i)
            terms.append(keys_first(visibility.in_interval(kv_lo, kv_hi, kv_ids)))
            if self.problem.mask.is_interval and a.bias is None:
                return Seen(terms[0], *self._seen_of_intervals(kv_lo, kv_hi, kv_ids))
            if a.q_labels is not None and a.kv_labels is not None:
                kv_labels = slice_tile(a.kv_labels, a.kv_labels.ndim - 1, j, self.config.block_kv)
                terms.append(keys_first(visibility.equal_labels(self.row_numbers(a.q_labels, i), kv_labels)))
            terms += [self.tile(x, i, j) for x in a.dense]
            for blocks, sizes in zip(a.blocks, self.problem.mask.block_sizes, strict=True):
                terms.append(keys_first(visibility.in_blocks(blocks, sizes, self.q_ids(i), kv_ids)))
            terms += [self.by_function(n, i, j) for n in range(len(a.functions))]
        if a.bias is not None:
            terms.append(self.tile(a.bias, i, j) != -jnp.inf)
        if not terms:
            return AllSeen()
        scores = functools.reduce(jnp.logical_and, terms)
        return Seen(scores, scores.any((3, 4)), scores.any(2))

    def _seen_of_intervals(self, kv_lo: Array, kv_hi: Array, kv_ids: Array) -> tuple[Array, Array]:
        """`Seen.keys` and `Seen.rows` without a reduction over the tile: the intervals of successive rows leave no gap."""
        rows = jnp.maximum(kv_lo, kv_ids[0]) < jnp.minimum(kv_hi, kv_ids[-1] + 1)
        first = jnp.where(rows, kv_lo, self.problem.kv_len).min((2, 3))
        last = jnp.where(rows, kv_hi, 0).max((2, 3))
        return (first[..., None] <= kv_ids) & (kv_ids < last[..., None]), rows

    def kinds(self) -> Array:
        """Kind of each tile, int8 `[num_q_tiles, num_kv_tiles]`: empty or full where it is for all batch entries and heads."""
        problem, a = self.problem, self.arrays
        rows = lambda x, length: None if x is None else x[:, 0, 0, :length]
        heads = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
        operands = visibility.MaskOperands(
            *(rows(x, problem.q_len) for x in (a.kv_lo, a.kv_hi, a.q_labels)),
            kv_labels=rows(a.kv_labels, problem.kv_len),
            dense=tuple(heads(x)[..., : problem.q_len, : problem.kv_len] for x in a.dense),
            blocks=tuple(map(heads, a.blocks)),
        )
        of_functions = (self._function_kinds(n) for n in range(len(a.functions)))
        lengths, tiles = (problem.q_len, problem.kv_len), (self.config.block_q, self.config.block_kv)
        kinds = visibility.tile_kinds(problem.mask, operands, lengths, tiles, of_functions)
        return schedule.classify((kinds != schedule.EMPTY).any((0, 1)), (kinds == schedule.FULL).all((0, 1)))

    def _function_kinds(self, n: int) -> Array:
        """Tile by tile, O(tiles) memory."""
        problem, config = self.problem, self.config

        def kind(i, j):
            inside = (self.kv_ids(j) < problem.kv_len)[:, None, None] & (self.q_ids(i) < problem.q_len)
            seen = self.by_function(n, i, j)
            return schedule.classify(jnp.any(seen & inside), jnp.all(seen | ~inside))

        tiles = lambda length, block: jnp.arange(schedule.num_tiles(length, block), dtype=jnp.int32)
        kv_tiles = tiles(problem.kv_len, config.block_kv)
        return lax.map(lambda i: lax.map(lambda j: kind(i, j), kv_tiles), tiles(problem.q_len, config.block_q))


def _loop(config: Config, lower, upper, length: int, body: Callable[[Array, Any], Any], carry):
    """`carry = body(t, carry)` for `lower <= t < upper`, at most `length` times."""
    if not config.static_loops:
        return lax.fori_loop(lower, upper, body, carry)
    step = jax.checkpoint(body)

    def skip_or_step(carry, t):
        inside = (lower <= t) & (t < upper)
        return lax.cond(inside, step, lambda t, carry: carry, t, carry), None

    return lax.scan(skip_or_step, carry, jnp.arange(length, dtype=jnp.int32))[0]


def over_slots(problem: Problem, config: Config, operands: Operands, body, carry):
    """Scan `body(slot, visit, carry) -> (carry, results)` over the slots.

    `visit(i, step, state)` runs `step(j, masked, state)` over the tiles of q tile `i`. Returns the carry, and the results
    stacked by slot, unfolded into the layout's two leading axes.
    """
    split = Split.of(problem, config, operands)
    arrays = arrange(problem, config, operands, split)
    all_full = problem.mask.hides_nothing and problem.kv_len % config.block_kv == 0
    num_kv_tiles = schedule.num_tiles(problem.kv_len, config.block_kv)

    def one_slot(carry, number):
        slot = Slot(problem, config, split, arrays, number)
        lists = None if all_full or num_kv_tiles == 1 else schedule.tile_lists(slot.kinds())

        def visit(i, step, state):
            state = varying_like(state, operands.query)
            if num_kv_tiles == 1:
                return step(jnp.int32(0), not all_full, state)
            if lists is None:
                return _loop(config, jnp.int32(0), jnp.int32(num_kv_tiles), num_kv_tiles, lambda t, s: step(t, False, s), state)
            index, full_end, end = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in lists)
            state = _loop(config, jnp.int32(0), full_end, num_kv_tiles, lambda t, s: step(index[t], False, s), state)
            return _loop(config, full_end, end, num_kv_tiles, lambda t, s: step(index[t], True, s), state)

        return body(slot, visit, carry)

    slots = split.batch_slots * split.head_slots
    carry, results = lax.scan(one_slot, varying_like(carry, operands.query), jnp.arange(slots, dtype=jnp.int32))
    return carry, jax.tree.map(lambda x: x.reshape(split.batch_slots, split.head_slots, *x.shape[1:]), results)


def q_tiles(problem: Problem, config: Config) -> Array:
    """Numbers of the q tiles, to scan over."""
    return jnp.arange(schedule.num_tiles(problem.q_len, config.block_q), dtype=jnp.int32)
