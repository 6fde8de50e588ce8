"""One slot's operands read by tile, the visible scores of a tile, and the loops over the tiles that hold any."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax import dropout, schedule, visibility
from flash_jax.backends.xla.layout import Arrays, Config, Index, Split, arrange, in_whole_tiles, pad, slice_tile
from flash_jax.problem import Operands, Problem
from flash_jax.varying import varying_like

Array = jax.Array


def keys_first(x: Array) -> Array:
    """`[batch_inner, head_inner, group, block_q, block_kv]` as a tile of scores, `[batch_inner, head_inner, block_kv, group, block_q]`."""
    return jnp.moveaxis(x, -1, 2)


def beside_tile(x: Array) -> Array:
    """`[batch_inner]` beside a tile of scores."""
    return x[:, None, None, None, None]


class Seen(NamedTuple):
    """What is visible of a tile, broadcastable against it; None for all of it.

    scores: booleans `[batch_inner, head_inner, block_kv, group, block_q]`.
    keys: which keys some row of the tile sees, `[batch_inner, head_inner, block_kv]`.
    rows: which rows see some key of the tile, `[batch_inner, head_inner, group, block_q]`.
    """

    scores: Array | None = None
    keys: Array | None = None
    rows: Array | None = None

    def clean_keys(self, x: Array, axis: int) -> Array:
        """Zero the keys, on `axis` of a matrix, that no row sees: whatever padding holds must not meet 0 * NaN."""
        return x if self.keys is None else jnp.where(jnp.expand_dims(self.keys, 5 - axis), x, jnp.zeros_like(x))

    def clean_rows(self, x: Array) -> Array:
        """Zero the rows of `[batch_inner, head_inner, group, block_q, dim]` that see no key."""
        return x if self.rows is None else jnp.where(self.rows[..., None], x, jnp.zeros_like(x))

    def clean_columns(self, x: Array) -> Array:
        """The same of `[batch_inner, head_inner, dim, group, block_q]`."""
        return x if self.rows is None else jnp.where(self.rows[:, :, None], x, jnp.zeros_like(x))


def _loop(config: Config, lower, upper, length: int, body: Callable[[Array, Any], Any], carry):
    """`carry = body(t, carry)` for `lower <= t < upper`, at most `length` times."""
    if not config.static_loops:
        return lax.fori_loop(lower, upper, body, carry)
    step = jax.checkpoint(body)

    def skip_or_step(carry, t):
        inside = (lower <= t) & (t < upper)
        return lax.cond(inside, step, lambda t, carry: carry, t, carry), None

    return lax.scan(skip_or_step, carry, jnp.arange(length, dtype=jnp.int32))[0]


class Slot:
    """One slot's operands, read by tile: `i` numbers q tiles, `j` key tiles."""

    def __init__(self, problem: Problem, config: Config, split: Split, operands: Operands, index: Index):
        self.problem, self.config, self.split, self.index = problem, config, split, index
        self.arrays = self.arrange(operands)
        self.num_kv_tiles = schedule.num_tiles(problem.kv_len, config.block_kv)
        self.all_full = problem.mask.hides_nothing and problem.kv_len % config.block_kv == 0
        self.none_idle = self._none_idle()
        self.lists = None if self.all_full or self.num_kv_tiles == 1 else schedule.tile_lists(self.kinds())

    def arrange(self, operands: Operands) -> Arrays:
        return arrange(self.problem, self.config, operands, self.split, self.index)

    def take_rows(self, x: Array) -> Array:
        """The slot's part of `[batch, q_len, num_heads, ...]`, padded to whole tiles."""
        return pad(self.split.part(x, self.index, 2), 1, self.config.block_q)

    def rows(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[b, q_len, heads, ...]` as `[b, head_inner, group, block_q, ...]`."""
        x = slice_tile(x, 1, i, self.config.block_q)
        x = x.reshape(*x.shape[:2], self.split.head_inner, self.split.group, *x.shape[3:])
        # Else XLA reads it once more for each use, for a transposed one column by column (measured: python -m flash_jax.bench cpu).
        return lax.optimization_barrier(jnp.moveaxis(x, 1, 3))

    def put_rows(self, whole: Array, i: Array, x: Array) -> Array:
        """Write `[b, head_inner, group, block_q, ...]` as tile `i` of `[batch, q_len, num_heads, ...]`."""
        x = jnp.moveaxis(x, 3, 1)
        x = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])
        return self.split.put(whole, x, self.index, i * self.config.block_q)

    def keys(self, x: Array, j: Array) -> Array:
        """Tile `j` of `[num_kv_tiles, b * head_inner, ...]` as `[b, head_inner, ...]`."""
        x = lax.dynamic_index_in_dim(x, j, keepdims=False)
        return x.reshape(self.split.batch_inner, self.split.head_inner, *x.shape[1:])

    def add_keys(self, total: Array, j: Array, x: Array) -> Array:
        """Add `[b, head_inner, ...]` to tile `j` of `[num_kv_tiles, b * head_inner, ...]`."""
        x = (self.keys(total, j) + x).reshape(total.shape[1:])
        return lax.dynamic_update_index_in_dim(total, x, j, 0)

    def put_keys(self, whole: Array, x: Array) -> Array:
        """Write `[num_kv_tiles, b * head_inner, block_kv, dim]` into `[batch, kv_len, num_kv_heads, dim]`."""
        tiles, _, block_kv, dim = x.shape
        x = x.reshape(tiles, self.split.batch_inner, self.split.head_inner, block_kv, dim).transpose(1, 0, 3, 2, 4)
        return self.split.put(whole, x.reshape(x.shape[0], tiles * block_kv, *x.shape[3:]), self.index)

    def positions(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[b, q_len]` as `[b, 1, 1, block_q]`."""
        return slice_tile(x, 1, i, self.config.block_q)[:, None, None]

    def tile(self, x: Array, i: Array, j: Array) -> Array:
        """Tile `(i, j)` of `[b, heads, 1 | q_len, 1 | kv_len]`, keys before rows as in a tile of scores."""
        x = slice_tile(slice_tile(x, 2, i, self.config.block_q), 3, j, self.config.block_kv)
        return keys_first(self.split.by_heads(x))

    def q_ids(self, i: Array) -> Array:
        return i * self.config.block_q + jnp.arange(self.config.block_q, dtype=jnp.int32)

    def kv_ids(self, j: Array) -> Array:
        return j * self.config.block_kv + jnp.arange(self.config.block_kv, dtype=jnp.int32)

    def bias(self, i: Array, j: Array) -> Array | None:
        if self.arrays.bias is None:
            return None
        return self.tile(self.arrays.bias, i, j).astype(self.problem.compute_dtype)

    def scale(self) -> float | Array:
        if self.arrays.scale is not None:
            return beside_tile(self.arrays.scale)
        assert self.problem.scale is not None
        return self.problem.scale

    def kept(self, i: Array, j: Array) -> Array:
        assert self.arrays.dropout_row_keys is not None
        row_keys = self.split.by_heads(slice_tile(self.arrays.dropout_row_keys, 2, i, self.config.block_q))
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
        first = self.index.head * (split.head_inner * split.group)
        head_ids = first + jnp.arange(heads[0] * heads[1], dtype=jnp.int32)

        def read(kind: str, x: Array) -> Array:
            match kind:
                case "query":
                    return slice_tile(x, 1, i, self.config.block_q)
                case "key":
                    return slice_tile(x, 1, j, self.config.block_kv)
                case _:
                    return x

        operands = tuple(read(kind, x) for kind, x in zip(function.kinds, self.arrays.functions[n], strict=True))
        assert self.arrays.batch_ids is not None
        seen = visibility.by_function(function, self.arrays.batch_ids, head_ids, self.q_ids(i), self.kv_ids(j), operands)
        return keys_first(seen.reshape(seen.shape[0], *heads, *seen.shape[2:]))

    def seen(self, i: Array, j: Array, masked: bool) -> Seen:
        """What is visible of a tile; `masked` unless the schedule knows that the mask hides none of it."""
        terms = []
        a = self.arrays
        if masked:
            kv_ids = self.kv_ids(j)
            kv_lo, kv_hi = self.positions(a.kv_lo, i), self.positions(a.kv_hi, i)
            terms.append(keys_first(visibility.in_interval(kv_lo, kv_hi, kv_ids)))
            if self.problem.mask.is_interval and a.bias is None:
                return Seen(terms[0]) if self.none_idle else Seen(terms[0], *self._seen_of_intervals(kv_lo, kv_hi, kv_ids))
            if a.q_labels is not None and a.kv_labels is not None:
                kv_labels = slice_tile(a.kv_labels, 1, j, self.config.block_kv)[:, None, None]
                terms.append(keys_first(visibility.equal_labels(self.positions(a.q_labels, i), kv_labels)))
            terms += [self.tile(x, i, j) for x in a.dense]
            for blocks, sizes in zip(a.blocks, self.problem.mask.block_sizes, strict=True):
                terms.append(keys_first(visibility.in_blocks(self.split.by_heads(blocks), sizes, self.q_ids(i), kv_ids)))
            terms += [self.by_function(n, i, j) for n in range(len(a.functions))]
        if a.bias is not None:
            terms.append(self.tile(a.bias, i, j) != -jnp.inf)
        if not terms:
            return Seen()
        scores = functools.reduce(jnp.logical_and, terms)
        return Seen(scores, scores.any((3, 4)), scores.any(2))

    def _seen_of_intervals(self, kv_lo: Array, kv_hi: Array, kv_ids: Array) -> tuple[Array, Array]:
        """`Seen.keys` and `Seen.rows` without a reduction over the tile: the intervals of successive rows leave no gap."""
        rows = jnp.maximum(kv_lo, kv_ids[0]) < jnp.minimum(kv_hi, kv_ids[-1] + 1)
        first = jnp.where(rows, kv_lo, self.problem.kv_len).min((2, 3))
        last = jnp.where(rows, kv_hi, 0).max((2, 3))
        return (first[..., None] <= kv_ids) & (kv_ids < last[..., None]), rows

    def _none_idle(self) -> bool:
        """Known before tracing: in a single tile each row sees a key and each key is seen, so that nothing is padding."""
        bounds = visibility.static_bounds(self.problem.mask, self.problem.q_len)
        if bounds is None or self.num_kv_tiles > 1 or self.problem.q_len != self.config.block_q:
            return False
        kv_lo, kv_hi = bounds
        return bool((kv_lo < kv_hi).all() and kv_lo.min() == 0 and kv_hi.max() == self.config.block_kv)

    def kinds(self) -> Array:
        """Kind of each tile, int8 `[num_q_tiles, num_kv_tiles]`: empty or full where it is for all batch entries and heads."""
        problem, a = self.problem, self.arrays
        cut = lambda x, length: None if x is None else x[:, :length]
        operands = visibility.MaskOperands(
            *(cut(x, problem.q_len) for x in (a.kv_lo, a.kv_hi, a.q_labels)),
            kv_labels=cut(a.kv_labels, problem.kv_len),
            dense=tuple(x[..., : problem.q_len, : problem.kv_len] for x in a.dense),
            blocks=a.blocks,
        )
        of_functions = (self._function_kinds(n) for n in range(len(a.functions)))
        lengths, tiles = (problem.q_len, problem.kv_len), (self.config.block_q, self.config.block_kv)
        kinds = visibility.tile_kinds(problem.mask, operands, lengths, tiles, of_functions)
        return schedule.classify((kinds != schedule.EMPTY).any((0, 1)), (kinds == schedule.FULL).all((0, 1)))

    def over_q_tiles(self, body: Callable[[Array, Any], Any], carry):
        """`carry = body(i, carry)` for each q tile that sees a key: what padding leaves in `carry` is what was there."""
        carry = varying_like(carry, self.arrays.query)
        tiles = jnp.arange(schedule.num_tiles(self.problem.q_len, self.config.block_q), dtype=jnp.int32)
        if self.lists is None or self.config.static_loops:
            return lax.scan(lambda carry, i: (body(i, carry), None), carry, tiles)[0]
        some = self.lists.end > 0
        tiles = jnp.argsort(~some, stable=True).astype(jnp.int32)
        return lax.fori_loop(jnp.int32(0), some.sum(dtype=jnp.int32), lambda t, carry: body(tiles[t], carry), carry)

    def over_kv_tiles(self, i: Array, body: Callable[[Array, bool, Any], Any], carry):
        """`carry = body(j, masked, carry)` for each key tile that q tile `i` sees something of."""
        carry = varying_like(carry, self.arrays.query)
        n, config = self.num_kv_tiles, self.config
        if n == 1:
            return body(jnp.int32(0), not self.all_full, carry)
        if self.lists is None:
            return _loop(config, jnp.int32(0), jnp.int32(n), n, lambda t, c: body(t, False, c), carry)
        index, full_end, end = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in self.lists)
        carry = _loop(config, jnp.int32(0), full_end, n, lambda t, c: body(index[t], False, c), carry)
        return _loop(config, full_end, end, n, lambda t, c: body(index[t], True, c), carry)

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


def over_slots(problem: Problem, config: Config, operands: Operands, body: Callable[[Slot, Any], Any], carry):
    """`carry = body(slot, carry)` for one slot after another."""
    split = Split.of(problem, config, operands)
    operands = in_whole_tiles(config, operands)

    def one_slot(carry, number):
        return body(Slot(problem, config, split, operands, split.at(number)), carry), None

    slots = split.batch_slots * split.head_slots
    return lax.scan(one_slot, varying_like(carry, operands.query), jnp.arange(slots, dtype=jnp.int32))[0]
