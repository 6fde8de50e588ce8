"""From operands to a Pallas call: layouts, padding to whole tiles, block specs, and who reads which block when.

Kernels see `[batch, heads, len, dim]`, a row of numbers as `[1, len]` (lanes), and mask operands as they are. Keys and values are
resident: a kernel holds `resident` positions of one kv head in VMEM and loops over their tiles itself, so that a skipped tile
costs nothing and the rows of a group share one copy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flash_jax import schedule
from flash_jax.backends.tpu import kinds, plan
from flash_jax.backends.tpu.config import BYTE_ROWS, LANES, Tiles
from flash_jax.problem import Operands, Problem

Array = jax.Array


class Arrays(NamedTuple):
    """What a kernel reads (arrays, then their refs). Axes of 1 are shared; `len` is padded to whole tiles.

    query `[batch, heads, q_len, head_dim]`; key, value `[batch, kv_heads, kv_len, head_dim | v_head_dim]`.
    kinds: int32 `[1 | batch, 1 | heads, q tiles, 1, kv tiles + 2]`, see `kinds.kinds`, or None where the static rule is the whole mask.
    first_tile: int32 `[1, 1]`, number of the first resident key tile of a slice of the keys, or None.
    scale, batch_ids `[1 | batch, 1, 1]`. blocks: see `block_map`.
    dout `[batch, heads, q_len, v_head_dim]`; pivot, weight, delta `[batch, heads, 1, q_len]`: for the backward.
    The rest as in `Operands` and `MaskOperands`, a row of numbers having an axis of 1 before it.
    """

    query: Any
    key: Any
    value: Any
    kinds: Any = None
    first_tile: Any = None
    scale: Any = None
    batch_ids: Any = None
    bias: Any = None
    kv_lo: Any = None
    kv_hi: Any = None
    q_labels: Any = None
    kv_labels: Any = None
    dense: tuple = ()
    blocks: tuple = ()
    functions: tuple = ()
    row_keys: Any = None
    dout: Any = None
    pivot: Any = None
    weight: Any = None
    delta: Any = None


# How the axes of each field are read: b, h, g: the current batch entry, head, kv head; i, c: q tile, slice of the keys; q, k: the rows
# and the resident keys of the tile; a dot: whole; a colon: whole, in scalar memory.
_AXES = Arrays(
    query="bhq.",
    key="bgk.",
    value="bgk.",
    kinds="bhi::",
    first_tile="::",
    scale="b::",
    batch_ids="b::",
    bias="bhqk",
    kv_lo="b.q",
    kv_hi="b.q",
    q_labels="b.q",
    kv_labels="b.k",
    dense="bhqk",
    blocks="bhic..",
    row_keys="bh.q",
    dout="bhq.",
    pivot="bh.q",
    weight="bh.q",
    delta="bh.q",
)
_AXES_OF_KIND = {"query": "b.q", "key": "b.k", "head": "b::", "scalar": "b::"}


def axes_of(problem: Problem) -> Arrays:
    """`_AXES` with one entry for each array."""
    spec = problem.mask
    return _AXES._replace(
        dense=(_AXES.dense,) * spec.num_dense,
        blocks=(_AXES.blocks,) * len(spec.block_sizes),
        functions=tuple(tuple(_AXES_OF_KIND[kind] for kind in function.kinds) for function in spec.functions),
    )


class Ids(NamedTuple):
    """Where a kernel stands: batch entry, head, q tile, number of the resident slice of the keys."""

    b: Any
    h: Any
    i: Any
    c: Any


@dataclasses.dataclass(frozen=True)
class Grid:
    """The loops around a kernel: `ids` turns their counters into `Ids`; `parallel` of them, from the left, may run on two cores."""

    sizes: tuple[int, ...]
    ids: Callable[..., Ids]
    parallel: int

    def here(self) -> Ids:
        return self.ids(*(pl.program_id(axis) for axis in range(len(self.sizes))))


def _pad(x: Array, axis: int, block: int, fill=0) -> Array:
    missing = -x.shape[axis] % block
    if missing == 0:
        return x
    axis %= x.ndim
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def pad_rows(x: Array, tiles: Tiles, fill=0) -> Array:
    """`[..., q_len, dim]` to whole q tiles."""
    return _pad(x, -2, tiles.block_q, fill)


def heads_first(x: Array) -> Array:
    """`[batch, len, heads, ...]` -> `[batch, heads, len, ...]`, and back."""
    return x.swapaxes(1, 2)


def row_of(x: Array, tiles: Tiles, fill=0) -> Array:
    """`[batch, q_len, heads]` -> `[batch, heads, 1, q_len]`, whole q tiles."""
    return _pad(heads_first(x)[:, :, None], -1, tiles.block_q, fill)


def _word(x: Array) -> Array:
    """Narrow and unsigned numbers as 32-bit words that every core can load and transpose."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.int32)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _shared_or(axis: int, block: int, x: Array) -> Array:
    return x if x.shape[axis] == 1 else _pad(x, axis, block)


