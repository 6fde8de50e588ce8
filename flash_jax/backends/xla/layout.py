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


class Split(NamedTuple):
    """batch = batch_slots * batch_inner, num_kv_heads = head_slots * head_inner; a tile holds the inner ones.

    Arrays are laid out `[batch_slots, head_slots, batch_inner, head_inner, group, ...]`, an axis that is shared being 1.
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
        batch_slots = problem.batch if config.split_batch else 1
        head_slots = problem.num_kv_heads if config.split_batch and by_head else 1
        return cls(batch_slots, problem.batch // batch_slots, head_slots, problem.num_kv_heads // head_slots, problem.group)

    def arrange(self, x: Array) -> Array:
        """`[1 | batch, 1 | num_heads | num_kv_heads, ...]` -> the layout."""
        batch = (1, 1) if x.shape[0] == 1 else (self.batch_slots, self.batch_inner)
        num_kv_heads = self.head_slots * self.head_inner
        heads = (1, 1, 1) if x.shape[1] == 1 else (self.head_slots, self.head_inner, x.shape[1] // num_kv_heads)
        return x.reshape(*batch, *heads, *x.shape[2:]).transpose(0, 2, 1, 3, 4, *range(5, x.ndim + 3))

    def restore(self, x: Array) -> Array:
        """The layout -> `[batch, heads, ...]`."""
        x = x.transpose(0, 2, 1, 3, 4, *range(5, x.ndim))
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3] * x.shape[4], *x.shape[5:])


def pad(x: Array, axis: int, block: int, fill: float = 0) -> Array:
    """Fill the partial last tile of an axis; an axis of 1 is shared, not padded."""
    axis %= x.ndim
    missing = -x.shape[axis] % block
    if x.shape[axis] == 1 or missing == 0:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def slice_tile(x: Array, axis: int, tile: Array, block: int) -> Array:
    """Tile number `tile` of an axis; an axis of 1 is shared."""
    if x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, tile * block, block, axis)


def at_slot(x: Array, batch_slot: Array, head_slot: Array) -> Array:
    """Drop the two leading axes of the layout."""
    # Not `> 1`: a symbolic batch has no order, but is not equal to 1.
    x = lax.dynamic_index_in_dim(x, 0 if x.shape[0] == 1 else batch_slot, keepdims=False)
    return lax.dynamic_index_in_dim(x, 0 if x.shape[0] == 1 else head_slot, keepdims=False)


class Arrays(NamedTuple):
    """All operands in the layout, padded to whole tiles. After `at_slot` the two leading axes are gone."""

    query: Array  # [..., group, q_len, head_dim]
    key: Array  # [..., 1, kv_len, head_dim]
    value: Array  # [..., 1, kv_len, v_head_dim]
    key_t: Array  # [..., 1, head_dim, kv_len]
    value_t: Array  # [..., 1, v_head_dim, kv_len]
    bias: Array | None  # [..., 1 | q_len, 1 | kv_len]
    scale: Array | None  # [..., 1, 1]
    kv_lo: Array  # [..., q_len]
    kv_hi: Array
    q_labels: Array | None  # [..., q_len]
    kv_labels: Array | None  # [..., kv_len]
    dense: tuple[Array, ...]  # [..., 1 | q_len, 1 | kv_len]
    blocks: tuple[Array, ...]  # [..., num_q_blocks, num_kv_blocks]
    functions: tuple[tuple[Array, ...], ...]  # [..., axes of the operand's kind]
    batch_ids: Array | None  # [batch_inner, 1, 1]
    dropout_row_keys: Array | None  # [..., q_len]


def arrange(problem: Problem, config: Config, operands: Operands, split: Split) -> Arrays:
    """Every operand in the layout, padded to whole tiles."""
    mask, block_q, block_kv = operands.mask, config.block_q, config.block_kv
    one_head = lambda x: split.arrange(x[:, None])
    rows = lambda x: pad(one_head(x), -1, block_q)
    kv_lo, kv_hi = row_bounds(problem.mask, mask, problem.q_len)
    by_kind = {
        "query": rows,
        "key": lambda x: pad(one_head(x), -1, block_kv),
        "head": split.arrange,
        "scalar": one_head,
        "captured": one_head,
    }
    optional = lambda function, x: None if x is None else function(x)
    tiled = lambda x: pad(pad(split.arrange(x), -2, block_q), -1, block_kv)
    by_rows = lambda x, block: pad(split.arrange(x.swapaxes(1, 2)), -2, block)
    key, value = by_rows(operands.key, block_kv), by_rows(operands.value, block_kv)
    return Arrays(
        query=by_rows(operands.query, block_q),
        key=key,
        value=value,
        key_t=key.swapaxes(-1, -2),
        value_t=value.swapaxes(-1, -2),
        bias=optional(tiled, operands.bias),
        scale=optional(lambda x: one_head(x)[..., None, None], operands.scale),
        kv_lo=rows(kv_lo),
        kv_hi=rows(kv_hi),
        q_labels=optional(rows, mask.q_labels),
        kv_labels=optional(by_kind["key"], mask.kv_labels),
        dense=tuple(map(tiled, mask.dense)),
        blocks=tuple(map(split.arrange, mask.blocks)),
        functions=tuple(
            tuple(by_kind[kind](x) for kind, x in zip(function.kinds, arrays, strict=True))
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        batch_ids=optional(one_head, mask.batch_ids),
        dropout_row_keys=optional(lambda x: pad(split.arrange(x), -1, block_q), operands.dropout_row_keys),
    )


def rows_from_tiles(x: Array) -> Array:
    """`[batch_slots, head_slots, num_q_tiles, batch_inner, head_inner, group, block_q, ...]` -> the layout with rows in one axis."""
    x = jnp.moveaxis(x, 2, 5)
    return x.reshape(*x.shape[:5], x.shape[5] * x.shape[6], *x.shape[7:])
