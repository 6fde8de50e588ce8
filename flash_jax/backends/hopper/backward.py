"""The reverse of attention on Hopper: which kernels run, what they are fed, and what is left to XLA around them.

The cotangent of lse and the last cast of dq are XLA's; the tile schedule is that of the transposed problem, where a
key tile visits query tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import schedule, softmax
from flash_jax.backends.hopper import (
    backward_bias,
    backward_fused,
    backward_roles,
    backward_rows,
    backward_states,
    blocks,
    functions,
    turns,
)
from flash_jax.backends.hopper.backward_tile import WARPGROUPS, Inputs, is_copied
from flash_jax.backends.hopper.host import (
    ROW_TILE,
    by_kv_head,
    notes,
    pad,
    seen_keys,
    static_bounds,
    tile_kinds,
    transposed_bounds,
    unseen_tiles,
)
from flash_jax.problem import Operands, Problem

Array = jax.Array

_MAX_GRID = 65535  # of CUDA's second and third grid axes, which number key tiles and sections of heads
_MAX_KEYS = 64 * _MAX_GRID  # in the smallest key tiles
_ROWS = 128  # pivot and delta are padded to a multiple: whole tiles of every kernel


class QuerySide(NamedTuple):
    """What comes of the queries, for every kernel: `backward_tile.Inputs` has some of it.

    pivot, delta, lost, log2_l: with at least as many rows as there. empty: booleans `[batch, num_heads, q_len]`.
    dq: zeros, float32, of the shape of query.
    """

    query: Array
    dout: Array
    pivot: Array
    delta: Array
    empty: Array
    dq: Array
    lost: Array | None = None
    log2_l: Array | None = None


def declines(problem: Problem) -> str | None:
    """Why the backward cannot serve a problem that the forward can (`launch.declines`), or None."""
    if problem.batch * problem.num_kv_heads > _MAX_GRID:
        return f"batch * num_kv_heads must be at most {_MAX_GRID} in the backward, got {problem.batch * problem.num_kv_heads}."
    if problem.kv_len > _MAX_KEYS:
        return f"kv_len must be at most {_MAX_KEYS} in the backward, got {problem.kv_len}."
    return None


def _padded_head_dim(problem: Problem) -> int:
    """One size for all products."""
    return next(n for n in (64, 128, 256) if max(problem.head_dim, problem.v_head_dim) <= n)


def _tile(problem: Problem) -> tuple[int, int]:
    """block_q, block_kv."""
    head_dim = _padded_head_dim(problem)
    if head_dim == backward_roles.HEAD_DIM:
        return backward_roles.BLOCK_Q, backward_roles.BLOCK_KV
    return backward_fused.BLOCK_Q[head_dim], backward_fused.BLOCK_KV


def backward(
    problem: Problem, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """Gradients of the operands named in `wanted`; see `backends.base.Backend.backward`."""
    problem, operands = functions.hoist(problem, operands)
    queries = _query_side(problem, operands, out, lse, dout, dlse)
    gradients = {"bias": _dbias(problem, operands, queries, lse, dlse)} if "bias" in wanted else {}
    names = tuple(name for name in wanted if name != "bias")
    if not names:
        return gradients
    block_q, block_kv = _tile(problem)
    inputs = _inputs(problem, operands, queries, block_q, block_kv)
    dq_ref, done_ref = jax.new_ref(queries.dq), None
    if problem.deterministic_backward:
        num_q_tiles = schedule.num_tiles(problem.q_len, block_q)
        table = turns.table(inputs.ranges, inputs.lists, schedule.num_tiles(problem.kv_len, block_kv), num_q_tiles)
        inputs = inputs._replace(turns=table)
        done_ref = jax.new_ref(jnp.zeros((problem.batch, problem.num_heads, num_q_tiles, WARPGROUPS), jnp.int32))
    kernel = backward_roles if inputs.query.shape[-1] == backward_roles.HEAD_DIM else backward_fused
    dk, dv = kernel.dq_dk_dv(problem, inputs, dq_ref, done_ref)
    dq = dq_ref[:, : problem.q_len, :, : problem.head_dim]
    scale = problem.scale if operands.scale is None else operands.scale[:, None, None, None]
    all_of_them = {
        "query": lambda: (dq * scale).astype(problem.dtype),
        "key": lambda: dk[:, : problem.kv_len, :, : problem.head_dim],
        "value": lambda: dv[:, : problem.kv_len, :, : problem.v_head_dim],
        "scale": lambda: _dscale(problem, operands, dq, lse),
    }
    return gradients | {name: all_of_them[name]() for name in names}


def _dscale(problem: Problem, operands: Operands, dq: Array, lse: Array) -> Array:
    """sum of dS * (q . k) = sum of q . (dS K): exact at scale 0 too."""
    products = dq * operands.query.astype(jnp.float32)
    if _may_have_empty_rows(problem):
        products = jnp.where((lse > -jnp.inf)[..., None], products, 0)
    by_batch = jnp.sum(products, axis=(1, 2, 3))
    assert operands.scale is not None
    return (by_batch.sum(keepdims=True) if operands.scale.shape[0] == 1 else by_batch).astype(operands.scale.dtype)


def _may_have_empty_rows(problem: Problem) -> bool:
    """By the mask."""
    bounds = static_bounds(problem)
    return not problem.mask.is_interval or bounds is None or bool((bounds[0] >= bounds[1]).any())


def _dbias(problem: Problem, operands: Operands, queries: QuerySide, lse: Array, dlse: Array) -> Array:
    """The cotangent of the bias, in its own shape and dtype."""
    assert problem.bias_shape is not None and problem.bias_dtype is not None
    if problem.bias_shape[3] == 1 and problem.kv_len != 1:
        # The same number on all logits of a row: lse moves by it, and out does not move.
        by_row = jnp.where(lse == -jnp.inf, 0, dlse).transpose(0, 2, 1)[..., None]
        return _sum_to(by_row, problem.bias_shape).astype(problem.bias_dtype)
    block_q = backward_bias.BLOCK_Q[_padded_head_dim(problem)]
    block_kv = backward_bias.BLOCK_KV
    inputs = _inputs(problem, operands, queries, block_q, block_kv)
    kinds = None
    if inputs.q_lo is not None:
        kinds = _transposed_kinds(problem, operands, block_q, block_kv).astype(jnp.int32)
    unused = ("ranges", "lists", "kinds", "seen", "unseen_tiles", "empty_tiles")
    cells = backward_bias.cells(problem, inputs._replace(**dict.fromkeys(unused)), kinds)
    cells = cells if is_copied(operands.bias) else cells.swapaxes(2, 3)
    return _sum_to(cells[:, :, : problem.q_len, : problem.kv_len], problem.bias_shape).astype(problem.bias_dtype)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that `shape` has as 1."""
    return x.sum(tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)


