"""Backward: dq, dk and dv in one pass over the tiles, five products each.

The resident keys are the outer loop, the q tiles of every head of the group the inner one: dk and dv of the resident keys stay in
float32 in VMEM until all rows have been seen, dq of a q tile until all resident keys have. Nothing is revisited, the schedule is
the forward's, and a group's dk and dv are summed on the way. Keys that do not fit into VMEM at once are taken slice by slice,
dq going through memory once a slice.

One fused kernel instead of one for dq and one for dk and dv: five products a tile against seven, and the exponentials once.

Source: FlashAttention (arXiv 2205.14135), Algorithm 4.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import softmax
from flash_jax.backends.tpu import plan, visit
from flash_jax.backends.tpu.config import Config, Tiles
from flash_jax.backends.tpu.dbias import dbias
from flash_jax.backends.tpu.forward import states
from flash_jax.backends.tpu.gradients import tile_gradients, whole_rows
from flash_jax.backends.tpu.launch import Arrays, Grid, Ids, arrange, call, heads_first, pad_rows, row_of, slice_keys
from flash_jax.problem import Operands, Problem

Array = jax.Array


def _kernel(problem: Problem, tiles: Tiles, last: tuple[int, int], scaled: bool, refs: Arrays, out, scratch, ids: Ids):
    """last: number of the last head of a group and of the last q tile."""
    dq_ref, dk_ref, dv_ref = scratch["dq"], scratch["dk"], scratch["dv"]
    first_tile = 0 if refs.first_tile is None else refs.first_tile[0, 0]
    head = lax.rem(ids.h, jnp.int32(problem.group)) if problem.group > 1 else 0
    scale = problem.scale if refs.scale is None else refs.scale[0, 0]

    @pl.when((head == 0) & (ids.i == 0))
    def _():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    def begin(rows):
        dq_ref[rows, :] = jnp.zeros_like(dq_ref[rows, :])

    def halves(start, rows, what, first):
        tile, gradients = tile_gradients(problem, tiles, refs, ids, first_tile, start, rows, what)

        def rest():
            q, k, dout, p, _, ds = gradients()
            dv_ref[tile.slice, :] += tile.over_rows(p, dout)
            dk_ref[tile.slice, :] += tile.over_rows(ds, q)
            dq = tile.over_keys(ds, k)
            return dq if first else dq_ref[rows, :] + dq

        return rest

    def step(start, rows, what):
        dq_ref[rows, :] = halves(start, rows, what, False)()

    def end(rows, sums):
        dq = dq_ref[rows, :] if sums is None else sums
        out["dq"][rows, :] = (dq * scale if scaled else dq).astype(out["dq"].dtype)

    visit.visit(problem, tiles, ids, first_tile, refs.kinds, visit.Work(begin, step, halves, end))

    @pl.when((head == last[0]) & (ids.i == last[1]))
    def _():
        out["dk"][...] = (dk_ref[...] * scale).astype(out["dk"].dtype)
        out["dv"][...] = dv_ref[...].astype(out["dv"].dtype)


def _row_weights(problem: Problem, config: Config, operands: Operands, lse: Array, tiles: Tiles) -> tuple[Array, Array | None]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from lse where it has not lost l."""
    pivot = softmax.lse_pivot(row_of(lse, tiles, -jnp.inf))
    if operands.bias is None:
        return pivot, None

    def from_states(_):
        _, m, l = (x[..., : problem.q_len] for x in states(problem, config.forward, config.vmem, operands))
        pivot, weight = softmax.weights_from_states(m, l)
        to_tiles = lambda x, fill: row_of(heads_first(x[:, :, 0]), tiles, fill)
        return to_tiles(pivot, jnp.inf), to_tiles(weight, 0)

    return lax.cond(softmax.any_lost_l(lse), from_states, lambda pivot: (pivot, jnp.ones_like(pivot)), pivot)


