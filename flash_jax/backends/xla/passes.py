"""The three passes over the tiles: forward, backward, and the tangent map.

Forward: FlashAttention's Algorithm 1 (arXiv 2205.14135) with the q tile outside (as arXiv 2307.08691). Backward: its
Algorithm 4, scores recomputed from q, k and lse; one pass with five products a tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax import softmax
from flash_jax.backends.xla.layout import Config, Split, arrange, pad, rows_from_tiles, slice_tile
from flash_jax.backends.xla.tiles import AllSeen, Seen, Slot, over_slots, q_tiles
from flash_jax.logits import dscores, logits
from flash_jax.problem import DIFFERENTIABLE, Operands, Problem
from flash_jax.varying import varying_like

Array = jax.Array


def _dot(problem: Problem, a: Array, b: Array) -> Array:
    """`[b, h, m, k] . [b, h, k, n] -> [b, h, m, n]`, accumulated in the compute dtype.

    float32 stays float32 on hardware whose default is less (TF32, bfloat16 passes), unless the user says otherwise.
    """
    a, b = a.astype(problem.dtype), b.astype(problem.dtype)
    precision = problem.matmul_precision or (lax.Precision.HIGHEST if problem.dtype.itemsize >= 4 else None)
    return lax.dot_general(a, b, (((3,), (2,)), ((0, 1), (0, 1))), precision=precision, preferred_element_type=problem.compute_dtype)


def _column(row: Array) -> Array:
    """Row numbers `[b, h, group, block_q]` beside a tile `[b, h, block_kv, group, block_q]`."""
    return row[:, :, None]


def _flat_tile(x: Array) -> Array:
    """`[b, h, block_kv, group, block_q]` as `[b, h, block_kv, group * block_q]`."""
    return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4])


def _rows_matrix(x: Array) -> Array:
    """`[b, h, group, block_q, dim]` as `[b, h, group * block_q, dim]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _scores(slot: Slot, k: Array, q_t: Array, bias: Array | None, scale, seen: Seen | AllSeen):
    """`(qk, s, tanh)` of a tile: products, base-2 logits with -inf where not seen, the soft cap's tanh."""
    qk = _dot(slot.problem, k, q_t)
    qk = qk.reshape(*qk.shape[:3], slot.split.group, slot.config.block_q)
    s, tanh = logits(qk, scale, slot.problem.logits_soft_cap, bias)
    return qk, s if seen.scores is None else jnp.where(seen.scores, s, -jnp.inf), tanh


def _probs(s: Array, pivot: Array, weight: Array | None) -> Array:
    p = softmax.probs_from_lse(s, pivot, _column)
    return p if weight is None else p * _column(weight)


def forward(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `base.Backend.forward`."""

    def finish(state: softmax.State):
        out, lse = softmax.finish(*state, column=_column)
        return jnp.moveaxis(out, 2, -1).astype(problem.dtype), lse

    out, lse = _online_softmax(problem, config, operands, finish)
    return _to_user(problem, config, operands, out), _to_user(problem, config, operands, lse)


def _to_user(problem: Problem, config: Config, operands: Operands, rows: Array) -> Array:
    """From the layout, rows padded, to `[batch, q_len, num_heads, ...]`."""
    return Split.of(problem, config, operands).restore(rows).swapaxes(1, 2)[:, : problem.q_len]


def _online_softmax(problem: Problem, config: Config, operands: Operands, finish: Callable[[softmax.State], Any]):
    """`finish` of each row's state after all its tiles, in the layout, rows padded; `acc` is `[b, h, v_head_dim, group, block_q]`."""
    acc_dtype = problem.compute_dtype

    def one_slot(slot: Slot, visit, carry):
        a = slot.arrays

        def one_q_tile(_, i):
            q = slot.rows(a.query, i)
            q_t = _rows_matrix(q).swapaxes(2, 3)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)
                v_t = seen.clean_keys(slot.transposed_keys(a.value_t, j), axis=3)
                _, s, _ = _scores(slot, slot.keys(a.key, j), q_t, slot.bias(i, j), slot.scale(), seen)
                m, l, acc = state
                m, pivot, alpha = softmax.rescale(m, s.max(2))
                p = softmax.probs(s, pivot, _column)
                l = l * alpha + p.sum(2)
                part = _dot(problem, v_t, _flat_tile(slot.drop(p, i, j))).reshape(acc.shape)
                return softmax.State(m, l, acc * _column(alpha) + part)

            b, h, group, block_q, _ = q.shape
            zero = softmax.State(
                jnp.full((b, h, group, block_q), -jnp.inf, acc_dtype),
                jnp.zeros((b, h, group, block_q), acc_dtype),
                jnp.zeros((b, h, problem.v_head_dim, group, block_q), acc_dtype),
            )
            return None, finish(visit(i, step, zero))

        return carry, lax.scan(one_q_tile, None, q_tiles(problem, config))[1]

    return jax.tree.map(rows_from_tiles, over_slots(problem, config, operands, one_slot, None)[1])


def _whole_rows(problem: Problem, config: Config) -> bool:
    """A tile holds whole rows: the backward then normalises them anew, and `sum(p * dp)` stands for `sum(out * dout)`.

    That is as exact as the unfused softmax, where an lse of 1e4 has lost a thousandth of its probabilities.
    """
    return config.block_kv >= problem.kv_len


def _weights_of_whole_rows(s: Array) -> tuple[Array, Array]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from a tile of whole rows."""
    m = s.max(2)
    pivot = jnp.where(m == -jnp.inf, jnp.inf, m)
    l = softmax.probs(s, pivot, _column).sum(2)
    return pivot, jnp.where(l > 0, 1 / jnp.where(l > 0, l, 1), 0)


_LARGE = 2.0**13  # |lse| from which its last bit, 2^-11 and more, is no longer small against log(l)


def _row_weights(problem: Problem, config: Config, operands: Operands, lse_rows: Array) -> tuple[Array, Array | None]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from lse in the layout.

    A finite bias of -1e9 on a whole row makes an lse that has lost log(l): then the rows' states are computed once more.
    """
    pivot = softmax.lse_pivot(lse_rows)
    if operands.bias is None or _whole_rows(problem, config):
        return pivot, None

    def from_states(_):
        m, l = _online_softmax(problem, config, operands, lambda state: (state.m, state.l))
        seen = l > 0
        return jnp.where(seen, m, jnp.inf), jnp.where(seen, 1 / jnp.where(seen, l, 1), 0)

    large = jnp.isfinite(lse_rows) & (jnp.abs(lse_rows) > _LARGE)
    return lax.cond(jnp.any(large), from_states, lambda pivot: (pivot, jnp.ones_like(pivot)), pivot)


def _rows_layout(split: Split, config: Config, x: Array, fill: float = 0) -> Array:
    """`[batch, q_len, num_heads(, dim)]` -> the layout, padded."""
    return pad(split.arrange(x.swapaxes(1, 2)), 5, config.block_q, fill)


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    delta = -dlse
    whole_rows = _whole_rows(problem, config)
    if not whole_rows:
        delta += (out.astype(acc_dtype) * dout.astype(acc_dtype)).sum(-1)
    delta = jnp.where(lse == -jnp.inf, 0, delta)  # an empty row may be padding: whatever its cotangents hold is not read
    dout_rows, delta_rows = _rows_layout(split, config, dout), _rows_layout(split, config, delta)
    pivot_rows, weight_rows = _row_weights(problem, config, operands, _rows_layout(split, config, lse, -jnp.inf))
    dbias = None
    if "bias" in wanted:
        assert operands.bias is not None
        padded = pad(pad(split.arrange(operands.bias), -2, config.block_q), -1, config.block_kv)
        dbias = jnp.zeros(padded.shape, acc_dtype)

    def one_slot(slot: Slot, visit, dbias):
        a = slot.arrays
        dout, delta, pivot = (slot.take(x) for x in (dout_rows, delta_rows, pivot_rows))
        weight = None if weight_rows is None else slot.take(weight_rows)

        def one_q_tile(carry, i):
            q_tile, dout_tile = slot.rows(a.query, i), slot.rows(dout, i)
            delta_tile, pivot_tile = slot.row_numbers(delta, i), slot.row_numbers(pivot, i)
            weight_tile = None if weight is None else slot.row_numbers(weight, i)

            def step(j, masked, carry):
                seen = slot.seen(i, j, masked)
                q, dout = (_rows_matrix(seen.clean_rows(x)) for x in (q_tile, dout_tile))
                k, v = (seen.clean_keys(slot.keys(x, j), axis=2) for x in (a.key, a.value))
                qk, s, tanh = _scores(slot, k, q.swapaxes(2, 3), slot.bias(i, j), slot.scale(), seen)
                p = _probs(s, *(_weights_of_whole_rows(s) if whole_rows else (pivot_tile, weight_tile)))
                dp = slot.drop(_dot(problem, v, dout.swapaxes(2, 3)).reshape(p.shape), i, j)
                delta = delta_tile + (p * dp).sum(2) if whole_rows else delta_tile
                dlogits = softmax.dlogits(p, dp, delta, _column)
                ds = dscores(dlogits, tanh)
                new = dict(carry)
                if "scale" in carry:
                    new["scale"] = carry["scale"] + (ds * qk).sum(2)
                ds = _flat_tile(ds * slot.scale())
                if "query" in carry:
                    k_t = seen.clean_keys(slot.transposed_keys(a.key_t, j), axis=3)
                    new["query"] = carry["query"] + _dot(problem, k_t, ds)
                if "key" in carry:
                    new["key"] = _add_keys(config, carry["key"], j, _dot(problem, ds, q))
                if "value" in carry:
                    new["value"] = _add_keys(config, carry["value"], j, _dot(problem, _flat_tile(slot.drop(p, i, j)), dout))
                if "bias" in carry:
                    new["bias"] = _add_bias(slot, carry["bias"], i, j, jnp.moveaxis(dlogits, 2, -1))
                return new

            b, h, group, block_q, head_dim = q_tile.shape
            of_rows = {}
            if "query" in wanted:
                of_rows["query"] = jnp.zeros((b, h, head_dim, group * block_q), acc_dtype)
            if "scale" in wanted:  # by rows: one sum over all tiles would round once for each of them
                of_rows["scale"] = jnp.zeros((b, h, group, block_q), acc_dtype)
            carry = visit(i, step, carry | of_rows)
            of_rows = {name: carry.pop(name) for name in of_rows}
            if "query" in wanted:
                of_rows["query"] = of_rows["query"].swapaxes(2, 3).reshape(q_tile.shape).astype(problem.dtype)
            if "scale" in wanted:
                of_rows["scale"] = of_rows["scale"].sum((1, 2, 3))
            return carry, of_rows

        keys = (("key", a.key), ("value", a.value))
        carry = {name: jnp.zeros(x.shape[:2] + x.shape[3:], acc_dtype) for name, x in keys if name in wanted}
        if dbias is not None:
            carry["bias"] = dbias
        carry, of_rows = lax.scan(one_q_tile, varying_like(carry, operands.query), q_tiles(problem, config))
        dbias = carry.pop("bias", None)
        return dbias, carry | of_rows

    dbias, totals = over_slots(problem, config, operands, one_slot, dbias)
    gradients = {}
    if "query" in wanted:
        gradients["query"] = _to_user(problem, config, operands, rows_from_tiles(totals["query"]))
    for name in ("key", "value"):
        if name in wanted:
            total = split.restore(totals[name][:, :, :, :, None]).swapaxes(1, 2)[:, : problem.kv_len]
            gradients[name] = total.astype(problem.dtype)
    if dbias is not None:
        assert problem.bias_shape is not None
        rows, columns = problem.bias_shape[2:]
        gradients["bias"] = split.restore(dbias)[:, :, :rows, :columns].astype(problem.bias_dtype)
    if "scale" in wanted:
        assert operands.scale is not None
        by_batch = totals["scale"].sum((1, 2)).reshape(-1)
        gradients["scale"] = by_batch if operands.scale.shape[0] != 1 else by_batch.sum(keepdims=True)
    return gradients


def _add_keys(config: Config, total: Array, j: Array, part: Array) -> Array:
    """Add to key tile `j` of `[b, h, kv_len, dim]`."""
    if total.shape[2] == 1:
        return total + part
    old = slice_tile(total, 2, j, config.block_kv)
    return lax.dynamic_update_slice_in_dim(total, old + part, j * config.block_kv, 2)


def _add_bias(slot: Slot, total: Array, i: Array, j: Array, dlogits: Array) -> Array:
    """Add a tile `[b, h, group, block_q, block_kv]`, summed over the axes that the bias shares, to the bias's gradient."""
    size = (1, 1, *(block if n > 1 else 1 for n, block in zip(total.shape[2:], dlogits.shape, strict=True)))
    at = (*slot.index, 0, 0, 0, i * slot.config.block_q, j * slot.config.block_kv)
    start = [jnp.int32(0 if n == 1 else k) for n, k in zip(total.shape, at, strict=True)]
    shared = tuple(axis for axis, n in enumerate(size[2:]) if n == 1)
    part = dlogits.sum(shared, keepdims=True)[None, None]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + part, start)


def jvp(problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, tangents: dict[str, Array]) -> tuple[Array, Array]:
    """Tangents of `(out, lse)` from those of the operands named in `tangents`, in one pass over the tiles.

    With `p_j = exp(s_j - lse)` at the point, `d lse = sum_j dp_j` and `d out = sum_j d(p_j v_j) - out * d lse`, where `lse` is held fixed
    inside `dp`: so each tile's part is the derivative of a tile function, taken by JAX.
    """
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    pivot_rows, weight_rows = _row_weights(problem, config, operands, _rows_layout(split, config, lse, -jnp.inf))
    dotted = operands._replace(**{name: jnp.zeros_like(x) for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None})
    whole_rows = _whole_rows(problem, config)
    dotted = arrange(problem, config, dotted._replace(**tangents), split)

    def one_slot(slot: Slot, visit, carry):
        a, pivot, dot = slot.arrays, slot.take(pivot_rows), jax.tree.map(slot.take, dotted)
        weight = None if weight_rows is None else slot.take(weight_rows)
        scale = jnp.asarray(slot.scale(), acc_dtype)
        dscale = jnp.zeros_like(scale) if dot.scale is None else dot.scale

        def one_q_tile(_, i):
            pivot_tile = slot.row_numbers(pivot, i)
            weight_tile = None if weight is None else slot.row_numbers(weight, i)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)

                def weights(k, q_t, v_t, bias, scale):
                    _, s, _ = _scores(slot, k, q_t, bias, scale, seen)
                    p = _probs(s, *row_weights)
                    return p.sum(2), _dot(problem, v_t, _flat_tile(slot.drop(p, i, j)))

                def read(a, scale):
                    bias = None if a.bias is None else slot.tile(a.bias, i, j).astype(acc_dtype)
                    q_t = _rows_matrix(seen.clean_rows(slot.rows(a.query, i))).swapaxes(2, 3)
                    k = seen.clean_keys(slot.keys(a.key, j), axis=2)
                    v_t = seen.clean_keys(slot.transposed_keys(a.value_t, j), axis=3)
                    return k, q_t, v_t, bias, scale

                point = read(a, scale)
                row_weights = pivot_tile, weight_tile
                if whole_rows:
                    k, q_t, _, bias, scale_here = point
                    row_weights = _weights_of_whole_rows(_scores(slot, k, q_t, bias, scale_here, seen)[1])
                _, (dl, dacc) = jax.jvp(weights, point, read(dot, dscale))
                return state[0] + dl, state[1] + dacc

            b, h, group, block_q = pivot_tile.shape
            zero = jnp.zeros(pivot_tile.shape, acc_dtype), jnp.zeros((b, h, problem.v_head_dim, group * block_q), acc_dtype)
            dl, dacc = visit(i, step, zero)
            return None, (dl, dacc.swapaxes(2, 3).reshape(b, h, group, block_q, -1))

        return carry, lax.scan(one_q_tile, None, q_tiles(problem, config))[1]

    _, tiles = over_slots(problem, config, operands, one_slot, None)
    dlse, dacc = (_to_user(problem, config, operands, rows_from_tiles(x)) for x in tiles)
    return (dacc - out.astype(acc_dtype) * dlse[..., None]).astype(problem.dtype), dlse
