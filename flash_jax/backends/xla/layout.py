"""How the operands lie: which batch entries and heads share a tile, and everything padded to whole tiles."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax.problem import Operands, Problem
from flash_jax.visibility import row_bounds

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and loops.

    block_q, block_kv: the tile of scores.
    split_batch: one batch entry at a time, so that each skips its own tiles; else all in one tile, skipping what all skip.
    static_loops: loops of fixed length that skip inside, which JAX can differentiate in reverse; else loops over exactly the
      tiles listed.
    """

    block_q: int
    block_kv: int
    split_batch: bool = True
    static_loops: bool = False


class Index(NamedTuple):
    """A slot's number in the batch and in the heads."""

    batch: Array
    head: Array


class Split(NamedTuple):
    """batch = batch_slots * batch_inner, num_kv_heads = head_slots * head_inner; a tile holds the inner ones.

    What is known of a slot has leading axes `batch_inner, head_inner, group`, an axis that is shared being 1.
    """

    batch_slots: int
    batch_inner: int
    head_slots: int
    head_inner: int
    group: int

    @classmethod
    def of(cls, problem: Problem, config: Config, operands: Operands) -> "Split":
        mask = operands.mask
        by_head = any(x.shape[1] > 1 for x in (*mask.dense, *mask.blocks)) or any(f.reads_head for f in problem.mask.functions)
        batch = (problem.batch, 1) if config.split_batch else (1, problem.batch)
        head_slots = problem.num_kv_heads if config.split_batch and by_head else 1
        return cls(*batch, head_slots, problem.num_kv_heads // head_slots, problem.group)

    def at(self, slot: Array) -> Index:
        return Index(slot // self.head_slots, lax.rem(slot, jnp.int32(self.head_slots)))

    def part(self, x: Array, index: Index, head_axis: int | None = None) -> Array:
        """What a slot has of `[1 | batch, ...]`, with heads on `head_axis`."""
        # Not `> 1`: a symbolic batch has no order, but is not equal to 1.
        if self.batch_slots != 1 and x.shape[0] != 1:
            x = lax.dynamic_slice_in_dim(x, index.batch * self.batch_inner, self.batch_inner)
        if head_axis is not None and self.head_slots != 1 and x.shape[head_axis] != 1:
            heads = x.shape[head_axis] // self.head_slots
            x = lax.dynamic_slice_in_dim(x, index.head * heads, heads, head_axis)
        return x

    def put(self, whole: Array, part: Array, index: Index, row: Array | int = 0) -> Array:
        """Write `[batch_inner, rows, heads, ...]` of a slot into `[batch, length, all heads, ...]`, from `row` on."""
        batch = 0 if self.batch_slots == 1 else index.batch * self.batch_inner
        start = (batch, row, index.head * part.shape[2], *[0] * (whole.ndim - 3))
        return lax.dynamic_update_slice(whole, part.astype(whole.dtype), tuple(map(jnp.int32, start)))

    def by_heads(self, x: Array) -> Array:
        """`[batch_inner, 1 | heads, ...]` -> `[batch_inner, head_inner, group, ...]`, or `1, 1` where it is shared."""
        heads = (1, 1) if x.shape[1] == 1 else (self.head_inner, x.shape[1] // self.head_inner)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])


def pad(x: Array, axis: int, block: int) -> Array:
    """Fill the partial last tile of an axis with zeros; an axis of 1 is shared, not padded."""
    axis %= x.ndim
    missing = -x.shape[axis] % block
    if x.shape[axis] == 1 or missing == 0:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])


def slice_tile(x: Array, axis: int, tile: Array, block: int) -> Array:
    """Tile number `tile` of an axis; an axis of 1 is shared."""
    if x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, tile * block, block, axis)


def whole_tiles(config: Config, x: Array) -> Array:
    """`[..., 1 | q_len, 1 | kv_len]` padded to whole tiles."""
    return pad(pad(x, -2, config.block_q), -1, config.block_kv)


