"""The states of all rows, by a second pass over the keys, if an lse has lost log(l): a finite bias of -1e9 on a whole row makes one.

A block of threads, one warpgroup, has a tile of query rows. Nearly always nothing is lost, and all blocks end at once: with a
conditional of XLA the host would wait for the card.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import softmax
from flash_jax.backends.hopper import pipeline
from flash_jax.backends.hopper.backward_tile import QUERIES, BiasTile, Inputs, ScoreTile, bias_scratch, store
from flash_jax.backends.hopper.host import pad
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, swizzled
from flash_jax.problem import Problem
from flash_jax.schedule import num_tiles


def pivot_and_log2_l(problem: Problem, inputs: Inputs, block_q: int, block_kv: int) -> tuple[jax.Array, jax.Array]:
    """`Inputs.pivot` and `Inputs.log2_l` from inputs of tiles block_q x block_kv; where nothing is lost the same pivot, and no log2_l.

    Only what logits and the mask depend on is read. The pivots' q_pad may be that of larger tiles.
    """
    head_dim, dtype = inputs.query.shape[-1], inputs.query.dtype
    batch, num_heads, q_pad = inputs.pivot.shape
    num_q_tiles = num_tiles(problem.q_len, block_q)
    pivot = jax.new_ref(inputs.pivot)
    unused = ("value", "dout", "pivot", "delta", "row_keys", "ranges", "lists", "seen", "unseen_tiles", "empty_tiles")
    leaves, tree = jax.tree.flatten((inputs._replace(**dict.fromkeys(unused)), pivot))

    def body(*refs, q_s, k_s, q_bar, k_bar, bias_s=None, bias_bar=None):
        *refs, log2_l_g = refs
        g, pivot_g = jax.tree.unflatten(tree, refs)
        block, tile = lax.div(lax.axis_index("block"), num_q_tiles), lax.rem(lax.axis_index("block"), num_q_tiles)
        b, head = lax.div(block, num_heads), lax.rem(block, num_heads)
        rows = pl.ds(tile * block_q, block_q)

        def step(i, state):
            start = i * WARPGROUP_ROWS
            tile_math = ScoreTile(problem, g, block_q, b, lax.div(start, block_kv), start)
            plgpu.copy_gmem_to_smem(g.key.at[b, pl.ds(start, WARPGROUP_ROWS), lax.div(head, problem.group)], k_s.at[0], k_bar)
            copied_bias = None if bias_s is None else BiasTile(bias_s.at[0], bias_bar.at[0], start, b)
            if copied_bias is not None:
                copied_bias.start_load(g.bias, head, tile)
            plgpu.barrier_wait(k_bar)
            qk = pipeline.finish_product(pipeline.start_product(k_s.at[0], q_s.at[0]), 0)
            bias = tile_math.bias(head, tile) if copied_bias is None else copied_bias.await_load()
            s, _ = tile_math.masked_logits(qk, tile_math.labels(tile), head, tile, True, bias)
            plgpu.commit_smem()  # before the copy engine overwrites what was read
            m, l = state
            m, pivot, alpha = softmax.rescale(m, s.max(axis=0), softmax.LOG2E)
            return m, l * alpha + softmax.probs(s, pivot, tile_math.beside_queries, softmax.LOG2E).sum(axis=0)

        @pipeline.when(g.lost[0] != 0)
        def _():
            plgpu.copy_gmem_to_smem(g.query.at[b, rows, head], q_s.at[0], q_bar)
            plgpu.barrier_wait(q_bar)
            row = lambda x: plgpu.layout_cast(jnp.full((block_q,), x, jnp.float32), QUERIES)
            m, l = lax.fori_loop(0, pl.cdiv(problem.kv_len, WARPGROUP_ROWS), step, (row(-jnp.inf), row(0)))
            by_lse = plgpu.load(pivot_g.at[b, head, rows], layout=QUERIES, optimized=False)
            store(pivot_g.at[b, head, rows], jnp.where(by_lse == jnp.inf, by_lse, m))
            store(log2_l_g.at[b, head, rows], jnp.where(by_lse == jnp.inf, 0.0, jnp.log2(l)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, num_heads, num_q_tiles * block_q), jnp.float32),
        grid=(batch * num_heads * num_q_tiles,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        scratch_types={
            "q_s": swizzled((1, block_q, head_dim), dtype),
            "k_s": swizzled((1, WARPGROUP_ROWS, head_dim), dtype),
            "q_bar": plgpu.Barrier(),
            "k_bar": plgpu.Barrier(),
        }
        | bias_scratch(inputs.bias, block_q, 1),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name=f"flash_attention_backward_states_d{head_dim}",
    )
    log2_l = kernel(*leaves)
    return pivot[...], pad(log2_l, {2: q_pad})
