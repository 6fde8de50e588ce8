"""Fused backward for head_dim up to 256: as `backward_fused`, with the work split by role.

dk and dv of 256 columns fill the registers of one warpgroup each.
A block of threads owns 64 keys. For each query tile of 64:

    warpgroup 0:  S = K Q^T, P -> shared memory,                dV += P dO,  dQ = dS^T K, first half of the columns
    warpgroup 1:  dP = V dO^T, dS = P (dP - delta) -> shared,   dK += dS Q,  dQ = dS^T K, second half

Warpgroup 1 reads P, and dS is made from it, in the input dtype. One buffer each is enough: each side waits for the other's
before it writes its next. Warpgroup 0 starts S of tile i + 1 before it is done with dQ of tile i, so that P is there when warpgroup 1 comes
to ask for it. It also starts the copies: warpgroup 1 says when it is done with query tile i - 1, and by dS of tile i that it is
with dO of tile i.
"""

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
    labels_scratch,
    opaque_zero,
    position,
    slot_of,
)
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, WGMMA, swizzled
from flash_jax.backends.hopper.turns import Adds
from flash_jax.problem import Problem

BLOCK_KV = WARPGROUP_ROWS
BLOCK_Q = 64
HEAD_DIM = 256
STAGES = 2  # of the query tile; dO has one
_CHUNK = 64  # columns of dQ that are in registers at once
_HALF = HEAD_DIM // 2


