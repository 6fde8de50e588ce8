"""What the backward needs of each query row before its kernel starts, in one pass: pivot, `sum(out * dout)`, and zeros to add dq to.

A block of threads, one warpgroup, has 64 rows of a head.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper.backward_tile import KEYS, store
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, WGMMA, swizzled
from flash_jax.softmax import lse_pivot

COLUMNS, _ZERO_COLUMNS = 64, 32  # of out and dout that are in registers at once, of the zeros that are copied at once


def prepare(
    out: jax.Array, dout: jax.Array, lse: jax.Array, dq_shape: tuple[int, ...], unit: float, may_be_empty: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(pivot, delta, dq)`: float32 like lse, like lse and of `dq_shape`, `[batch, q_len, num_heads, head_dim]`.

    out, dout: `[batch, q_len, num_heads, columns]`; of dout, only the columns that out has. lse: `[batch, num_heads, q_pad]`, q_pad a
    multiple of 64. columns: a multiple of `COLUMNS`. unit: of the pivot, see `softmax.lse_pivot`. may_be_empty: whether a row may have
    lse -inf, and out and dout that mean nothing: its delta is 0.
    """
    columns, head_dim = out.shape[-1], dq_shape[-1]
    batch, num_heads, num_tiles = lse.shape[0], lse.shape[1], lse.shape[2] // WARPGROUP_ROWS

    def body(out_g, dout_g, lse_g, pivot_g, delta_g, dq_g, *, out_s, dout_s, zeros_s, bar):
        block, head = lax.div(lax.axis_index("block"), num_heads), lax.rem(lax.axis_index("block"), num_heads)
        b, tile = lax.div(block, num_tiles), lax.rem(block, num_tiles)
        rows = pl.ds(tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.copy_gmem_to_smem(out_g.at[b, rows, head], out_s, bar)
        plgpu.copy_gmem_to_smem(dout_g.at[b, rows, head, pl.ds(0, columns)], dout_s, bar)
        zeros_s[...] = plgpu.layout_cast(jnp.zeros(zeros_s.shape, jnp.float32), WGMMA)
        plgpu.commit_smem()
        for start in range(0, head_dim, _ZERO_COLUMNS):
            plgpu.copy_smem_to_gmem(zeros_s, dq_g.at[b, rows, head, pl.ds(start, _ZERO_COLUMNS)])
        lse = plgpu.load(lse_g.at[b, head, rows], layout=KEYS, optimized=False)
        store(pivot_g.at[b, head, rows], lse_pivot(lse, unit))
        plgpu.barrier_wait(bar)
        total = jnp.float32(0)
        for start in range(0, columns, COLUMNS):
            x, y = (plgpu.load(ref.at[:, pl.ds(start, COLUMNS)], layout=WGMMA).astype(jnp.float32) for ref in (out_s, dout_s))
            total += x * y
        delta = plgpu.layout_cast(total.sum(axis=1), KEYS)
        store(delta_g.at[b, head, rows], jnp.where(lse == -jnp.inf, 0.0, delta) if may_be_empty else delta)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tile = swizzled((WARPGROUP_ROWS, columns), out.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lse.shape, lse.shape, dq_shape)],
        grid=(batch * num_tiles * num_heads,),  # heads fastest
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        scratch_types={
            "out_s": tile,
            "dout_s": tile,
            "zeros_s": swizzled((WARPGROUP_ROWS, _ZERO_COLUMNS), jnp.float32),
            "bar": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name=f"flash_attention_backward_rows_d{head_dim}",
    )
    return tuple(kernel(out, dout, lse))