def arrange(problem: Problem, tiles: Tiles, operands: Operands) -> Arrays:
    """The operands as the kernels read them."""
    mask, block_kv = operands.mask, tiles.resident
    optional = lambda function, x: None if x is None else function(x)
    row = lambda x: _pad(_word(x)[:, None], -1, tiles.block_q)
    keys = lambda x: _pad(_word(x)[:, None], -1, block_kv)
    tiled = lambda x: _shared_or(-1, block_kv, _shared_or(-2, tiles.block_q, x))
    scalar = lambda x: x[:, None, None]
    by_kind = {"query": row, "key": keys, "head": lambda x: _word(x)[:, None], "scalar": lambda x: scalar(_word(x))}
    bias = operands.bias
    if bias is not None and bias.dtype != jnp.bfloat16:
        bias = bias.astype(jnp.float32)
    return Arrays(
        query=pad_rows(heads_first(operands.query), tiles),
        key=_pad(heads_first(operands.key), -2, block_kv),
        value=_pad(heads_first(operands.value), -2, block_kv),
        kinds=kinds.kinds(problem, tiles, operands),
        scale=optional(scalar, operands.scale),
        batch_ids=optional(scalar, mask.batch_ids),
        bias=optional(tiled, bias),
        kv_lo=optional(row, mask.kv_lo),
        kv_hi=optional(row, mask.kv_hi),
        q_labels=optional(row, mask.q_labels),
        kv_labels=optional(keys, mask.kv_labels),
        dense=tuple(tiled(x.astype(jnp.int8)) for x in mask.dense),
        blocks=block_maps(problem, tiles, operands),
        functions=tuple(
            tuple(by_kind[kind](x) for kind, x in zip(function.kinds, arrays, strict=True))
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        row_keys=optional(lambda x: _pad(_word(x)[:, :, None], -1, tiles.block_q), operands.dropout_row_keys),
    )


def block_maps(problem: Problem, tiles: Tiles, operands: Operands) -> tuple[Array, ...]:
    """int8 `[1 | batch, 1 | heads, q tiles, slices, rows, columns]`: the part of each map that a q tile has with a slice of the keys.

    The first row and column are those of the tile's first row and the slice's first key, which may begin within a block.
    """

    def cut(x, axis, length, tile, size, multiple):
        first = np.arange(schedule.num_tiles(length, tile)) * tile
        most = ((first + tile - 1) // size - first // size).max() + 1
        parts = first[:, None] // size + np.arange(schedule.num_tiles(most, multiple) * multiple)
        return jnp.take(x, parts, axis, mode="clip")

    def parts(x, sizes):
        of_rows = cut(x.astype(jnp.int8), 2, problem.q_len, tiles.block_q, sizes[0], BYTE_ROWS)
        return cut(of_rows, 4, problem.kv_len, tiles.resident, sizes[1], LANES).swapaxes(3, 4)

    return tuple(map(parts, operands.mask.blocks, problem.mask.block_sizes))


def slice_keys(problem: Problem, tiles: Tiles, arrays: Arrays, c: Array) -> Arrays:
    """The arrays with only slice `c` of the keys."""

    def one(axes, x):
        for letter, size in (("k", tiles.resident), ("c", 1)):
            if letter in axes and x.shape[axes.index(letter)] != 1:
                return lax.dynamic_slice_in_dim(x, c * size, size, axes.index(letter))
        return x

    sliced = _map(one, axes_of(problem), arrays)
    return sliced._replace(first_tile=(c * tiles.tiles_resident).astype(jnp.int32)[None, None])


def _map(function, axes, arrays):
    """Over the arrays that are present, with their axes."""
    return jax.tree.map(function, jax.tree.map(lambda _, a: a, arrays, _fill(axes, arrays)), arrays)


def _fill(axes, arrays):
    """`axes` in the structure of `arrays`."""
    if arrays is None:
        return None
    if isinstance(arrays, tuple):
        filled = [_fill(a, x) for a, x in zip(axes, arrays, strict=True)]
        return type(arrays)(*filled) if hasattr(arrays, "_fields") else tuple(filled)
    return axes


def block(axes: str, shape: tuple[int, ...], problem: Problem, tiles: Tiles, grid: Grid, held: Callable | None = None) -> pl.BlockSpec:
    """The block of an array that a grid step reads or writes, by the letters of its axes.

    held: turns `Ids` into the slice of the keys to hold, so that one that is not visited need not be fetched.
    """
    sizes = {"b": None, "h": None, "g": None, "i": None, "c": None, "q": tiles.block_q, "k": tiles.resident}
    shared = [letter in "bhcqk" and n == 1 for letter, n in zip(axes, shape, strict=True)]
    whole = [letter in ".:" for letter in axes]
    shape_of_block = tuple(
        n if w else (1 if letter in "qk" else None) if s else sizes[letter]
        for letter, n, s, w in zip(axes, shape, shared, whole, strict=True)
    )

    def index(*counters):
        ids = grid.ids(*counters)
        at = {"b": ids.b, "h": ids.h, "g": plan.divide(ids.h, problem.group), "i": ids.i, "q": ids.i}
        at["k"] = at["c"] = held(ids) if held and ("k" in axes or "c" in axes) else ids.c
        return tuple(0 if s or w else at[letter] for letter, s, w in zip(axes, shared, whole, strict=True))

    return pl.BlockSpec(shape_of_block, index, memory_space=pltpu.SMEM if ":" in axes else pltpu.VMEM)


def call(
    kernel, problem: Problem, tiles: Tiles, grid: Grid, arrays: Arrays, outputs: dict, scratch: dict, *, name: str, vmem: int, held=None
):
    """Run `kernel(arrays, outputs, scratch, ids)` over the grid.

    outputs: name -> (axes, shape, dtype). scratch: name -> (shape, dtype).
    """
    spec = functools.partial(block, problem=problem, tiles=tiles, grid=grid)
    in_specs = _map(lambda axes, x: spec(axes, x.shape, held=held), axes_of(problem), arrays)
    leaves, tree = jax.tree.flatten(arrays)
    num_inputs, num_outputs = len(leaves), len(outputs)

    def flat_kernel(*refs):
        inputs, rest = refs[:num_inputs], refs[num_inputs:]
        kernel(
            jax.tree.unflatten(tree, inputs),
            dict(zip(outputs, rest[:num_outputs], strict=True)),
            dict(zip(scratch, rest[num_outputs:], strict=True)),
            grid.here(),
        )

    varying = jax.typeof(arrays.query).mat
    parallel = ("parallel",) * grid.parallel + ("arbitrary",) * (len(grid.sizes) - grid.parallel)
    results = pl.pallas_call(
        flat_kernel,
        grid=grid.sizes,
        in_specs=jax.tree.leaves(in_specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec)),
        out_specs=[spec(axes, shape) for axes, shape, _ in outputs.values()],
        # Inside `shard_map` an output has to say over which mesh axes it varies: as the query does.
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for _, shape, dtype in outputs.values()],
        scratch_shapes=[pltpu.VMEM(*shape_and_dtype) for shape_and_dtype in scratch.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=parallel, vmem_limit_bytes=vmem),
        name=name,
    )(*leaves)
    return dict(zip(outputs, results, strict=True))
