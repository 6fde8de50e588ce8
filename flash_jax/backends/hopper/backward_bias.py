"""Gradient of the bias in its own shape: cotangents of the logits, summed over the axes that the bias shares, in a fixed order.

A second pass with two of the backward's products. A block of threads owns a cell of the gradient, 128 keys as rows, 64 for each of its
two warpgroups, and walks what is added up in it:

    S = K Q^T    P = exp2(logits(S) - lse)    dP = V dO^T    sum += P (dP - delta)      [64, block_q] in registers, float32

It runs at the speed of the second-level cache, whence all four tiles come in each step: tiles are copied anew as soon as their product
is there, and the two products come one after the other, which spares registers. The cell's own bias is copied once. A bias that is
the same for all queries is summed over q tiles here and over batch and heads afterwards: `[batch, num_heads, kv_len]` in float32.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import pipeline
from flash_jax.backends.hopper.backward_tile import (
    KEYS,
    WARPGROUPS,
    BiasTile,
    Inputs,
    ScoreTile,
    bias_scratch,
    is_copied,
    opaque_zero,
    store,
)
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, WGMMA, shared, swizzled
from flash_jax.problem import Problem
from flash_jax.schedule import EMPTY, num_tiles

BLOCK_KV = WARPGROUP_ROWS * WARPGROUPS
BLOCK_Q = {64: 128, 128: 128, 256: 64}  # by head_dim


def cells(problem: Problem, inputs: Inputs, kinds) -> jax.Array:
    """Sums of the cotangents of the logits, `[1 | batch, 1 | num_heads, kv_pad, 1 | q_pad]`; `[.., .., q_pad, kv_pad]` of a copied bias.

    Axes that the bias shares are summed over, but batch and heads are not where the bias is the same for all queries.
    kinds: int32 `[1 | batch, 1 | num_heads, num_kv_tiles, num_q_tiles]` of `schedule`, or None where all tiles are visible.
    """
    head_dim, dtype = inputs.query.shape[-1], inputs.query.dtype
    rows = BLOCK_Q[head_dim]
    q_pad, num_kv_tiles = inputs.pivot.shape[2], num_tiles(problem.kv_len, BLOCK_KV)
    by_query = problem.bias_shape[2] != 1
    whole = (problem.batch, problem.num_heads, q_pad // rows)
    own = (*problem.bias_shape[:2], whole[2]) if by_query else (*whole[:2], 1)  # cells, without those of other keys
    steps = tuple(n // m for n, m in zip(whole, own, strict=True))
    num_steps = steps[0] * steps[1] * steps[2]
    out_dtype = problem.bias_dtype if by_query and problem.bias_dtype.itemsize == 2 else jnp.float32
    by_key = (num_kv_tiles * BLOCK_KV, q_pad if by_query else 1)
    leaves, tree = jax.tree.flatten((inputs, kinds))

    def body(*refs, k_s, q_s, pivot_s, v_s, dout_s, delta_s, scores_bar, dp_bar, scores_free_bar, dp_free_bar, bias_s=None, bias_bar=None):
        *input_refs, out_g = refs
        g, kinds_g = jax.tree.unflatten(tree, input_refs)
        block = lax.axis_index("block")
        kv_tile, cell = lax.rem(block, num_kv_tiles), _split(lax.div(block, num_kv_tiles), own)
        keys = pl.ds(kv_tile * BLOCK_KV, BLOCK_KV)
        wg = lax.axis_index("wg")
        mine = pl.ds(wg * WARPGROUP_ROWS, WARPGROUP_ROWS)
        key_start = kv_tile * BLOCK_KV + wg * WARPGROUP_ROWS
        my_keys = pl.ds(key_start, WARPGROUP_ROWS)

        own_bias = None if bias_s is None else BiasTile(bias_s.at[wg], bias_bar.at[wg], key_start, cell[0])

        def at(step):
            """Batch entry, query head, q tile."""
            return tuple(first * n + rest for first, n, rest in zip(cell, steps, _split(step, steps), strict=True))

        def visible(step):
            b, head, tile = at(step)
            return kinds_g[shared(kinds_g, 0, b), shared(kinds_g, 1, head), kv_tile, tile] != EMPTY

        def next_visible(step):
            if kinds_g is None:
                return step
            return lax.while_loop(
                lambda n: (n < num_steps) & jnp.logical_not(visible(jnp.minimum(n, num_steps - 1))), lambda n: n + 1, step
            )

        def load(step, keys_g, queries_g, numbers_g, keys_s, queries_s, numbers_s, barrier):
            b, head, tile = at(step)
            queries = pl.ds(tile * rows, rows)
            plgpu.copy_gmem_to_smem(keys_g.at[b, keys, lax.div(head, problem.group)], keys_s.at[0], barrier)
            plgpu.copy_gmem_to_smem(queries_g.at[b, queries, head], queries_s.at[0], barrier)
            plgpu.copy_gmem_to_smem(numbers_g.at[b, head, queries], numbers_s, barrier)

        def load_for_scores(step):
            load(step, g.key, g.query, g.pivot, k_s, q_s, pivot_s, scores_bar)

        def load_for_dp(step):
            load(step, g.value, g.dout, g.delta, v_s, dout_s, delta_s, dp_bar)

        def reload(start, free_bar, step):
            """Start a copy to where both warpgroups are done."""
            plgpu.commit_smem()
            plgpu.barrier_arrive(free_bar)

            @pipeline.when(wg == 0)
            def _():
                plgpu.barrier_wait(free_bar)
                pipeline.when(step < num_steps)(lambda: start(step))

        def one(carry):
            step, total = carry
            b, head, tile = at(step)
            following = next_visible(step + 1)
            tile_math = ScoreTile(problem, g, rows, b, kv_tile, key_start)
            zero = opaque_zero(step + kv_tile)

            plgpu.barrier_wait(scores_bar)
            s = pipeline.finish_product(pipeline.start_product(k_s.at[zero, mine], q_s.at[zero]), 0)
            bias = tile_math.bias(head, tile) if own_bias is None else own_bias.read()
            p, _ = tile_math.weights(s, pivot_s, tile_math.labels(tile), head, tile, kinds_g is not None, bias)
            if problem.q_len % rows:
                # Past the end q is 0 and the pivot inf, so p is 0, but NaN where a key is not finite, for 0 times it is NaN.
                hide_past_end = lambda p: jnp.where(tile_math.queries(pivot_s) == jnp.inf, 0.0, p)
                p = pipeline.cond(tile == whole[2] - 1, hide_past_end, lambda p: p, p)
            reload(load_for_scores, scores_free_bar, following)
            plgpu.barrier_wait(dp_bar)
            dp = pipeline.finish_product(pipeline.start_product(v_s.at[zero, mine], dout_s.at[zero]), 0)
            dlogits = tile_math.dscores(p, tile_math.dropout(head, tile)(dp), delta_s)
            reload(load_for_dp, dp_free_bar, following)
            return following, total + jnp.where(p == 0, 0.0, dlogits)  # what no query sees may be infinite or NaN

        first = next_visible(jnp.int32(0))
        b, head, tile = cell

        @pipeline.when((wg == 0) & (first < num_steps))
        def _():
            load_for_scores(first)
            load_for_dp(first)

        if own_bias is not None:
            own_bias.start_load(g.bias, head, tile)
            plgpu.barrier_wait(own_bias.barrier)
        nothing = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, rows), jnp.float32), WGMMA)
        _, total = lax.while_loop(lambda carry: carry[0] < num_steps, one, (first, nothing))
        if own_bias is not None:
            own_bias.store(total, out_g, head, tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        elif by_query:
            store(out_g.at[b, head, my_keys, pl.ds(tile * rows, rows)], total.astype(out_dtype))
        else:
            store(out_g.at[b, head, my_keys, 0], plgpu.layout_cast(total.sum(axis=1), KEYS))

    matrices = {"k_s": BLOCK_KV, "q_s": rows, "v_s": BLOCK_KV, "dout_s": rows}
    scratch = {name: swizzled((1, length, head_dim), dtype) for name, length in matrices.items()}
    scratch |= {name: plgpu.SMEM((rows,), jnp.float32) for name in ("pivot_s", "delta_s")}
    scratch |= {name: plgpu.Barrier(num_arrivals=3) for name in ("scores_bar", "dp_bar")}
    scratch |= {name: plgpu.Barrier(num_arrivals=WARPGROUPS) for name in ("scores_free_bar", "dp_free_bar")}
    scratch |= bias_scratch(inputs.bias, rows, WARPGROUPS)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*own[:2], *(by_key[::-1] if is_copied(inputs.bias) else by_key)), out_dtype),
        grid=(own[0] * own[1] * own[2] * num_kv_tiles,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name=f"flash_attention_dbias_d{head_dim}",
    )
    return kernel(*leaves)


def _split(n, sizes: tuple[int, int, int]):
    """A running number as three indices, the last one fastest."""
    rest = lax.div(n, jnp.int32(sizes[2]))
    return lax.div(rest, jnp.int32(sizes[1])), lax.rem(rest, jnp.int32(sizes[1])), lax.rem(n, jnp.int32(sizes[2]))