def in_whole_tiles(config: Config, operands: Operands) -> Operands:
    """Bias and dense masks padded, once for all slots that share them."""
    bias = None if operands.bias is None else whole_tiles(config, operands.bias)
    dense = tuple(whole_tiles(config, x) for x in operands.mask.dense)
    return operands._replace(bias=bias, mask=operands.mask._replace(dense=dense))


def tiles_of_keys(config: Config, x: Array, axes: str) -> Array:
    """`[batch_inner, kv_len, heads, dim]` -> `[num_kv_tiles, batch_inner * heads, block_kv, dim]`, each tile in one piece.

    axes: "key, dim", or "dim, key" for tiles that lie the other way. Batch entries and heads in one axis, because XLA transposes in
    one pass where a reshape follows, and else in two.
    """
    x = pad(x, 1, config.block_kv)
    x = x.reshape(x.shape[0], x.shape[1] // config.block_kv, config.block_kv, *x.shape[2:])
    x = x.transpose(1, 0, 3, *((2, 4) if axes == "key, dim" else (4, 2)))
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


class Arrays(NamedTuple):
    """A slot's operands, padded to whole tiles. `b` is 1 where the batch shares it, `heads` likewise."""

    query: Array  # [b, q_len, heads, head_dim]
    key: Array  # [num_kv_tiles, b * head_inner, block_kv, head_dim]
    value: Array  # [num_kv_tiles, b * head_inner, block_kv, v_head_dim]
    key_t: Array  # [num_kv_tiles, b * head_inner, head_dim, block_kv]
    value_t: Array  # [num_kv_tiles, b * head_inner, v_head_dim, block_kv]
    bias: Array | None  # [b, heads, 1 | q_len, 1 | kv_len]
    scale: Array | None  # [b]
    kv_lo: Array  # [b, q_len]
    kv_hi: Array
    q_labels: Array | None  # [b, q_len]
    kv_labels: Array | None  # [b, kv_len]
    dense: tuple[Array, ...]  # [b, heads, 1 | q_len, 1 | kv_len]
    blocks: tuple[Array, ...]  # [b, heads, num_q_blocks, num_kv_blocks]
    functions: tuple[tuple[Array, ...], ...]  # [b, axes of the operand's kind]
    batch_ids: Array | None  # [b]
    dropout_row_keys: Array | None  # [b, heads, q_len]


def arrange(problem: Problem, config: Config, operands: Operands, split: Split, index: Index) -> Arrays:
    """A slot's part of the operands, whose bias and dense masks are in whole tiles already."""
    mask, block_q, block_kv = operands.mask, config.block_q, config.block_kv
    part = lambda x, head_axis=None: split.part(x, index, head_axis)
    rows = lambda x: pad(part(x), -1, block_q)
    by_kind = {
        "query": rows,
        "key": lambda x: pad(part(x), -1, block_kv),
        "head": lambda x: part(x, 1),
        "scalar": part,
        "captured": part,
    }
    optional = lambda function, x: None if x is None else function(x)
    kv_lo, kv_hi = row_bounds(problem.mask, mask, problem.q_len)
    key, value = part(operands.key, 2), part(operands.value, 2)
    return Arrays(
        query=pad(part(operands.query, 2), 1, block_q),
        key=tiles_of_keys(config, key, "key, dim"),
        value=tiles_of_keys(config, value, "key, dim"),
        key_t=tiles_of_keys(config, key, "dim, key"),
        value_t=tiles_of_keys(config, value, "dim, key"),
        bias=optional(by_kind["head"], operands.bias),
        scale=optional(part, operands.scale),
        kv_lo=rows(kv_lo),
        kv_hi=rows(kv_hi),
        q_labels=optional(rows, mask.q_labels),
        kv_labels=optional(by_kind["key"], mask.kv_labels),
        dense=tuple(map(by_kind["head"], mask.dense)),
        blocks=tuple(map(by_kind["head"], mask.blocks)),
        functions=tuple(
            tuple(by_kind[kind](x) for kind, x in zip(function.kinds, arrays, strict=True))
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        batch_ids=optional(part, mask.batch_ids),
        dropout_row_keys=optional(lambda x: pad(part(x, 1), -1, block_q), operands.dropout_row_keys),
    )
