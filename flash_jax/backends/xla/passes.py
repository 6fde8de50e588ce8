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
from flash_jax.backends.xla.layout import Config, in_whole_tiles, pad, whole_tiles
from flash_jax.backends.xla.tiles import Seen, Slot, beside_tile, over_slots
from flash_jax.logits import dscores, logits
from flash_jax.problem import DIFFERENTIABLE, Operands, Problem

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


def _columns(x: Array) -> Array:
    """`[b, h, group, block_q, dim]` as `[b, h, dim, group, block_q]`, which lies as a tile does."""
    return jnp.moveaxis(x, -1, 2)


def _flat_tile(x: Array) -> Array:
    """`[b, h, block_kv, group, block_q]` as `[b, h, block_kv, group * block_q]`."""
    return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4])


def _rows_matrix(x: Array) -> Array:
    """`[b, h, group, block_q, dim]` as `[b, h, group * block_q, dim]`."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _scores(slot: Slot, k: Array, q_t: Array, bias: Array | None, scale, seen: Seen):
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
        return jnp.moveaxis(out, 2, -1), lse

    empty = jnp.zeros(problem.out_shape, problem.dtype), jnp.full(problem.lse_shape, -jnp.inf, problem.compute_dtype)
    return _online_softmax(problem, config, operands, finish, empty)


def _online_softmax(problem: Problem, config: Config, operands: Operands, finish: Callable[[softmax.State], Any], results):
    """`finish` of each row's state after all its tiles, into `results` `[batch, q_len, num_heads, ...]`.

    `acc` is `[b, h, v_head_dim, group, block_q]`.
    """
    acc_dtype = problem.compute_dtype

    def one_slot(slot: Slot, results):
        a = slot.arrays

        def one_q_tile(i, results):
            q = slot.rows(a.query, i)
            q_t = _flat_tile(_columns(q))

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)
                v_t = seen.clean_keys(slot.keys(a.value_t, j), axis=3)
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
            rows = finish(slot.over_kv_tiles(i, step, zero))
            return jax.tree.map(lambda whole, x: slot.put_rows(whole, i, x), results, rows)

        return slot.over_q_tiles(one_q_tile, results)

    padded = tuple(pad(x, 1, config.block_q) for x in results)
    return tuple(x[:, : problem.q_len] for x in over_slots(problem, config, operands, one_slot, padded))


def _whole_rows(problem: Problem, config: Config) -> bool:
    """A tile holds whole rows: the backward then normalises them anew, and `sum(p * dp)` stands for `sum(out * dout)`.

    That is as exact as the unfused softmax, where an lse of 1e4 has lost a thousandth of its probabilities.
    """
    return config.block_kv >= problem.kv_len


def _weights_of_whole_rows(s: Array) -> tuple[Array, Array]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from a tile of whole rows.

    The pivot is the forward's: where a single tile's forward and backward are in one program, XLA computes the probabilities once.
    """
    m = s.max(2)
    pivot = softmax.pivot(m)
    l = softmax.probs(s, pivot, _column).sum(2)
    return pivot, softmax.weights_from_states(m, l)[1]


