"""Fused backward for head_dim up to 128: the scores are computed once, five matrix products in all.

A block of threads owns 128 keys, 64 for each of its two warpgroups, and walks the query tiles that see them, for every query head
of its group:

    S = K Q^T            P = exp2(logits(S) - lse)        [64, block_q] in registers, keys are rows
    dP = V dO^T          dS = P (dP - delta)
    dV += P dO           dK += dS Q                       [64, head_dim] in registers, float32
    dQ = dS^T K          added to a float32 buffer in global memory by the copy engine

P and dS are register operands of dV and dK; only dS goes through shared memory, transposed there, and the two warpgroups meet. Each
warpgroup adds its own half of dQ. There is no producer: the first warpgroup starts the copies of tile i + 1 once both are done with
tile i - 1. Both run one code.
Source: FlashAttention-3 (arXiv 2407.08608), section 3, for the order of the products.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import pipeline
from flash_jax.backends.hopper.backward_tile import (
    WARPGROUPS,
    BiasTile,
    Inputs,
    ScoreTile,
    Walk,
    bias_scratch,
    call,
    is_copied,
    labels_scratch,
    opaque_zero,
    position,
    slot_of,
)
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, swizzled
from flash_jax.backends.hopper.turns import Adds
from flash_jax.problem import Problem

BLOCK_KV = WARPGROUP_ROWS * WARPGROUPS
STAGES = 2
BLOCK_Q = {64: 128, 128: 64}  # by head_dim: dQ [block_q, head_dim] is halved by rows at 64, by columns at 128


def dq_dk_dv(problem: Problem, inputs: Inputs, dq, done) -> tuple[jax.Array, jax.Array]:
    """Adds `dS K` to the reference `dq`, float32 `[batch, q_len, num_heads, head_dim]`; returns `(dS^T Q, dv)`.

    `dk` still lacks the scale. head_dim of the inputs is 64 or 128. done: see `turns.Adds`, with a leading axis of batch.
    """
    head_dim, dtype = inputs.query.shape[-1], inputs.query.dtype
    block_q, half_rows = BLOCK_Q[head_dim], head_dim == 64

    def body(
        g,
        dq_g,
        done_g,
        dk_g,
        dv_g,
        *,
        k_s,
        v_s,
        q_s,
        dout_s,
        pivot_s,
        delta_s,
        ds_s,
        dq_s,
        k_bar,
        v_bar,
        q_bar,
        dout_bar,
        both_bar,
        labels_s=None,
        bias_s=None,
        bias_bar=None,
    ):
        b, kv_head, kv_tile = position(problem)
        kv_start = kv_tile * BLOCK_KV
        wg = lax.axis_index("wg")

        def load_keys():
            keys = pl.ds(kv_start, BLOCK_KV)
            plgpu.copy_gmem_to_smem(g.key.at[b, keys, kv_head], k_s.at[0], k_bar)
            plgpu.copy_gmem_to_smem(g.value.at[b, keys, kv_head], v_s.at[0], v_bar)

        pipeline.when(wg == 0)(load_keys)  # before the walk is looked up
        walk = Walk(problem, g, block_q, b, kv_head, kv_tile, masked_first=not problem.deterministic_backward)
        mine = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)  # rows of K and V, columns of dS; columns or rows of dQ
        tile_math = ScoreTile(problem, g, block_q, b, kv_tile, kv_start + wg * WARPGROUP_ROWS)
        adds = Adds(walk, walk.turns, done_g, wg)

        def load(i):
            labels = () if labels_s is None else ((g.q_labels, labels_s),)
            walk.load(i, q_bar, g.query, q_s, ((g.pivot, pivot_s), *labels))
            walk.load(i, dout_bar, g.dout, dout_s, ((g.delta, delta_s),))

        copied_bias = None if bias_s is None else BiasTile(bias_s.at[wg], bias_bar.at[wg], kv_start + wg * WARPGROUP_ROWS, b)

        def load_bias(i):
            if copied_bias is not None:
                pipeline.when(i < walk.steps)(lambda: copied_bias.start_load(g.bias, *walk(i)))

        def zero(i):
            return opaque_zero(i + kv_tile)

        def step(dk_acc, dv_acc, i, partial: bool):
            slot = slot_of(i, q_s)
            head, tile = walk(i)
            bias = tile_math.bias(head, tile) if copied_bias is None else None
            drop = tile_math.dropout(head, tile)
            plgpu.barrier_wait(q_bar.at[slot])
            clean = partial and g.empty_tiles is not None
            if clean:
                plgpu.barrier_wait(dout_bar.at[slot])

                @pipeline.when(tile_math.has_empty_rows(head, tile))
                def _():
                    for n, matrix in enumerate((q_s, dout_s)):
                        pipeline.when(wg == n)(lambda matrix=matrix: tile_math.keep_queries(matrix.at[slot], pivot_s.at[slot]))
                    pipeline.meet(both_bar)

            s = pipeline.start_product(k_s.at[zero(i), mine], q_s.at[slot])
            if not clean:
                plgpu.barrier_wait(dout_bar.at[slot])
            dp = pipeline.start_product(v_s.at[zero(i), mine], dout_s.at[slot])
            s = pipeline.finish_product(s, 1)
            bias = bias if copied_bias is None else copied_bias.await_load()
            labels = tile_math.labels(tile) if labels_s is None else labels_s.at[slot]
            p, weight = tile_math.weights(s, pivot_s.at[slot], labels, head, tile, partial, bias)
            p16 = drop(p).astype(dtype)
            dp = drop(pipeline.finish_product(dp, 0))
            ds16 = tile_math.dscores(weight, dp, delta_s.at[slot]).astype(dtype)
            # dS is stored before dV starts, and dV before the wait for the other warpgroup, which it fills; docs/dev/experiments.md.
            ds_s.at[slot, :, mine].transpose((1, 0))[...] = ds16
            plgpu.wgmma(dv_acc, p16, dout_s.at[slot])
            pipeline.meet(both_bar)
            pipeline.when((wg == 0) & (i > 0) & (i + 1 < walk.steps))(lambda: load(i + 1))
            load_bias(i + 1)
            seen = adds.pass_on(i)

            def query_gradient(dq_acc):
                if half_rows:
                    plgpu.wgmma(dq_acc, ds_s.at[slot, mine], k_s.at[zero(i)])
                    out = dq_g.at[b, pl.ds(tile * block_q + wg * WARPGROUP_ROWS, WARPGROUP_ROWS), head]
                else:
                    plgpu.wgmma(dq_acc, ds_s.at[slot], k_s.at[zero(i), :, mine])
                    out = dq_g.at[b, pl.ds(tile * block_q, block_q), head, mine]
                plgpu.wgmma(dk_acc, ds16, q_s.at[slot])
                dq_half = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_s[wg] = dq_half
                plgpu.commit_smem()
                adds.await_turn(i, seen)
                plgpu.copy_smem_to_gmem(dq_s.at[wg], out, reduction_op="add")

            pl.run_scoped(query_gradient, plgpu.ACC((WARPGROUP_ROWS, 64), jnp.float32))
            plgpu.wgmma_wait(0)

        def run(dk_acc, dv_acc):
            plgpu.barrier_wait(k_bar)
            plgpu.barrier_wait(v_bar)
            if g.unseen_tiles is not None:

                @pipeline.when(tile_math.has_unseen_keys(walk))
                def _():
                    tile_math.keep_keys(walk, k_s.at[0, mine], v_s.at[0, mine])
                    pipeline.meet(both_bar)

            walk.for_each(functools.partial(step, dk_acc, dv_acc))
            return plgpu.wgmma_accumulator_load(dk_acc, wait_n=0), plgpu.wgmma_accumulator_load(dv_acc, wait_n=None)

        for i in range(STAGES):
            pipeline.when((wg == 0) & (walk.steps > i))(functools.partial(load, i))
        load_bias(0)
        accumulator = plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32)
        dk, dv = pl.run_scoped(run, accumulator, accumulator)
        adds.end()
        rows = pl.ds(kv_start + wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        v_s[0, mine] = dv.astype(dtype)  # only this warpgroup reads these rows of V
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(v_s.at[0, mine], dv_g.at[b, rows, kv_head])
        pipeline.meet(both_bar)  # both read all of K for dQ
        k_s[0, mine] = (dk * tile_math.scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s.at[0, mine], dk_g.at[b, rows, kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Beside 128 rows of a bias that is copied, shared memory has no room for labels.
    copies_labels = inputs.q_labels is not None and not (head_dim == 64 and is_copied(inputs.bias))
    per_query = plgpu.SMEM((STAGES, block_q), jnp.float32)
    scratch = {
        "k_s": swizzled((1, BLOCK_KV, head_dim), dtype),
        "v_s": swizzled((1, BLOCK_KV, head_dim), dtype),
        "q_s": swizzled((STAGES, block_q, head_dim), dtype),
        "dout_s": swizzled((STAGES, block_q, head_dim), dtype),
        "pivot_s": per_query,
        "delta_s": per_query,
        "ds_s": swizzled((STAGES, block_q, BLOCK_KV), dtype),
        "dq_s": swizzled((WARPGROUPS, WARPGROUP_ROWS, 64), jnp.float32),
        "k_bar": plgpu.Barrier(),
        "v_bar": plgpu.Barrier(),
        "q_bar": plgpu.Barrier(num_arrivals=2 + copies_labels, num_barriers=STAGES),
        "dout_bar": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "both_bar": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    scratch |= bias_scratch(inputs.bias, block_q, WARPGROUPS)
    if copies_labels:
        scratch |= labels_scratch(inputs, STAGES, block_q)
    return call(body, problem, inputs, BLOCK_KV, scratch, dq, done)
