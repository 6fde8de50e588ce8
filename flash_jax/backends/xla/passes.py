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
from flash_jax.backends.xla.tiles import Slot, over_slots, q_tiles
from flash_jax.logits import dscores, logits
from flash_jax.problem import Operands, Problem

Array = jax.Array


def _dot(problem: Problem, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product over one axis each, batched over (batch_inner, head_inner), accumulated in the compute dtype.

    float32 stays float32 on hardware whose default is less (TF32, bfloat16 passes), unless the user says otherwise.
    """
    a, b = a.astype(problem.dtype), b.astype(problem.dtype)
    precision = problem.matmul_precision or (lax.Precision.HIGHEST if problem.dtype.itemsize >= 4 else None)
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=problem.compute_dtype)


def _dot_rows(problem: Problem, tile: Array, rows: Array) -> Array:
    """Sum over group and rows: `[b, h, group, q, kv]`, `[b, h, group, q, d]` -> `[b, h, kv, d]`."""
    b, h, g, q, kv = tile.shape
    return _dot(problem, tile.reshape(b, h, g * q, kv), rows.reshape(b, h, g * q, rows.shape[-1]), (2, 2))


def _clean_keys(seen: Array | None, x: Array) -> Array:
    """Zero the keys of a tile that none of its rows sees: whatever padding holds must not meet 0 * NaN."""
    if seen is None:
        return x
    return jnp.where(seen.any((2, 3))[..., None], x, jnp.zeros_like(x))


def _clean_rows(seen: Array | None, x: Array) -> Array:
    """Zero the rows of a tile that see none of its keys."""
    if seen is None:
        return x
    return jnp.where(seen.any(-1)[..., None], x, jnp.zeros_like(x))


def _probs(slot: Slot, s: Array, pivot: Array, weight: Array | None, i: Array) -> Array:
    p = softmax.probs_from_lse(s, pivot)
    return p if weight is None else p * slot.row_numbers(weight, i)[..., None]


def _scores(slot: Slot, q: Array, k: Array, bias: Array | None, scale, seen: Array | None):
    """`(qk, s, tanh)` of a tile: products, base-2 logits with -inf where not seen, the soft cap's tanh."""
    qk = _dot(slot.problem, q, k, (4, 3))
    s, tanh = logits(qk, scale, slot.problem.logits_soft_cap, bias)
    return qk, s if seen is None else jnp.where(seen, s, -jnp.inf), tanh


def forward(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `base.Backend.forward`."""

    def finish(state: softmax.State):
        out, lse = softmax.finish(*state)
        return out.astype(problem.dtype), lse

    out, lse = _online_softmax(problem, config, operands, finish)
    split = Split.of(problem, config, operands)
    out, lse = (split.restore(x).swapaxes(1, 2)[:, : problem.q_len] for x in (out, lse))
    return out, lse


def _online_softmax(problem: Problem, config: Config, operands: Operands, finish: Callable[[softmax.State], Any]):
    """`finish` of each row's state after all its tiles, in the layout, rows padded."""
    acc_dtype = problem.compute_dtype

    def one_slot(slot: Slot, visit, carry):
        def one_q_tile(_, i):
            q = slot.rows(slot.arrays.query, i)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)
                k, v = slot.keys(slot.arrays.key, j), _clean_keys(seen, slot.keys(slot.arrays.value, j))
                _, s, _ = _scores(slot, q, k, slot.bias(i, j), slot.scale(), seen)
                m, l, acc = state
                m, pivot, alpha = softmax.rescale(m, s.max(-1))
                p = softmax.probs(s, pivot)
                l = l * alpha + p.sum(-1)
                acc = acc * alpha[..., None] + _dot(problem, slot.drop(p, i, j), v, (4, 2))
                return softmax.State(m, l, acc)

            rows = q.shape[:-1]
            zero = softmax.State(
                jnp.full(rows, -jnp.inf, acc_dtype), jnp.zeros(rows, acc_dtype), jnp.zeros((*rows, problem.v_head_dim), acc_dtype)
            )
            return None, finish(visit(i, step, zero))

        return carry, lax.scan(one_q_tile, None, q_tiles(problem, config))[1]

    return jax.tree.map(rows_from_tiles, over_slots(problem, config, operands, one_slot, None)[1])


_LARGE = 2.0**13  # |lse| from which its last bit, 2^-11 and more, is no longer small against log(l)


def _row_weights(problem: Problem, config: Config, operands: Operands, lse_rows: Array) -> tuple[Array, Array | None]:
    """`(pivot, weight)` with probabilities `2^(s - pivot) * weight`, from lse in the layout.

    A finite bias of -1e9 on a whole row makes an lse that has lost log(l): then the rows' states are computed once more.
    """
    pivot = softmax.lse_pivot(lse_rows)
    if operands.bias is None:
        return pivot, None

    def from_states(_):
        m, l = _online_softmax(problem, config, operands, lambda state: (state.m, state.l))
        seen = l > 0
        return jnp.where(seen, m, jnp.inf), jnp.where(seen, 1 / jnp.where(seen, l, 1), 0)

    large = jnp.isfinite(lse_rows) & (jnp.abs(lse_rows) > _LARGE)
    return lax.cond(jnp.any(large), from_states, lambda pivot: (pivot, jnp.ones_like(pivot)), pivot)


def _rows_layout(split: Split, config: Config, x: Array, fill=0) -> Array:
    """`[batch, q_len, num_heads(, dim)]` -> the layout, padded."""
    return pad(split.arrange(x.swapaxes(1, 2)), 5, config.block_q, fill)


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    delta = -jnp.where(lse == -jnp.inf, 0, dlse)
    whole_rows = config.block_kv >= problem.kv_len  # then sum(out * dout) is sum(p * dp), without out's rounding
    if not whole_rows:
        delta += (out.astype(acc_dtype) * dout.astype(acc_dtype)).sum(-1)
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

            def step(j, masked, carry):
                seen = slot.seen(i, j, masked)
                q, dout = _clean_rows(seen, q_tile), _clean_rows(seen, dout_tile)
                k, v = (_clean_keys(seen, slot.keys(x, j)) for x in (a.key, a.value))
                qk, s, tanh = _scores(slot, q, k, slot.bias(i, j), slot.scale(), seen)
                p = _probs(slot, s, pivot_tile, weight, i)
                dp = slot.drop(_dot(problem, dout, v, (4, 3)), i, j)
                delta = delta_tile + (p * dp).sum(-1) if whole_rows else delta_tile
                dlogits = softmax.dlogits(p, dp, delta)
                ds = dscores(dlogits, tanh)
                new = dict(carry)
                if "scale" in carry:
                    new["scale"] = carry["scale"] + (ds * qk).sum((1, 2, 3, 4))
                ds = ds * slot.scale()
                if "query" in carry:
                    new["query"] = carry["query"] + _dot(problem, ds, k, (4, 2))
                if "key" in carry:
                    new["key"] = _add_keys(carry["key"], j, _dot_rows(problem, ds, q))
                if "value" in carry:
                    new["value"] = _add_keys(carry["value"], j, _dot_rows(problem, slot.drop(p, i, j), dout))
                if "bias" in carry:
                    new["bias"] = _add_bias(slot, carry["bias"], i, j, dlogits)
                return new

            if "query" in wanted:
                carry = carry | {"query": jnp.zeros(q_tile.shape, acc_dtype)}
            carry = visit(i, step, carry)
            dq = carry.pop("query").astype(problem.dtype) if "query" in wanted else None
            return carry, dq

        carry = {
            name: jnp.zeros(x.shape[:2] + x.shape[3:], acc_dtype) for name, x in (("key", a.key), ("value", a.value)) if name in wanted
        }
        if "scale" in wanted:
            carry["scale"] = jnp.zeros(split.batch_inner, acc_dtype)
        if dbias is not None:
            carry["bias"] = dbias
        carry, dq = lax.scan(one_q_tile, carry, q_tiles(problem, config))
        dbias = carry.pop("bias", None)
        return dbias, (dq, carry)

    def _add_keys(total, j, part):
        old = slice_tile(total, 2, j, config.block_kv)
        if total.shape[2] == 1:
            return total + part
        return lax.dynamic_update_slice_in_dim(total, old + part, j * config.block_kv, 2)

    def _add_bias(slot, total, i, j, dlogits):
        size = (1, 1, *(b if n > 1 else 1 for n, b in zip(total.shape[2:], dlogits.shape, strict=True)))
        start = [
            k if n > 1 else 0 for n, k in zip(total.shape, (*slot.index, 0, 0, 0, i * config.block_q, j * config.block_kv), strict=True)
        ]
        start = [jnp.int32(n) for n in start]
        shared = tuple(axis for axis, n in enumerate(size[2:]) if n == 1)
        part = dlogits.sum(shared, keepdims=True)[None, None]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + part, start)

    dbias, (dq, others) = over_slots(problem, config, operands, one_slot, dbias)
    gradients = {}
    if "query" in wanted:
        gradients["query"] = split.restore(rows_from_tiles(dq)).swapaxes(1, 2)[:, : problem.q_len]
    for name in ("key", "value"):
        if name in wanted:
            total = split.restore(others[name][:, :, :, :, None]).swapaxes(1, 2)[:, : problem.kv_len]
            gradients[name] = total.astype(problem.dtype)
    if "bias" in wanted:
        rows, columns = problem.bias_shape[2:]
        gradients["bias"] = split.restore(dbias)[:, :, :rows, :columns].astype(problem.bias_dtype)
    if "scale" in wanted:
        by_batch = others["scale"].sum(1).reshape(-1)
        gradients["scale"] = by_batch if operands.scale.shape[0] != 1 else by_batch.sum(keepdims=True)
    return gradients