def _row_states(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """`(m, l)` of each row after all its tiles, `[batch, q_len, num_heads]`."""
    empty = jnp.full(problem.lse_shape, -jnp.inf, problem.compute_dtype), jnp.zeros(problem.lse_shape, problem.compute_dtype)
    return _online_softmax(problem, config, operands, lambda state: (state.m, state.l), empty)


def _row_weights(problem: Problem, config: Config, operands: Operands, lse: Array) -> tuple[Array, Array | None]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from lse where it has not lost l."""
    pivot = softmax.lse_pivot(lse)
    if operands.bias is None or _whole_rows(problem, config):
        return pivot, None
    anew = lambda _: softmax.weights_from_states(*_row_states(problem, config, operands))
    return lax.cond(softmax.any_lost_l(lse), anew, lambda pivot: (pivot, jnp.ones_like(pivot)), pivot)


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    acc_dtype = problem.compute_dtype
    whole_rows = _whole_rows(problem, config)
    pivot, weight = _row_weights(problem, config, operands, lse)
    gradients = {}
    if "query" in wanted:
        gradients["query"] = pad(jnp.zeros_like(operands.query), 1, config.block_q)
    if "scale" in wanted:  # by rows: one sum over all tiles would round once for each of them
        gradients["scale"] = pad(jnp.zeros(problem.lse_shape, acc_dtype), 1, config.block_q)
    for name, x in (("key", operands.key), ("value", operands.value)):
        if name in wanted:
            gradients[name] = pad(jnp.zeros_like(x), 1, config.block_kv)
    if "bias" in wanted:
        assert operands.bias is not None
        gradients["bias"] = jnp.zeros_like(whole_tiles(config, operands.bias), acc_dtype)

    def one_slot(slot: Slot, gradients):
        a = slot.arrays
        out_rows, lse_rows, dout_rows, dlse_rows, pivot_rows = (slot.take_rows(x) for x in (out, lse, dout, dlse, pivot))
        weight_rows = None if weight is None else slot.take_rows(weight)

        def one_q_tile(i, carry):
            gradients, of_keys = carry
            q_tile, dout_tile, pivot_tile = (slot.rows(x, i) for x in (a.query, dout_rows, pivot_rows))
            columns = tuple(map(_columns, (q_tile, dout_tile)))
            weight_tile = None if weight_rows is None else slot.rows(weight_rows, i)
            delta_tile = -slot.rows(dlse_rows, i)
            if not whole_rows:
                delta_tile += (slot.rows(out_rows, i).astype(acc_dtype) * dout_tile.astype(acc_dtype)).sum(-1)
            # An empty row may be padding: whatever its cotangents hold is not read.
            delta_tile = jnp.where(slot.rows(lse_rows, i) == -jnp.inf, 0, delta_tile)

            def step(j, masked, carry):
                seen = slot.seen(i, j, masked)
                q, dout = (_rows_matrix(seen.clean_rows(x)) for x in (q_tile, dout_tile))
                k, v = (seen.clean_keys(slot.keys(x, j), axis=2) for x in (a.key, a.value))
                q_t, dout_t = (_flat_tile(seen.clean_columns(x)) for x in columns)
                qk, s, tanh = _scores(slot, k, q_t, slot.bias(i, j), slot.scale(), seen)
                p = _probs(s, *(_weights_of_whole_rows(s) if whole_rows else (pivot_tile, weight_tile)))
                dp = slot.drop(_dot(problem, v, dout_t).reshape(p.shape), i, j)
                delta = delta_tile + (p * dp).sum(2) if whole_rows else delta_tile
                dlogits = softmax.dlogits(p, dp, delta, _column)
                ds = dscores(dlogits, tanh)
                new = dict(carry)
                if "scale" in carry:
                    new["scale"] = carry["scale"] + (ds * qk).sum(2)
                ds = _flat_tile(ds * slot.scale())
                if "query" in carry:
                    k_t = seen.clean_keys(slot.keys(a.key_t, j), axis=3)
                    new["query"] = carry["query"] + _dot(problem, k_t, ds)
                if "key" in carry:
                    new["key"] = slot.add_keys(carry["key"], j, _dot(problem, ds, q))
                if "value" in carry:
                    new["value"] = slot.add_keys(carry["value"], j, _dot(problem, _flat_tile(slot.drop(p, i, j)), dout))
                if "bias" in carry:
                    new["bias"] = _add_bias(slot, carry["bias"], i, j, jnp.moveaxis(dlogits, 2, -1))
                return new

            b, h, group, block_q, head_dim = q_tile.shape
            of_rows = {}
            if "query" in wanted:
                of_rows["query"] = jnp.zeros((b, h, head_dim, group * block_q), acc_dtype)
            if "scale" in wanted:
                of_rows["scale"] = jnp.zeros((b, h, group, block_q), acc_dtype)
            of_bias = {"bias": gradients["bias"]} if "bias" in wanted else {}
            of_tiles = slot.over_kv_tiles(i, step, of_keys | of_rows | of_bias)
            if "query" in wanted:
                of_tiles["query"] = of_tiles["query"].swapaxes(2, 3).reshape(q_tile.shape)
            gradients = gradients | {name: slot.put_rows(gradients[name], i, of_tiles[name]) for name in of_rows}
            gradients |= {name: of_tiles[name] for name in of_bias}
            return gradients, {name: of_tiles[name] for name in of_keys}

        of_keys = {name: jnp.zeros_like(x, acc_dtype) for name, x in (("key", a.key), ("value", a.value)) if name in wanted}
        gradients, of_keys = slot.over_q_tiles(one_q_tile, (gradients, of_keys))
        return gradients | {name: slot.put_keys(gradients[name], x) for name, x in of_keys.items()}

    gradients = over_slots(problem, config, operands, one_slot, gradients)
    if "bias" in wanted:
        assert problem.bias_shape is not None
        rows, columns = problem.bias_shape[2:]
        gradients["bias"] = gradients["bias"][:, :, :rows, :columns].astype(problem.bias_dtype)
    if "scale" in wanted:
        assert operands.scale is not None
        of_rows = gradients["scale"]
        if operands.scale.shape[0] == 1:
            of_rows = of_rows.sum(0, keepdims=True)
        # Batch and heads first, then the rows: without the barrier XLA makes one long sum of them, which rounds more.
        gradients["scale"] = lax.optimization_barrier(of_rows.sum(2)).sum(1)
    lengths = {"query": problem.q_len, "key": problem.kv_len, "value": problem.kv_len}
    return {name: x[:, : lengths[name]] if name in lengths else x for name, x in gradients.items()}


def _add_bias(slot: Slot, total: Array, i: Array, j: Array, dlogits: Array) -> Array:
    """Add a tile `[b, h, group, block_q, block_kv]`, summed over the axes that the bias shares, to the bias's gradient."""
    dlogits = dlogits.reshape(dlogits.shape[0], dlogits.shape[1] * dlogits.shape[2], *dlogits.shape[3:])
    part = dlogits.sum([axis for axis, n in enumerate(total.shape) if n == 1], keepdims=True)
    batch = 0 if slot.split.batch_slots == 1 else slot.index.batch * part.shape[0]
    at = (batch, slot.index.head * part.shape[1], i * part.shape[2], j * part.shape[3])
    start = [jnp.int32(0 if n == 1 else k) for n, k in zip(total.shape, at, strict=True)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, part.shape) + part, start)


