"""Forward: FlashAttention's online softmax, one q tile against the resident keys.

A tile is `[block_q, block_kv]`: products stream long rows past a small resident matrix, which is how the MXU likes them. `l` is kept
as partial sums in lanes, so that a tile costs one reduction across lanes (the maximum) instead of two.

Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import schedule, softmax
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.config import Tiles
from flash_jax.backends.tpu.launch import Arrays, Grid, Ids, arrange, call, heads_first
from flash_jax.backends.tpu.tile import NN, NT, Tile, clean, dot
from flash_jax.problem import Operands, Problem

Array = jax.Array


def _unit(problem: Problem) -> float | None:
    """Base-2 logits in one unit of q . k, where that is all there is to them and they increase with it; else None.

    `m` is then kept in these units, and starts at the lowest finite number, which needs no case for rows that have seen no key: the
    verbs of `softmax` with fewer operations a score and a row. measured in simulated cycles: 10 % of the forward on v6e.
    """
    plain = problem.logits_soft_cap is None and problem.bias_shape is None
    return problem.scale * softmax.LOG2E if plain and problem.scale is not None and problem.scale > 0 else None


def _by_lane(p: Array, lanes: int) -> Array:
    """Row sums that still have to be summed over lanes."""
    return functools.reduce(operator.add, (p[:, n : n + lanes] for n in range(0, p.shape[1], lanes)))


def _kernel(problem: Problem, tiles: Tiles, slices: int, refs: Arrays, out, scratch, ids: Ids):
    m_ref, l_ref, acc_ref = scratch["m"], scratch["l"], scratch["acc"]
    lanes = m_ref.shape[1]
    first_tile = ids.c * tiles.tiles_resident if slices > 1 else 0

    unit = _unit(problem)

    def wide(row, width):
        return jnp.tile(row, (1, schedule.num_tiles(width, lanes)))[:, :width]

    @pl.when(ids.c == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf if unit is None else jnp.finfo(jnp.float32).min)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def step(start, width, rows, masked):
        tile = Tile(problem, tiles, refs, ids, first_tile, start, width, rows, keys_first=False)
        visible = tile.visible(masked)
        qk = dot(problem, refs.query[rows, :], refs.key[tile.slice, :], NT)
        if unit is None:
            s, _ = tile.logits(qk)
            s = s if visible is None else jnp.where(visible, s, -jnp.inf)
            used = tile.used_keys(s, visible)
            m, pivot, alpha = softmax.rescale(m_ref[rows, :], s.max(1, keepdims=True))
            p = softmax.probs(s, pivot, lambda row: wide(row, width))
        else:
            qk = qk if visible is None else jnp.where(visible, qk, -jnp.inf)
            used = tile.used_keys(qk, visible)
            m = jnp.maximum(m_ref[rows, :], qk.max(1, keepdims=True))
            alpha = jnp.exp2((m_ref[rows, :] - m) * unit)
            p = jnp.exp2((qk - wide(m, width)) * unit)
        m_ref[rows, :] = m
        l_ref[rows, :] = l_ref[rows, :] * alpha + _by_lane(p, lanes)
        v = clean(refs.value[tile.slice, :], used)
        acc_ref[rows, :] = acc_ref[rows, :] * wide(alpha, problem.v_head_dim) + dot(problem, tile.drop(p), v, NN)

    plan.visit(problem, tiles, ids, first_tile, refs.kinds, step)

    @pl.when(ids.c == slices - 1)
    def _():
        m, l = m_ref[:, :1] * (1 if unit is None else unit), l_ref[...].sum(1, keepdims=True)
        out["out"][...] = softmax.finish(m, l, acc_ref[...], lambda row: row)[0].astype(problem.dtype)
        lane = lax.broadcasted_iota(jnp.int32, (tiles.block_q, 128), 1)
        both = jnp.where(lane == 0, m, l).T  # one transpose for the two
        out["m"][...], out["l"][...] = both[:1], both[1:2]


def states(problem: Problem, tiles: Tiles, vmem: int, operands: Operands) -> tuple[Array, Array, Array]:
    """out `[batch, heads, q_len, v_head_dim]`, and the rows' final m and l, `[batch, heads, 1, q_len]`, rows padded."""
    arrays = arrange(problem, tiles, operands)
    slices = arrays.key.shape[2] // tiles.resident
    num_q = schedule.num_tiles(problem.q_len, tiles.block_q)
    grid = Grid((problem.batch, problem.num_heads, num_q, slices), Ids, parallel=3)
    q_pad, heads = num_q * tiles.block_q, (problem.batch, problem.num_heads)
    row = ("bh.q", (*heads, 1, q_pad), jnp.float32)
    lanes = (tiles.block_q, tiles.lanes)
    results = call(
        lambda *args: _kernel(problem, tiles, slices, *args),
        problem,
        tiles,
        grid,
        arrays,
        {"out": ("bhq.", (*heads, q_pad, problem.v_head_dim), problem.dtype), "m": row, "l": row},
        {
            "m": (lanes, jnp.float32),
            "l": (lanes, jnp.float32),
            "acc": ((tiles.block_q, problem.v_head_dim), jnp.float32),
        },
        name="flash_forward",
        vmem=vmem,
        held=plan.held_slice(problem, tiles) if slices > 1 else None,
    )
    return results["out"], results["m"], results["l"]


def forward(problem: Problem, tiles: Tiles, vmem: int, operands: Operands) -> tuple[Array, Array]:
    """`(out, lse)`, see `base.Backend.forward`."""
    out, m, l = states(problem, tiles, vmem, operands)
    _, lse = softmax.finish(m, l, jnp.zeros_like(l), lambda row: row)
    return heads_first(out[:, :, : problem.q_len]), heads_first(lse[:, :, 0, : problem.q_len])
