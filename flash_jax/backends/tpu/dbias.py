"""Gradient of the bias in its own shape: cotangents of the logits summed over the axes that the bias shares.

A second pass over the tiles, with two of the backward's products: the loops over the axes that the bias shares are innermost, so a
tile of the gradient stays in VMEM until all of its terms are added, and memory is that of the bias.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flash_jax import schedule
from flash_jax.backends.tpu import visit
from flash_jax.backends.tpu.config import Config, Tiles
from flash_jax.backends.tpu.gradients import tile_gradients
from flash_jax.backends.tpu.launch import Arrays, Grid, Ids, block_maps, call
from flash_jax.backends.tpu.tile import transpose
from flash_jax.problem import Operands, Problem

Array = jax.Array


def _kernel(problem: Problem, tiles: Tiles, shared: tuple[int, ...], sizes, refs: Arrays, out, scratch, ids: Ids):
    """shared: the axes of [batch, heads, q tiles, kv tiles] that are summed over, with `sizes`."""
    acc_ref = scratch["acc"]
    first = jnp.bool_(True)
    last = jnp.bool_(True)
    for axis in shared:
        first &= ids[axis] == 0
        last &= ids[axis] == sizes[axis] - 1

    @pl.when(first)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(start, rows, what):
        tile, gradients = tile_gradients(problem, tiles, refs, ids, ids.c, start, rows, what)
        dlogits = gradients()[4]
        if tile.keys_first:
            dlogits = transpose(dlogits)
        for axis in (0, 1):
            if acc_ref.shape[axis] == 1:
                dlogits = dlogits.sum(axis, keepdims=True)
        acc_ref[...] += dlogits

    nothing = lambda *_: None
    visit.visit(problem, tiles, ids, ids.c, refs.kinds, visit.Work(nothing, step, nothing, nothing))

    @pl.when(last)
    def _():
        out["dbias"][...] = acc_ref[...].astype(out["dbias"].dtype)


def dbias(problem: Problem, config: Config, operands: Operands, arrays: Arrays) -> Array:
    """From the arrays of the backward; `[1 | batch, 1 | heads, 1 | q_len, 1 | kv_len]`."""
    assert problem.bias_shape is not None and operands.bias is not None
    tiles = dataclasses.replace(config.backward, resident=config.backward.block_kv, unroll=1, pieces=0)
    arrays = arrays._replace(blocks=block_maps(problem, tiles, operands))
    num_kv = schedule.num_tiles(problem.kv_len, tiles.block_kv)
    sizes = (problem.batch, problem.num_heads, arrays.query.shape[2] // tiles.block_q, num_kv)
    shared = tuple(axis for axis in range(4) if arrays.bias.shape[axis] == 1)
    kept = tuple(axis for axis in range(4) if axis not in shared)
    order = kept + shared
    grid = Grid(tuple(sizes[axis] for axis in order), lambda *n: Ids(*(n[order.index(axis)] for axis in range(4))), parallel=len(kept))
    acc = tuple(1 if arrays.bias.shape[2 + n] == 1 else size for n, size in enumerate((tiles.block_q, tiles.block_kv)))
    results = call(
        lambda *args: _kernel(problem, tiles, shared, sizes, *args),
        problem,
        tiles,
        grid,
        arrays,
        {"dbias": ("bhqk", arrays.bias.shape, jnp.float32 if operands.bias.dtype != jnp.bfloat16 else jnp.bfloat16)},
        {"acc": (acc, jnp.float32)},
        name="flash_dbias",
        vmem=config.vmem,
    )
    rows, columns = problem.bias_shape[2:]
    return results["dbias"][:, :, :rows, :columns].astype(operands.bias.dtype)