def jvp(problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, tangents: dict[str, Array]) -> tuple[Array, Array]:
    """Tangents of `(out, lse)` from those of the operands named in `tangents`, in one pass over the tiles.

    With `p_j = exp(s_j - lse)` at the point, `d lse = sum_j dp_j` and `d out = sum_j d(p_j v_j) - out * d lse`, where `lse` is held fixed
    inside `dp`: so each tile's part is the derivative of a tile function, taken by JAX.
    """
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    pivot_rows, weight_rows = _row_weights(problem, config, operands, _rows_layout(split, config, lse, -jnp.inf))
    dotted = operands._replace(
        **{name: jnp.zeros_like(x) for name in ("query", "key", "value", "bias", "scale") if (x := getattr(operands, name)) is not None}
    )
    dotted = arrange(problem, config, dotted._replace(**tangents), split)

    def one_slot(slot: Slot, visit, carry):
        a, pivot, dot = slot.arrays, slot.take(pivot_rows), jax.tree.map(slot.take, dotted)
        weight = None if weight_rows is None else slot.take(weight_rows)
        scale = jnp.asarray(slot.scale(), acc_dtype)
        dscale = jnp.zeros_like(scale) if dot.scale is None else dot.scale

        def one_q_tile(_, i):
            pivot_tile = slot.row_numbers(pivot, i)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)

                def weights(q, k, v, bias, scale):
                    _, s, _ = _scores(slot, q, k, bias, scale, seen)
                    p = _probs(slot, s, pivot_tile, weight, i)
                    return p.sum(-1), _dot(problem, slot.drop(p, i, j), v, (4, 2))

                def read(a, scale):
                    bias = None if a.bias is None else slot.tile(a.bias, i, j).astype(acc_dtype)
                    rows = _clean_rows(seen, slot.rows(a.query, i))
                    keys = (_clean_keys(seen, slot.keys(x, j)) for x in (a.key, a.value))
                    return (rows, *keys, bias, scale)

                _, (dl, dacc) = jax.jvp(weights, read(a, scale), read(dot, dscale))
                return state[0] + dl, state[1] + dacc

            rows = pivot_tile.shape
            zero = jnp.zeros(rows, acc_dtype), jnp.zeros((*rows, problem.v_head_dim), acc_dtype)
            return None, visit(i, step, zero)

        return carry, lax.scan(one_q_tile, None, q_tiles(problem, config))[1]

    _, (dlse, dacc) = over_slots(problem, config, operands, one_slot, None)
    dlse, dacc = (split.restore(rows_from_tiles(x)).swapaxes(1, 2)[:, : problem.q_len] for x in (dlse, dacc))
    return (dacc - out.astype(acc_dtype) * dlse[..., None]).astype(problem.dtype), dlse