def _with_finite_keys(arrays: Arrays) -> Arrays:
    """0 for what is not finite in a key, and NaN in its value.

    A key multiplies the cotangents of its scores, which are 0 where hidden; its value meets the mask before it meets anything else,
    and where such a key is seen, gradients are NaN as they have to be.
    """
    finite = jnp.isfinite(arrays.key)
    value = jnp.where(finite.all(-1, keepdims=True), arrays.value, jnp.nan)
    return arrays._replace(key=jnp.where(finite, arrays.key, 0), value=value)


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    tiles = config.backward
    seen = lse > -jnp.inf  # of the other rows nothing is read: they may be padding
    if whole_rows(problem, tiles):
        delta, pivot, weight = -dlse, None, None
    else:
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1) - dlse
        pivot, weight = _row_weights(problem, config, operands, lse, tiles)
    delta = jnp.where(seen, delta, 0)
    hidden_rows, hidden_keys = plan.hides(problem)
    seen_rows = lambda x: jnp.where(seen[..., None], x, 0) if hidden_rows else x
    arrays = arrange(problem, tiles, operands._replace(query=seen_rows(operands.query)))
    if hidden_keys:
        arrays = _with_finite_keys(arrays)
    dout = pad_rows(heads_first(seen_rows(dout)), tiles)
    arrays = arrays._replace(dout=dout, pivot=pivot, weight=weight, delta=row_of(delta, tiles))
    gradients = {}
    if {"query", "key", "value", "scale"} & set(wanted):
        gradients = _dq_dk_dv(problem, tiles, config.vmem, arrays, unscaled="scale" in wanted)
    if "scale" in wanted:
        dq = gradients["query"]  # of the scaled scores' own query: times q it sums to the scale's gradient, at scale 0 as well
        query = jnp.where(seen[..., None], operands.query.astype(jnp.float32), 0)
        by_batch = (dq * query).sum((1, 2, 3))
        gradients["scale"] = by_batch if operands.scale.shape[0] != 1 else by_batch.sum(keepdims=True)
        gradients["query"] = (dq * operands.scale[:, None, None, None]).astype(problem.dtype)
    if "bias" in wanted:
        gradients["bias"] = dbias(problem, config, operands, arrays)
    return {name: gradients[name] for name in wanted}


def _dq_dk_dv(problem: Problem, tiles: Tiles, vmem: int, arrays: Arrays, *, unscaled: bool) -> dict[str, Array]:
    """Gradients of query, key and value in the user's layout; `unscaled`: dq in float32 and not times the scale."""
    group, num_q = problem.group, arrays.query.shape[2] // tiles.block_q
    slices = arrays.key.shape[2] // tiles.resident
    whole = slices == 1 and not unscaled
    ids = lambda b, g, n, i: Ids(b, g * group + n, i, 0)
    grid = Grid((problem.batch, problem.num_kv_heads, group, num_q), ids, parallel=2)
    of_keys = lambda dim: (problem.batch, problem.num_kv_heads, tiles.resident, dim)

    def one_slice(arrays):
        return call(
            lambda *args: _kernel(problem, tiles, (group - 1, num_q - 1), whole, *args),
            problem,
            tiles,
            grid,
            arrays,
            {
                "dq": ("bhq.", arrays.query.shape, problem.dtype if whole else jnp.float32),
                "dk": ("bgk.", of_keys(problem.head_dim), problem.dtype),
                "dv": ("bgk.", of_keys(problem.v_head_dim), problem.dtype),
            },
            {
                "dq": ((tiles.block_q, problem.head_dim), jnp.float32),
                "dk": ((tiles.resident, problem.head_dim), jnp.float32),
                "dv": ((tiles.resident, problem.v_head_dim), jnp.float32),
            },
            name="flash_backward",
            vmem=vmem,
        )

    if slices == 1:
        total = one_slice(arrays)
        dq, dk, dv = total["dq"], total["dk"], total["dv"]
    else:

        def add_slice(dq, c):
            part = one_slice(slice_keys(problem, tiles, arrays, c))
            return dq + part["dq"], (part["dk"], part["dv"])

        dq, by_slice = lax.scan(add_slice, jnp.zeros(arrays.query.shape, jnp.float32), jnp.arange(slices, dtype=jnp.int32))
        dk, dv = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1]) for x in by_slice)
        if not unscaled:
            scale = problem.scale if arrays.scale is None else arrays.scale[..., None]
            dq = (dq * scale).astype(problem.dtype)
    cut = lambda x, length: heads_first(x[:, :, :length])
    return {"query": cut(dq, problem.q_len), "key": cut(dk, problem.kv_len), "value": cut(dv, problem.kv_len)}