def jvp(problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, tangents: dict[str, Array]) -> tuple[Array, Array]:
    """Tangents of `(out, lse)` from those of the operands named in `tangents`, in one pass over the tiles.

    With `p_j = exp(s_j - lse)` at the point, `d lse = sum_j dp_j` and `d out = sum_j d(p_j v_j) - out * d lse`, where `lse` is held fixed
    inside `dp`: so each tile's part is the derivative of a tile function, taken by JAX.
    """
    acc_dtype = problem.compute_dtype
    pivot, weight = _row_weights(problem, config, operands, lse)
    dotted = operands._replace(**{name: jnp.zeros_like(x) for name in DIFFERENTIABLE if (x := getattr(operands, name)) is not None})
    dotted = in_whole_tiles(config, dotted._replace(**tangents))
    whole_rows = _whole_rows(problem, config)

    def one_slot(slot: Slot, results):
        a, dot, pivot_rows = slot.arrays, slot.arrange(dotted), slot.take_rows(pivot)
        weight_rows = None if weight is None else slot.take_rows(weight)
        scale = jnp.asarray(slot.scale(), acc_dtype)
        dscale = jnp.zeros_like(scale) if dot.scale is None else beside_tile(dot.scale)

        def one_q_tile(i, results):
            pivot_tile = slot.rows(pivot_rows, i)
            weight_tile = None if weight_rows is None else slot.rows(weight_rows, i)

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
                    v_t = seen.clean_keys(slot.keys(a.value_t, j), axis=3)
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
            dl, dacc = slot.over_kv_tiles(i, step, zero)
            rows = dl, dacc.swapaxes(2, 3).reshape(b, h, group, block_q, -1)
            return tuple(slot.put_rows(whole, i, x) for whole, x in zip(results, rows, strict=True))

        return slot.over_q_tiles(one_q_tile, results)

    results = (pad(jnp.zeros(shape, acc_dtype), 1, config.block_q) for shape in (problem.lse_shape, problem.out_shape))
    dlse, dacc = (x[:, : problem.q_len] for x in over_slots(problem, config, operands, one_slot, tuple(results)))
    return (dacc - out.astype(acc_dtype) * dlse[..., None]).astype(problem.dtype), dlse
