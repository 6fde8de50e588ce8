"""Forward on Hopper: one persistent, warp-specialised kernel.

One warp copies tiles of K, V, Q and the bias into shared memory; one to three warpgroups compute, 64 query rows each:

    S = Q K(0)^T;  m = max S;  P = exp2(S - m);  l = sum P
    for each further key tile j:
        S = Q K(j)^T         started when it is this warpgroup's turn: the others' softmax runs beside it
        O += P V(j - 1)      started right after; the softmax of S runs beside it
        P = exp2(S - m);  l += sum P
    O += P V(last);  out = O / l;  lse = m + log l

The maximum m need not follow, for out and lse do not depend on it: it is that of the first key tile, or 0 for a row that sees none of its
keys. (In float16, which has little room, it follows in the masked tiles before the full ones: l and O are multiplied by
alpha = exp2(m before - m).) A weight can leave the range of its dtype; such a row is lost, and its tile of rows is computed anew after all
others: first S alone, for the maximum over all keys, then as above with that m. Where rows of tile n of a block's list are lost to large
logits, tiles n + 3, n + 6 and so on are computed so at once.

Exponentials are base 2 with the scale folded in. P goes to the second product from registers. Row sums are kept per thread, eight columns
wide, and added across threads once a tile. Source: FlashAttention-3 (arXiv 2407.08608), section 3, whose maximum follows.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import pipeline
from flash_jax.backends.hopper.flags import WORDS, Flags
from flash_jax.backends.hopper.forward_steps import Scratch, Steps
from flash_jax.backends.hopper.forward_tile import Config, Inputs, Masked, Rows, Tile, kv_tile_of
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, shared, swizzled
from flash_jax.problem import Problem

_ALIGNMENT = 1024  # of an array in shared memory
SHARED_MEMORY = 227 * 1024 - 2304  # of a block, less barriers, lse, marks and flags, and what alignment leaves empty


def shared_memory(config: Config, head_dim: int, v_head_dim: int, parts: int = 1, has_labels: bool = False) -> int:
    """Bytes of Q, K, V, staged out and labels of keys."""
    out = config.block_q * v_head_dim * (2 if parts == 1 else 4) if config.separate_out else 0
    labels = -(-config.stages * config.block_kv * 4 // _ALIGNMENT) * _ALIGNMENT if has_labels else 0
    return 2 * (config.block_q * head_dim + config.stages * config.block_kv * (head_dim + v_head_dim)) + out + labels


def can_divide_keys(config: Config, head_dim: int, v_head_dim: int, has_labels: bool) -> bool:
    """Whether several blocks of threads can have parts of a row's keys: what they store is float32, and never in the query's place."""
    return config.separate_out and shared_memory(config, head_dim, v_head_dim, 2, has_labels) <= SHARED_MEMORY


def _with_room_for_bias(config: Config, inputs: Inputs, parts: int) -> Config | None:
    """With which tiles of the bias come through shared memory, one a warpgroup: where it has both rows and keys, and they fit."""
    bias, (head_dim, v_head_dim) = inputs.bias, (inputs.query.shape[-1], inputs.value.shape[-1])
    if bias is None or 1 in bias.shape[2:] or bias.dtype.itemsize not in (2, 4):
        return None
    tiles = config.block_q * config.block_kv * bias.dtype.itemsize
    may_share = head_dim == v_head_dim and parts == 1
    for separate_out in (config.separate_out, config.separate_out and not may_share):
        roomy = dataclasses.replace(config, separate_out=separate_out)
        if shared_memory(roomy, head_dim, v_head_dim, parts, inputs.kv_labels is not None) + tiles <= SHARED_MEMORY:
            return roomy
    return None


def _bias_tiles(config: Config, dtype):
    swizzle = next(n for n in (128, 64, 32) if config.block_kv * dtype.itemsize % n == 0)
    return swizzled((config.warpgroups, WARPGROUP_ROWS, config.block_kv), dtype, swizzle)


def out_and_lse(problem: Problem, config: Config, inputs: Inputs, masked: Masked, parts: int) -> tuple[jax.Array, jax.Array]:
    """out `[batch, q_len, num_heads, v_head_dim]` and lse, float32 `[batch, num_heads, q_pad]`, head_dim and rows padded.

    parts: into how many the keys of each row are split. More than one: float32, `[parts * batch, ...]`, to be merged.
    """
    batch, q_len, num_heads, head_dim = inputs.query.shape
    v_head_dim, dtype, group = inputs.value.shape[-1], inputs.query.dtype, problem.group
    out_dtype = dtype if parts == 1 else jnp.dtype(jnp.float32)
    block_kv, stages, num_compute = config.block_kv, config.stages, config.warpgroups
    q_pad = -(-problem.q_len // config.block_q) * config.block_q
    clears, has_labels = masked.clears, inputs.kv_labels is not None
    roomy = _with_room_for_bias(config, inputs, parts)
    copies_bias, config = roomy is not None, roomy or config
    # Softmax after the wait for the product where the bias would spill before (measured: docs/dev/experiments.md).
    late = copies_bias and (num_compute == 3 or v_head_dim == 256)
    assert clears or not has_labels
    assert config.separate_out or (head_dim == v_head_dim and parts == 1)
    leaves, tree = jax.tree.flatten(inputs)
    num_multiprocessors = inputs.table.shape[1]

    def body(*refs, **scratch_refs):
        *input_refs, out_g, lse_g = refs
        g: Inputs = jax.tree.unflatten(tree, input_refs)
        scratch = Scratch(**scratch_refs)
        out_s = scratch.q_s if scratch.out_s is None else scratch.out_s
        multiprocessor, wg = lax.axis_index("multiprocessor"), lax.axis_index("wg")
        flags = Flags(scratch.words_s)

        def tile_of(visit, num_tiles):
            """`(n, is_again, tile)`.

            Visits -num_tiles to -1 are the first to each tile; visits 0 to num_tiles - 1 the second, to those that lost a row.
            """
            n = lax.select(visit < 0, visit + num_tiles, visit)
            return n, visit >= 0, Tile(*(g.table[field, multiprocessor, n] for field in range(len(Tile._fields))))

        def for_each_tile(do, carry, await_all):
            """`carry = do(visit, num_tiles, carry)` for first visits and, after `await_all()`, for second ones to tiles that lost a row."""
            num_tiles = g.counts[multiprocessor]

            def one(state):
                visit, carry = state
                pl.when(visit == 0)(await_all)
                is_wanted = lax.cond(visit >= 0, lambda: flags.is_lost(visit), lambda: visit < 0)  # which is true there
                return visit + 1, lax.cond(is_wanted, lambda: do(visit, num_tiles, carry), lambda: carry)

            # Not `fori_loop`: Pallas counts that from 0, beside the index, and a register more is a spill at head_dim 256.
            lax.while_loop(lambda state: state[0] < num_tiles, one, (-num_tiles, carry))

        def copy_tiles():
            def one_tile(visit, num_tiles, count):
                n, is_again, tile = tile_of(visit, num_tiles)
                kv_head = lax.div(tile.head, jnp.int32(group))
                rows_of = lambda w: pl.ds(tile.q_tile * config.block_q + w * WARPGROUP_ROWS, WARPGROUP_ROWS)

                def step(i, count):
                    j = lax.select(i < tile.steps, i, i - tile.steps)
                    slot = pipeline.remainder(count, stages)
                    keys = pl.ds(kv_tile_of(g, tile, j) * block_kv, block_kv)
                    at = (tile.b, keys, kv_head)
                    plgpu.barrier_wait(scratch.k_empty.at[slot])
                    plgpu.copy_gmem_to_smem(g.key.at[at], scratch.k_s.at[slot], scratch.k_full.at[slot])

                    @pl.when(i == 0)
                    def _():
                        for w in range(num_compute):
                            plgpu.barrier_wait(scratch.q_empty.at[w])
                            plgpu.copy_gmem_to_smem(g.query.at[tile.b, rows_of(w), tile.head], scratch.q_s.at[w], scratch.q_full.at[w])

                    for w in range(num_compute if copies_bias else 0):
                        plgpu.barrier_wait(scratch.bias_empty.at[w])
                        bias = g.bias.at[shared(g.bias, 0, tile.b), shared(g.bias, 1, tile.head), rows_of(w), keys]
                        plgpu.copy_gmem_to_smem(bias, scratch.bias_s.at[w], scratch.bias_full.at[w])
                    plgpu.barrier_wait(scratch.v_empty.at[slot])
                    if has_labels:
                        labels = g.kv_labels.at[shared(g.kv_labels, 0, tile.b), keys]
                        plgpu.copy_gmem_to_smem(labels, scratch.labels_s.at[slot], scratch.labels_full.at[slot])
                    plgpu.copy_gmem_to_smem(g.value.at[at], scratch.v_s.at[slot], scratch.v_full.at[slot])
                    return count + 1

                times = lax.select(flags.searches(n, is_again), jnp.int32(2), jnp.int32(1))  # the first one for the maximum
                return lax.fori_loop(0, times * tile.steps, step, count)

            for_each_tile(one_tile, jnp.int32(0), lambda: plgpu.barrier_wait(scratch.all_attended))

        def compute_tiles():
            def attend(acc, visit, num_tiles, count):
                n, is_again, tile = tile_of(visit, num_tiles)
                rows = Rows(problem, config, g, tile, tile.q_tile * config.block_q + wg * WARPGROUP_ROWS)
                steps = Steps(rows, masked, scratch, acc, wg, late)

                def search():
                    m = steps.search(count)
                    flags.raise_searched(wg, n)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    scratch.lse_s.at[wg][...] = m
                    return rows.shrunk(m, scratch.q_s.at[wg]), count + tile.steps

                plgpu.barrier_wait(scratch.q_full.at[wg])
                m, count = pipeline.cond(flags.searches(n, is_again), search, lambda: (rows.no_maximum(), count))
                m, l, acc = steps.attend(count, m)
                # Read anew at a tile's end, lest they take registers in its steps (measured: docs/dev/experiments.md).
                n, is_again, tile = tile_of(lax.optimization_barrier(visit), num_tiles)
                me = lax.optimization_barrier(wg)
                out, lse = rows.finish(rows.restored(m, scratch.lse_s.at[me]), l, acc)
                is_lost = rows.is_lost(tile, m, l, out)
                pipeline.when(~is_again)(lambda: flags.raise_lost(me, n, *is_lost))
                return tile, me, out, lse, count + tile.steps

            def one_tile(visit, num_tiles, count):
                accumulator = plgpu.ACC((WARPGROUP_ROWS, v_head_dim), jnp.float32)
                tile, me, out, lse, count = pl.run_scoped(lambda acc: attend(acc, visit, num_tiles, count), accumulator)
                q_start = tile.q_tile * config.block_q + me * WARPGROUP_ROWS
                out_of, lse_of = out_s.at[me], scratch.lse_s.at[me]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if parts == 1:
                    pipeline.store_tile(out_of, out.astype(out_dtype))
                else:  # float32
                    out_of[...] = out
                lse_of[...] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_of, out_g.at[tile.out, pl.ds(q_start, WARPGROUP_ROWS), tile.head])
                plgpu.copy_smem_to_gmem(lse_of, lse_g.at[tile.out, tile.head, pl.ds(q_start, WARPGROUP_ROWS)])
                if not config.separate_out:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(scratch.q_empty.at[me])
                return count

            def await_all():
                plgpu.wait_smem_to_gmem(0)  # what was stored lies there before it is stored anew
                pipeline.meet(scratch.all_attended)

            for barriers, mine in ((scratch.k_empty, range(stages)), (scratch.v_empty, range(stages)), (scratch.q_empty, [wg])):
                for n in mine:
                    plgpu.barrier_arrive(barriers.at[n])
            if copies_bias:
                plgpu.barrier_arrive(scratch.bias_empty.at[wg])
            if config.take_turns:
                pipeline.when(wg == num_compute - 1)(lambda: pipeline.pass_turn(jnp.int32(0)))
            flags.lower(wg)
            for_each_tile(one_tile, jnp.int32(0), await_all)
            plgpu.wait_smem_to_gmem(0)

        compute_registers, copy_registers = config.registers

        @pipeline.when(wg == num_compute)
        def _():
            plgpu.set_max_registers(copy_registers, action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(copy_tiles)

        @pipeline.when(wg < num_compute)
        def _():
            plgpu.set_max_registers(compute_registers, action="increase")
            compute_tiles()

    scratch_types = {
        "q_s": swizzled((num_compute, WARPGROUP_ROWS, head_dim), dtype),
        "k_s": swizzled((stages, block_kv, head_dim), dtype),
        "v_s": swizzled((stages, block_kv, v_head_dim), dtype, config.v_swizzle),
        "labels_s": plgpu.SMEM((stages, block_kv), jnp.int32) if has_labels else None,
        "bias_s": _bias_tiles(config, inputs.bias.dtype) if copies_bias else None,
        "out_s": swizzled((num_compute, WARPGROUP_ROWS, v_head_dim), out_dtype) if config.separate_out else None,
        "lse_s": plgpu.SMEM((num_compute, WARPGROUP_ROWS), jnp.float32),
        "words_s": plgpu.SMEM((num_compute, WORDS), jnp.int32),
        "q_full": plgpu.Barrier(num_barriers=num_compute),
        "q_empty": plgpu.Barrier(num_barriers=num_compute),
        "k_full": plgpu.Barrier(num_barriers=stages),
        "v_full": plgpu.Barrier(num_barriers=stages),
        "labels_full": plgpu.Barrier(num_barriers=stages) if has_labels else None,
        "bias_full": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "k_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "bias_empty": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "v_marked": plgpu.Barrier(num_arrivals=num_compute) if clears else None,
        "all_attended": plgpu.Barrier(num_arrivals=num_compute),
    }
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((parts * batch, q_len, num_heads, v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((parts * batch, num_heads, q_pad), jnp.float32),
        ],
        grid=(num_multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=num_compute + 1,
        thread_name="wg",
        scratch_types={name: x for name, x in scratch_types.items() if x is not None},
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        kernel_name=f"flash_attention_forward_d{head_dim}",
    )
    return tuple(kernel(*leaves))