def _query_side(problem: Problem, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array) -> QuerySide:
    """One pass over out and dout; with a bias, another over the keys for rows whose lse has lost log(l) (`backward_states`)."""
    q_pad = schedule.num_tiles(problem.q_len, _ROWS) * _ROWS
    query, dout = (_wide(x, _padded_head_dim(problem)) for x in (operands.query, dout))
    out = _wide(out, schedule.num_tiles(problem.v_head_dim, backward_rows.COLUMNS) * backward_rows.COLUMNS)
    by_row = lambda x, fill: pad(x.transpose(0, 2, 1), {2: q_pad}, fill)
    has_bias = problem.bias_shape is not None
    may_be_empty = has_bias or _may_have_empty_rows(problem)
    unit = 1 if has_bias else softmax.LOG2E
    pivot, delta, dq = backward_rows.prepare(out, dout, by_row(lse, -jnp.inf), query.shape, unit, may_be_empty)
    delta -= by_row(jnp.where(lse == -jnp.inf, 0, dlse) if may_be_empty else dlse, 0)
    queries = QuerySide(query, dout, pivot, delta, lse.transpose(0, 2, 1) == -jnp.inf, dq)
    if has_bias:
        queries = queries._replace(lost=softmax.any_lost_l(lse).astype(jnp.int32)[None])
        tile = _tile(problem)
        kinds = None
        if problem.mask.block_sizes:  # these walk over hidden blocks too
            kinds = _transposed_kinds(problem, operands, *tile).astype(jnp.int32)
        inputs = _inputs(problem, operands, queries, *tile)._replace(pivot=pivot, kinds=kinds)
        pivot, log2_l = backward_states.pivot_and_log2_l(problem, inputs, *tile)
        queries = queries._replace(pivot=pivot, log2_l=log2_l)
    return queries


