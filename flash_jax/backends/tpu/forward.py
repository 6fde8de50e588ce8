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
from flash_jax.backends.tpu import plan, visit
from flash_jax.backends.tpu.config import Tiles
from flash_jax.backends.tpu.launch import Arrays, Grid, Ids, arrange, call, heads_first
from flash_jax.backends.tpu.tile import Tile
from flash_jax.problem import FLOAT32_TINY, Operands, Problem

Array = jax.Array


def _unit(problem: Problem) -> float | None:
    """Base-2 logits in one unit of q . k, where that is all there is to them and they increase with it; else None.

    `m` is then kept in these units, and starts at the lowest finite number, which needs no case for rows that have seen no key: the
    verbs of `softmax` with fewer operations a score and a row. measured in simulated cycles: 10 % of the forward on v6e.
    """
    plain = problem.logits_soft_cap is None and problem.bias_shape is None
    unit = problem.scale * softmax.LOG2E if plain and problem.scale is not None else 0
    return unit if unit >= FLOAT32_TINY else None


def _by_lane(p: Array, lanes: int) -> Array:
    """Row sums that still have to be summed over lanes."""
    return functools.reduce(operator.add, (p[:, n : n + lanes] for n in range(0, p.shape[1], lanes)))


def _kernel(problem: Problem, tiles: Tiles, slices: int, refs: Arrays, out, scratch, ids: Ids):
    m_ref, l_ref, acc_ref = scratch["m"], scratch["l"], scratch["acc"]
    lanes = m_ref.shape[1]
    first_tile = ids.c * tiles.tiles_resident if slices > 1 else 0

    unit = _unit(problem)
    nothing = -jnp.inf if unit is None else jnp.finfo(jnp.float32).min

    def wide(row, width):
        return jnp.tile(row, (1, schedule.num_tiles(width, lanes)))[:, :width]

    def only(condition, function):
        """At the first or last slice of the keys."""
        pl.when(condition)(function) if slices > 1 else function()

    def begin(rows):
        def _():
            m_ref[rows, :] = jnp.full_like(m_ref[rows, :], nothing)
            l_ref[rows, :] = jnp.zeros_like(l_ref[rows, :])
            acc_ref[rows, :] = jnp.zeros_like(acc_ref[rows, :])

        only(ids.c == 0, _)

    def probabilities(tile, qk, band, first):
        """Of a band; the rows' new m, l and the factor of what they have summed before, None if that is nothing."""
        rows, width = tile.rows, tile.num_keys
        if unit is None:
            s, _ = tile.logits(qk)
            s, _ = tile.hide(s, band)
            before = jnp.full((s.shape[0], lanes), nothing) if first else m_ref[rows, :]
            m, pivot, alpha = softmax.rescale(before, s.max(1, keepdims=True))
            p = softmax.probs(s, pivot, lambda row: wide(row, width))
        else:
            qk, _ = tile.hide(qk, band)
            m = jnp.maximum(nothing if first else m_ref[rows, :], qk.max(1, keepdims=True))
            m = jnp.broadcast_to(m, (m.shape[0], lanes))
            alpha = jnp.exp2((m_ref[rows, :] - m) * unit) if not first else None
            p = jnp.exp2((qk - wide(m, width)) * unit)
        l = _by_lane(p, lanes)
        if first:
            return tile.drop(p), m, l, None
        return tile.drop(p), m, l + l_ref[rows, :] * alpha, alpha

    def halves(start, rows, what, first):
        tile = Tile(problem, tiles, refs, ids, first_tile, start, what.width, rows, keys_first=False)
        qk = tile.product(refs.query[rows, :], refs.key[tile.slice, :])

        def rest():
            of_bands = [probabilities(tile.of(band), tile.scores_of(qk, band), band, first) for band in what.bands]
            p, m, l, alpha = zip(*of_bands, strict=True)
            acc = tile.over_keys(tile.join(p, what.bands), refs.value[tile.slice, :])
            if not first:
                acc += acc_ref[rows, :] * wide(jnp.concatenate(alpha), problem.v_head_dim)
            return jnp.concatenate(m), jnp.concatenate(l), acc

        return rest

    def step(start, rows, what):
        m_ref[rows, :], l_ref[rows, :], acc_ref[rows, :] = halves(start, rows, what, False)()

    def end(rows, sums):
        def _():
            m, l, acc = (m_ref[rows, :], l_ref[rows, :], acc_ref[rows, :]) if sums is None else sums
            m, l = m[:, :1] * (1 if unit is None else unit), l.sum(1, keepdims=True)
            out["out"][rows, :] = softmax.finish(m, l, acc, lambda row: row)[0].astype(problem.dtype)
            lane = lax.broadcasted_iota(jnp.int32, (rows.stop - rows.start, 128), 1)
            both = jnp.where(lane == 0, m, l).T  # one transpose for the two
            out["m"][:, rows], out["l"][:, rows] = both[:1], both[1:2]

        only(ids.c == slices - 1, _)

    visit.visit(problem, tiles, ids, first_tile, refs.kinds, visit.Work(begin, step, halves, end))


def states(problem: Problem, tiles: Tiles, vmem: int, operands: Operands) -> tuple[Array, Array, Array]:
    """out `[batch, heads, q_len, v_head_dim]`, and the rows' final m and l, `[batch, heads, 1, q_len]`, rows padded.

    Where keys may be hidden from all rows, what is not finite in their values must not meet their probabilities, which are 0: it is
    taken out, and seldom there to be put in again.
    """
    arrays = arrange(problem, tiles, operands)
    run = functools.partial(_states, problem, tiles, vmem)
    if not plan.hides(problem)[1]:
        return run(arrays)
    value, finite = arrays.value, jnp.isfinite(arrays.value)
    out, m, l = run(arrays._replace(value=jnp.where(finite, value, 0)))

    def seen(sign):
        marked = ~finite & (value != -sign * jnp.inf)  # NaN is both infinities: their sum
        weight, _, _ = run(arrays._replace(value=marked.astype(value.dtype)))
        return jnp.where(weight > 0, sign * jnp.inf, 0).astype(out.dtype)

    put_in = lambda out: out + lax.map(seen, jnp.array([1, -1], out.dtype)).sum(0)
    return lax.cond(finite.all(), lambda out: out, put_in, out), m, l


def _states(problem: Problem, tiles: Tiles, vmem: int, arrays: Arrays) -> tuple[Array, Array, Array]:
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