def dq_dk_dv(problem: Problem, inputs: Inputs, dq, done) -> tuple[jax.Array, jax.Array]:
    """As `backward_fused.dq_dk_dv`, with inputs of head_dim 256."""
    dtype = inputs.query.dtype

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
        p_s,
        ds_s,
        dq_s,
        k_bar,
        v_bar,
        q_bar,
        dout_bar,
        p_bar,
        ds_bar,
        q_free_bar,
        both_bar,
        labels_s=None,
        bias_s=None,
        bias_bar=None,
    ):
        b, kv_head, kv_tile = position(problem)
        keys = pl.ds(kv_tile * BLOCK_KV, BLOCK_KV)
        walk = Walk(problem, g, BLOCK_Q, b, kv_head, kv_tile)

        def load_query(i):
            labels = () if labels_s is None else ((g.q_labels, labels_s),)
            walk.load(i, q_bar, g.query, q_s, ((g.pivot, pivot_s), *labels))

        def load_dout(i):
            walk.load(i, dout_bar, g.dout, dout_s, ((g.delta, delta_s),))

        def zero(i):
            return opaque_zero(i + kv_tile)

        def add_dq(adds, seen, i, chunk: int, dq_chunk):
            head, tile = walk(i)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            dq_s[adds.wg] = dq_chunk
            plgpu.commit_smem()
            if chunk == 0:
                adds.await_turn(i, seen)
            out = dq_g.at[b, pl.ds(tile * BLOCK_Q, BLOCK_Q), head, columns(adds.wg, chunk)]
            plgpu.copy_smem_to_gmem(dq_s.at[adds.wg], out, reduction_op="add")

        def columns(wg: int, chunk: int):
            return pl.ds(wg * _HALF + chunk * _CHUNK, _CHUNK)

        def store(gradient, staging, out):
            staging[...] = gradient.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out.at[b, keys, kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def clean_keys(matrix):
            if g.unseen_tiles is not None:

                @pipeline.when(tile_math.has_unseen_keys(walk))
                def _():
                    tile_math.keep_keys(walk, matrix.at[0])
                    pipeline.meet(both_bar)

        def clean_queries(i, matrix):
            @pipeline.when(tile_math.has_empty_rows(*walk(i)))
            def _():
                tile_math.keep_queries(matrix, pivot_s.at[slot_of(i, q_s)])
                plgpu.commit_smem()

        def meet_where_cleaned(i):
            """Each warpgroup cleans what its first product of the step reads; the other reads it too, later."""
            if g.empty_tiles is not None:
                pipeline.when(tile_math.has_empty_rows(*walk(i)))(lambda: pipeline.meet(both_bar))

        dq_chunk = plgpu.ACC((BLOCK_Q, _CHUNK), jnp.float32)
        tile_math = ScoreTile(problem, g, BLOCK_Q, b, kv_tile, kv_tile * BLOCK_KV)

        @pipeline.when(lax.axis_index("wg") == 0)
        def _probabilities():
            plgpu.copy_gmem_to_smem(g.key.at[b, keys, kv_head], k_s.at[0], k_bar)
            pipeline.when(walk.steps > 0)(lambda: load_query(0))
            plgpu.copy_gmem_to_smem(g.value.at[b, keys, kv_head], v_s.at[0], v_bar)
            pipeline.when(walk.steps > 0)(lambda: load_dout(0))
            pipeline.when(walk.steps > 1)(lambda: load_query(1))

            adds = Adds(walk, walk.turns, done_g, wg=0)

            copied_bias = None if bias_s is None else BiasTile(bias_s.at[0], bias_bar.at[0], kv_tile * BLOCK_KV, b)

            def load_bias(i):
                if copied_bias is not None:
                    pipeline.when(i < walk.steps)(lambda: copied_bias.start_load(g.bias, *walk(i)))

            def start_scores(i):
                """Call once Q of step i is there."""
                return pipeline.start_product(k_s.at[zero(i)], q_s.at[slot_of(i, q_s)])

            def await_query(i):
                plgpu.barrier_wait(q_bar.at[slot_of(i, q_s)])
                if g.empty_tiles is not None:
                    clean_queries(i, q_s.at[slot_of(i, q_s)])

            def run(dv_acc):
                plgpu.barrier_wait(k_bar)
                clean_keys(k_s)

                def step(i, s):
                    slot = slot_of(i, q_s)
                    head, tile = walk(i)
                    bias = tile_math.bias(head, tile) if copied_bias is None else copied_bias.await_load()
                    drop = tile_math.dropout(head, tile)
                    partial = walk.full_end is not None and jnp.logical_not(walk.is_full(i))
                    p, weight = tile_math.weights(
                        s, pivot_s.at[slot], None if labels_s is None else labels_s.at[slot], head, tile, partial, bias
                    )
                    p16 = drop(p).astype(dtype)
                    p_s[...] = weight.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_bar)
                    load_bias(i + 1)

                    @pipeline.when((i > 0) & (i + 1 < walk.steps))
                    def _():
                        plgpu.barrier_wait(q_free_bar)
                        load_query(i + 1)

                    plgpu.barrier_wait(dout_bar)
                    meet_where_cleaned(i)
                    plgpu.wgmma(dv_acc, p16, dout_s.at[0])
                    plgpu.barrier_wait(ds_bar)
                    seen = adds.pass_on(i)

                    def first_chunk(dq_acc):
                        plgpu.wgmma(dq_acc, ds_s.transpose((1, 0)), k_s.at[zero(i), :, columns(0, 0)])
                        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                        pipeline.when(i + 1 < walk.steps)(lambda: load_dout(i + 1))
                        add_dq(adds, seen, i, 0, dq)

                    def second_chunk(dq_acc):
                        plgpu.wgmma(dq_acc, ds_s.transpose((1, 0)), k_s.at[zero(i), :, columns(0, 1)])
                        pipeline.when(i + 1 < walk.steps)(lambda: await_query(i + 1))
                        s = start_scores(i + 1)  # after the last step of whatever is there
                        add_dq(adds, seen, i, 1, plgpu.wgmma_accumulator_load(dq_acc, wait_n=1))
                        return s

                    pl.run_scoped(first_chunk, dq_chunk)
                    return pipeline.finish_product(pl.run_scoped(second_chunk, dq_chunk), 0)

                load_bias(0)
                pipeline.when(walk.steps > 0)(lambda: await_query(0))
                lax.fori_loop(0, walk.steps, step, pipeline.finish_product(start_scores(0), 0))
                return plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)

            dv = pl.run_scoped(run, plgpu.ACC((WARPGROUP_ROWS, HEAD_DIM), jnp.float32))
            adds.end()
            pipeline.meet(both_bar)
            store(dv, v_s.at[0], dv_g)

        @pipeline.when(lax.axis_index("wg") == 1)
        def _scores_gradient():
            scores = plgpu.ACC((WARPGROUP_ROWS, BLOCK_Q), jnp.float32)
            adds = Adds(walk, walk.turns, done_g, wg=1)

            def run(dk_acc):
                plgpu.barrier_wait(v_bar)
                plgpu.barrier_wait(k_bar)
                clean_keys(v_s)

                def step(i, _):
                    slot = slot_of(i, q_s)
                    head, tile = walk(i)
                    drop = tile_math.dropout(head, tile)
                    plgpu.barrier_wait(dout_bar)
                    if g.empty_tiles is not None:
                        plgpu.barrier_wait(q_bar.at[slot])
                        clean_queries(i, dout_s.at[0])
                        meet_where_cleaned(i)

                    def scores_gradient(dp_acc):
                        plgpu.wgmma(dp_acc, v_s.at[zero(i)], dout_s.at[0].transpose((1, 0)))
                        plgpu.barrier_wait(p_bar)
                        weight = plgpu.load(p_s, layout=WGMMA).astype(jnp.float32)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        return tile_math.dscores(weight, drop(dp), delta_s.at[0]).astype(dtype)

                    ds16 = pl.run_scoped(scores_gradient, scores)
                    ds_s[...] = ds16
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_bar)
                    if g.empty_tiles is None:
                        plgpu.barrier_wait(q_bar.at[slot])
                    plgpu.barrier_wait(ds_bar)
                    seen = adds.pass_on(i)
                    for chunk in range(_HALF // _CHUNK):

                        def query_gradient(dq_acc, chunk=chunk):
                            plgpu.wgmma(dq_acc, ds_s.transpose((1, 0)), k_s.at[zero(i), :, columns(1, chunk)])
                            if chunk == 0:
                                plgpu.wgmma(dk_acc, ds16, q_s.at[slot])
                            add_dq(adds, seen, i, chunk, plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if chunk == 0 else 0))

                        pl.run_scoped(query_gradient, dq_chunk)
                    plgpu.wgmma_wait(0)
                    pipeline.when(i + 2 < walk.steps)(lambda: plgpu.barrier_arrive(q_free_bar))

                lax.fori_loop(0, walk.steps, step, None)  # one code for all tiles: P is 0 where nothing is visible
                return plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)

            dk = pl.run_scoped(run, plgpu.ACC((WARPGROUP_ROWS, HEAD_DIM), jnp.float32))
            adds.end()
            pipeline.meet(both_bar)
            store(dk * tile_math.scale, k_s.at[0], dk_g)

    scratch = {
        "k_s": swizzled((1, BLOCK_KV, HEAD_DIM), dtype),
        "v_s": swizzled((1, BLOCK_KV, HEAD_DIM), dtype),
        "q_s": swizzled((STAGES, BLOCK_Q, HEAD_DIM), dtype),
        "dout_s": swizzled((1, BLOCK_Q, HEAD_DIM), dtype),
        "pivot_s": plgpu.SMEM((STAGES, BLOCK_Q), jnp.float32),
        "delta_s": plgpu.SMEM((1, BLOCK_Q), jnp.float32),
        "p_s": swizzled((BLOCK_KV, BLOCK_Q), dtype),
        "ds_s": swizzled((BLOCK_KV, BLOCK_Q), dtype),
        "dq_s": swizzled((WARPGROUPS, BLOCK_Q, _CHUNK), jnp.float32),
        "k_bar": plgpu.Barrier(),
        "v_bar": plgpu.Barrier(),
        "q_bar": plgpu.Barrier(num_arrivals=2 + (inputs.q_labels is not None), num_barriers=STAGES),
        "dout_bar": plgpu.Barrier(num_arrivals=2),
        "p_bar": plgpu.Barrier(),
        "ds_bar": plgpu.Barrier(),
        "q_free_bar": plgpu.Barrier(),
        "both_bar": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    scratch |= labels_scratch(inputs, STAGES, BLOCK_Q) | bias_scratch(inputs.bias, BLOCK_Q, 1)
    return call(body, problem, inputs, BLOCK_KV, scratch, dq, done)