def _transposed_kinds(problem: Problem, operands: Operands, block_q: int, block_kv: int) -> Array:
    """int8 `[1 | batch, 1 | num_heads, num_kv_tiles, num_q_tiles]`."""
    return tile_kinds(problem, operands, block_q, block_kv).swapaxes(-1, -2)


def _wide(x: Array, columns: int) -> Array:
    """`[batch, len, heads, head_dim]` as the copy engine takes it, with that many columns."""
    return pad(x, {1: schedule.num_tiles(x.shape[1], ROW_TILE) * ROW_TILE, 3: columns})


def _inputs(problem: Problem, operands: Operands, queries: QuerySide, block_q: int, block_kv: int) -> Inputs:
    mask, head_dim = operands.mask, _padded_head_dim(problem)
    q_pad = schedule.num_tiles(problem.q_len, block_q) * block_q
    kv_pad = schedule.num_tiles(problem.kv_len, block_kv) * block_kv
    inputs = Inputs(
        query=queries.query,
        key=_wide(operands.key, head_dim),
        value=_wide(operands.value, head_dim),
        dout=queries.dout,
        pivot=queries.pivot[:, :, :q_pad],
        delta=queries.delta[:, :, :q_pad],
        lost=queries.lost,
        log2_l=None if queries.log2_l is None else queries.log2_l[:, :, :q_pad],
        scale=operands.scale,
        bias=_bias(operands.bias, q_pad, kv_pad),
        row_keys=None if operands.dropout_row_keys is None else pad(operands.dropout_row_keys, {2: q_pad}),
    )
    if problem.mask.hides_nothing and kv_pad == problem.kv_len:
        return inputs
    q_lo, q_hi = transposed_bounds(problem, operands, kv_pad)
    always = problem.mask.rule is not None and bool((q_hi >= problem.q_len).all())
    xp = schedule.numpy_or_jax(q_hi)
    q_hi = xp.where(q_hi >= problem.q_len, np.int32(q_pad), q_hi)  # rows past the end have pivot +inf: they need no mask
    inputs = inputs._replace(q_lo=jnp.asarray(q_lo), q_hi=None if always else jnp.asarray(q_hi))
    if _may_have_empty_rows(problem):
        inputs = inputs._replace(empty_tiles=_tiles_with(pad(queries.empty, {2: q_pad}), block_q))
    kinds = None if problem.mask.is_interval else _transposed_kinds(problem, operands, block_q, block_kv)
    inputs = inputs._replace(**_seen(problem, operands, kinds, block_kv))
    if kinds is None:
        ranges = schedule.interval_ranges(q_lo, q_hi, block_kv, block_q)
        return inputs._replace(ranges=jnp.asarray(xp.stack(ranges, axis=-1), jnp.int32))
    return inputs._replace(
        **_visits(problem, kinds),
        functions=tuple(
            functions.as_words(function, arrays, {"query": q_pad, "key": kv_pad})
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        batch_ids=mask.batch_ids,
        blocks={
            n: blocks.as_bits(mask.blocks[n].swapaxes(-1, -2), sizes[0], q_pad)
            for n, sizes in enumerate(problem.mask.block_sizes)
            if sizes[0] % block_q or sizes[1] % block_kv
        },
        notes=notes(problem, operands, block_q, block_kv).swapaxes(-1, -2) if problem.mask.has_labels else None,
        q_labels=None if mask.q_labels is None else pad(mask.q_labels, {1: q_pad})[:, None],
        kv_labels=None if mask.kv_labels is None else pad(mask.kv_labels, {1: kv_pad}),
        dense=tuple(_elements(x.astype(jnp.int32), q_pad, kv_pad) for x in mask.dense),
    )


def _bias(bias: Array | None, q_pad: int, kv_pad: int) -> Array | None:
    if bias is None:
        return None
    return pad(bias, {2: q_pad, 3: kv_pad}) if is_copied(bias) else _elements(bias, q_pad, kv_pad)


def _elements(x: Array, q_pad: int, kv_pad: int) -> Array:
    """`[.., .., 1 | q_len, 1 | kv_len]` -> `[.., .., 1 | kv_pad, 1 | q_pad]`."""
    x = x.swapaxes(2, 3)
    return pad(x, {axis: size for axis, size in ((2, kv_pad), (3, q_pad)) if x.shape[axis] != 1})


def _seen(problem: Problem, operands: Operands, kinds: Array | None, block_kv: int) -> dict[str, Array]:
    """`Inputs.seen` and `Inputs.unseen_tiles`. kinds: transposed, of a mask that is no interval."""
    if problem.mask.is_interval or problem.mask.evaluates_scores:
        seen = seen_keys(problem, operands)
        if seen is None:
            return {}
        kv_pad = schedule.num_tiles(problem.kv_len, block_kv) * block_kv
        unseen = _tiles_with(pad(~seen, {2: kv_pad}), block_kv)
        return {"seen": pad(seen.astype(jnp.int32), {2: kv_pad}), "unseen_tiles": unseen}
    if problem.mask.has_patterns:  # block maps: a full tile proves its keys seen, and no block visits an empty one
        assert kinds is not None
        return {"unseen_tiles": (by_kv_head(problem, kinds).max((2, -1)) == schedule.PARTIAL).astype(jnp.int32)}
    return {"unseen_tiles": jnp.asarray(unseen_tiles(problem, operands, block_kv))[:, None]}


def _tiles_with(x: Array, block: int) -> Array:
    """int32 `[..., tiles]`: nonzero where one of x `[..., tiles * block]` is true."""
    return jnp.any(x.reshape(*x.shape[:-1], -1, block), axis=-1).astype(jnp.int32)


def _visits(problem: Problem, kinds: Array) -> dict[str, Array | None]:
    """`Inputs.ranges`, or `Inputs.lists` and `Inputs.kinds`: heads of a group share a list, and look up what differs. kinds: transposed."""
    if not problem.mask.has_patterns:  # labels, as in the forward
        ranges, _ = schedule.ranges_of_kinds(kinds[:, 0])
        return {"ranges": jnp.stack(ranges, axis=-1)}
    by_head = None
    if problem.deterministic_backward:  # in one order, full or not, so that turns come as they are waited for
        kinds = jnp.minimum(kinds, schedule.PARTIAL)
    if kinds.shape[1] > 1 and problem.group > 1:
        by_head = kinds.astype(jnp.int32)
        grouped = by_kv_head(problem, kinds)
        low, high = grouped.min(2), grouped.max(2)
        kinds = jnp.where(low == high, low, schedule.PARTIAL)
    lists = schedule.tile_lists(kinds)
    return {"lists": jnp.concatenate([lists.full_end[..., None], lists.end[..., None], lists.index], axis=-1), "kinds": by_head}
