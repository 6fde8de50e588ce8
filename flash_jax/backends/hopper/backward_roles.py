"""Fused backward for head_dim up to 256: as `backward_fused`, with the work split by role.

dk and dv of 256 columns fill the registers of one warpgroup each.
A block of threads owns 64 keys. For each query tile of 64:

    warpgroup 0:  S = K Q^T, P -> shared memory,                dV += P dO,  dQ = dS^T K, first half of the columns
    warpgroup 1:  dP = V dO^T, dS = P (dP - delta) -> shared,   dK += dS Q,  dQ = dS^T K, second half

Warpgroup 1 reads P, and dS is made from it, in the input dtype. One buffer each is enough: each side waits for the other's
before it writes its next. Warpgroup 0 starts the copies: dS of tile i says that warpgroup 1 is done with query tile i - 1 and
with dO of tile i.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper.backward_tile import WARPGROUPS, Inputs, ScoreTile, Walk, call, meet, opaque_zero, position, slot_of
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
        both_bar,
    ):
        b, kv_head, kv_tile = position(problem)
        keys = pl.ds(kv_tile * BLOCK_KV, BLOCK_KV)
        walk = Walk(problem, g, BLOCK_Q, b, kv_head, kv_tile)

        def load_query(i):
            walk.load(i, g.query, g.pivot, q_s, pivot_s, q_bar)

        def load_dout(i):
            walk.load(i, g.dout, g.delta, dout_s, delta_s, dout_bar)

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
            plgpu.wait_smem_to_gmem(0)

        def clean_keys(matrix):
            if g.unseen_tiles is not None:

                @pl.when(tile_math.has_unseen_keys())
                def _():
                    tile_math.keep_keys(matrix.at[0])
                    meet(both_bar)

        def clean_queries(i, matrix):
            head, tile = walk(i)

            @pl.when(tile_math.has_empty_rows(head, tile))
            def _():
                tile_math.keep_queries(matrix, pivot_s.at[slot_of(i, q_s)])
                meet(both_bar)

        scores = plgpu.ACC((WARPGROUP_ROWS, BLOCK_Q), jnp.float32)
        dq_chunk = plgpu.ACC((BLOCK_Q, _CHUNK), jnp.float32)
        tile_math = ScoreTile(problem, g, BLOCK_Q, b, kv_tile, kv_tile * BLOCK_KV)

        @pl.when(lax.axis_index("wg") == 0)
        def _probabilities():
            plgpu.copy_gmem_to_smem(g.key.at[b, keys, kv_head], k_s.at[0], k_bar)
            pl.when(walk.steps > 0)(lambda: load_query(0))
            plgpu.copy_gmem_to_smem(g.value.at[b, keys, kv_head], v_s.at[0], v_bar)
            pl.when(walk.steps > 0)(lambda: load_dout(0))
            pl.when(walk.steps > 1)(lambda: load_query(1))

            adds = Adds(walk, walk.turns, done_g, wg=0)

            def run(dv_acc):
                plgpu.barrier_wait(k_bar)
                clean_keys(k_s)

                def step(i, partial: bool):
                    slot = slot_of(i, q_s)
                    head, tile = walk(i)
                    bias, drop = tile_math.bias(head, tile), tile_math.dropout(head, tile)
                    plgpu.barrier_wait(q_bar.at[slot])
                    clean = partial and g.empty_tiles is not None
                    if clean:
                        clean_queries(i, q_s.at[slot])

                    def probabilities(s_acc):
                        plgpu.wgmma(s_acc, k_s.at[zero(i)], q_s.at[slot].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                        p, weight = tile_math.weights(s, pivot_s.at[slot], head, tile, partial, bias)
                        return drop(p).astype(dtype), weight.astype(dtype)

                    p16, weight16 = pl.run_scoped(probabilities, scores)
                    p_s[...] = weight16
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_bar)
                    plgpu.barrier_wait(dout_bar)
                    plgpu.wgmma(dv_acc, p16, dout_s.at[0])
                    plgpu.barrier_wait(ds_bar)
                    pl.when((i > 0) & (i + 1 < walk.steps))(lambda: load_query(i + 1))
                    seen = adds.pass_on(i)
                    for chunk in range(_HALF // _CHUNK):

                        def query_gradient(dq_acc, chunk=chunk):
                            plgpu.wgmma(dq_acc, ds_s.transpose((1, 0)), k_s.at[zero(i), :, columns(0, chunk)])
                            if chunk == 0:
                                plgpu.wgmma_wait(1)
                                pl.when(i + 1 < walk.steps)(lambda: load_dout(i + 1))
                            add_dq(adds, seen, i, chunk, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0))

                        pl.run_scoped(query_gradient, dq_chunk)

                walk.for_each(step)
                return plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)

            dv = pl.run_scoped(run, plgpu.ACC((WARPGROUP_ROWS, HEAD_DIM), jnp.float32))
            adds.end()
            meet(both_bar)
            store(dv, v_s.at[0], dv_g)

        @pl.when(lax.axis_index("wg") == 1)
        def _scores_gradient():
            adds = Adds(walk, walk.turns, done_g, wg=1)

            def run(dk_acc):
                plgpu.barrier_wait(v_bar)
                plgpu.barrier_wait(k_bar)
                clean_keys(v_s)

                def step(i, partial: bool):
                    slot = slot_of(i, q_s)
                    head, tile = walk(i)
                    drop = tile_math.dropout(head, tile)
                    plgpu.barrier_wait(dout_bar)
                    clean = partial and g.empty_tiles is not None
                    if clean:
                        plgpu.barrier_wait(q_bar.at[slot])
                        clean_queries(i, dout_s.at[0])

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
                    if not clean:
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

                walk.for_each(step, masks=g.empty_tiles is not None)  # else one code for all tiles: P is 0 where nothing is visible
                return plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)

            dk = pl.run_scoped(run, plgpu.ACC((WARPGROUP_ROWS, HEAD_DIM), jnp.float32))
            adds.end()
            meet(both_bar)
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
        "q_bar": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "dout_bar": plgpu.Barrier(num_arrivals=2),
        "p_bar": plgpu.Barrier(),
        "ds_bar": plgpu.Barrier(),
        "both_bar": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    return call(body, problem, inputs, BLOCK_KV, scratch, dq, done)
