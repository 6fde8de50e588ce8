"""Forward on Hopper: one persistent, warp-specialised kernel.

One warp copies tiles of K, V, Q and the bias into shared memory; two or three warpgroups compute, 64 query rows each:

    S = Q K(0)^T;  P, m, l = softmax of S
    for each further key tile j:
        S = Q K(j)^T         started when it is this warpgroup's turn: the others' softmax runs beside it
        O += P V(j - 1)      started right after; the softmax of S runs beside it
        m, P, alpha = softmax of S;  l = l alpha + sum P;  O *= alpha
    O += P V(last);  out = O / l;  lse = m + log l

Exponentials are base 2 with the scale folded in (but see `Rows.softmax`). P goes to the second product from registers. Row sums are kept
per thread, eight columns wide, and added across threads once a tile. Source: FlashAttention-3 (arXiv 2407.08608), section 3.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import clean, pipeline
from flash_jax.backends.hopper.forward_tile import UNSEEN, Config, Inputs, Masked, Rows, Tile
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, WGMMA, shared, swizzled
from flash_jax.problem import Problem

_ALIGNMENT = 1024  # of an array in shared memory
SHARED_MEMORY = 227 * 1024 - 2304  # of a block, less barriers, lse, marks and what alignment leaves empty


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

    def body(
        *refs,
        q_s,
        k_s,
        v_s,
        labels_s,
        bias_s,
        out_s,
        lse_s,
        marks_s,
        q_full,
        q_empty,
        k_full,
        v_full,
        bias_full,
        k_empty,
        v_empty,
        bias_empty,
        all_here,
    ):
        *input_refs, out_g, lse_g = refs
        g: Inputs = jax.tree.unflatten(tree, input_refs)
        out_s = q_s if out_s is None else out_s
        multiprocessor, wg = lax.axis_index("multiprocessor"), lax.axis_index("wg")

        def for_each_tile(do, carry):
            def one(n, carry):
                return do(n, Tile(*(g.table[field, multiprocessor, n] for field in range(len(Tile._fields)))), carry)

            return lax.fori_loop(0, g.counts[multiprocessor], one, carry)

        def kv_tile_of(tile: Tile, step):
            if g.lists is None:
                return tile.first - step
            return g.lists[shared(g.lists, 0, tile.b), shared(g.lists, 1, tile.head), tile.q_tile, tile.first + step]

        def slot_of(count):
            return lax.rem(count, jnp.int32(stages))

        def copy_tiles():
            def one_tile(n, tile, count):
                kv_head = lax.div(tile.head, jnp.int32(group))
                rows_of = lambda w: pl.ds(tile.q_tile * config.block_q + w * WARPGROUP_ROWS, WARPGROUP_ROWS)

                def step(j, count):
                    slot = slot_of(count)
                    keys = pl.ds(kv_tile_of(tile, j) * block_kv, block_kv)
                    at = (tile.b, keys, kv_head)
                    pl.when(count >= stages)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(g.key.at[at], k_s.at[slot], k_full.at[slot])

                    @pl.when(j == 0)
                    def _():
                        for w in range(num_compute):
                            pl.when(n > 0)(lambda w=w: plgpu.barrier_wait(q_empty.at[w]))
                            plgpu.copy_gmem_to_smem(g.query.at[tile.b, rows_of(w), tile.head], q_s.at[w], q_full.at[w])

                    for w in range(num_compute if copies_bias else 0):
                        pl.when(count > 0)(lambda w=w: plgpu.barrier_wait(bias_empty.at[w]))
                        bias = g.bias.at[shared(g.bias, 0, tile.b), shared(g.bias, 1, tile.head), rows_of(w), keys]
                        plgpu.copy_gmem_to_smem(bias, bias_s.at[w], bias_full.at[w])
                    pl.when(count >= stages)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(g.value.at[at], v_s.at[slot], v_full.at[slot])
                    if has_labels:
                        labels = g.kv_labels.at[shared(g.kv_labels, 0, tile.b), keys]
                        plgpu.copy_gmem_to_smem(labels, labels_s.at[slot], v_full.at[slot])
                    return count + 1

                return lax.fori_loop(0, tile.steps, step, count)

            for_each_tile(one_tile, jnp.int32(0))

        def compute_tiles():
            def take_turn(start):
                if not config.take_turns:
                    return start()
                pipeline.await_turn(wg)
                result = start()
                pipeline.pass_turn(lax.rem(wg + 1, jnp.int32(num_compute)))
                return result

            def meet():
                """What each warpgroup wrote to shared memory is there for the products of all."""
                plgpu.commit_smem()
                plgpu.barrier_arrive(all_here)
                plgpu.barrier_wait(all_here)

            def one_tile(n, tile, count):
                q_start = tile.q_tile * config.block_q + wg * WARPGROUP_ROWS
                rows = Rows(problem, config, g, tile, q_start, is_exact=v_head_dim == 256)

                def attend(acc_ref):
                    def second_product(p16, slot):
                        if not clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        plgpu.wgmma(acc_ref, p16, v_s.at[slot])

                    def logits(qk, slot, kv_tile, *mask):
                        if clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        labels = labels_s.at[slot] if has_labels else None
                        if not copies_bias:
                            return rows.logits(qk, rows.bias(kv_tile), kv_tile, labels, *mask)
                        plgpu.barrier_wait(bias_full.at[wg])
                        s = rows.logits(qk, plgpu.load(bias_s.at[wg], layout=WGMMA), kv_tile, labels, *mask)
                        plgpu.commit_smem()  # before the copy engine overwrites it
                        plgpu.barrier_arrive(bias_empty.at[wg])
                        return s

                    def clear(p16, slot, notes):
                        """What V holds in keys whose weights are all 0 is not there for the product to come."""
                        if notes is not None:
                            pl.when((notes & UNSEEN) != 0)(lambda: clear_columns(p16, slot))

                    def clear_columns(p16, slot):
                        clean.mark_columns(p16, marks_s.at[wg])
                        meet()
                        clean.clear_rows(marks_s, v_s.at[slot], config.v_swizzle, wg, num_compute)
                        meet()

                    def first_step():
                        slot = slot_of(count)
                        plgpu.barrier_wait(q_full.at[wg])
                        plgpu.barrier_wait(k_full.at[slot])
                        qk = pipeline.finish_product(take_turn(lambda: pipeline.start_product(q_s.at[wg], k_s.at[slot])), 0)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        kv_tile = kv_tile_of(tile, 0)
                        notes = None if masked.first is None else rows.notes(kv_tile)
                        s = logits(qk, slot, kv_tile, notes, masked.first, masked.blank)
                        p, state, _ = rows.softmax(s, None, masked.first is not None)
                        p16 = rows.weights(p, kv_tile)
                        clear(p16, slot, notes)
                        return (*state, p16)

                    def step(j, carry, mask):
                        *state, p16 = carry
                        slot, v_slot = slot_of(count + j), slot_of(count + j - 1)
                        kv_tile = kv_tile_of(tile, j)
                        notes = None if mask is None else rows.notes(kv_tile)
                        plgpu.barrier_wait(k_full.at[slot])

                        def start():
                            qk = pipeline.start_product(q_s.at[wg], k_s.at[slot])
                            second_product(p16, v_slot)
                            return qk

                        qk = pipeline.finish_product(take_turn(start), 1)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        softmax = lambda: rows.softmax(logits(qk, slot, kv_tile, notes, mask), state, mask is not None)
                        if not late:
                            p, state, alpha = softmax()
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        if late:
                            p, state, alpha = softmax()
                        p16 = rows.weights(p, kv_tile)  # not before the wait: at head_dim 256 that serialises the products
                        acc_ref[...] = acc * rows.column(alpha, v_head_dim)
                        clear(p16, slot, notes)
                        return (*state, p16)

                    def steps(lower, upper, mask, carry):
                        return lax.fori_loop(lower, upper, lambda j, c: step(j, c, mask), carry)

                    carry = first_step()
                    full_begin, full_end = (lax.max(jnp.int32(1), x) for x in (tile.full_begin, tile.full_end))
                    if masked.before is not None:
                        carry = steps(1, full_begin, masked.before, carry)
                    carry = steps(*((1, tile.steps) if masked.first is None else (full_begin, full_end)), None, carry)
                    if masked.after is not None:
                        carry = steps(full_end, tile.steps, masked.after, carry)
                    *state, p16 = carry
                    if config.separate_out:
                        plgpu.barrier_arrive(q_empty.at[wg])
                    slot = slot_of(count + tile.steps - 1)
                    second_product(p16, slot)
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return rows.finish(state, acc)

                out, lse = pl.run_scoped(attend, plgpu.ACC((WARPGROUP_ROWS, v_head_dim), jnp.float32))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_s[wg] = out.astype(out_dtype)
                lse_s[wg] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_s.at[wg], out_g.at[tile.out, pl.ds(q_start, WARPGROUP_ROWS), tile.head])
                plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[tile.out, tile.head, pl.ds(q_start, WARPGROUP_ROWS)])
                if not config.separate_out:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(q_empty.at[wg])
                return count + tile.steps

            if config.take_turns:
                pl.when(wg == num_compute - 1)(lambda: pipeline.pass_turn(jnp.int32(0)))
            for_each_tile(one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        compute_registers, copy_registers = config.registers

        @pl.when(wg == num_compute)
        def _():
            plgpu.set_max_registers(copy_registers, action="decrease")

            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(copy_tiles)

        @pl.when(wg < num_compute)
        def _():
            plgpu.set_max_registers(compute_registers, action="increase")
            compute_tiles()

    scratch = {
        "q_s": swizzled((num_compute, WARPGROUP_ROWS, head_dim), dtype),
        "k_s": swizzled((stages, block_kv, head_dim), dtype),
        "v_s": swizzled((stages, block_kv, v_head_dim), dtype, config.v_swizzle),
        "labels_s": plgpu.SMEM((stages, block_kv), jnp.int32) if has_labels else None,
        "bias_s": _bias_tiles(config, inputs.bias.dtype) if copies_bias else None,
        "out_s": swizzled((num_compute, WARPGROUP_ROWS, v_head_dim), out_dtype) if config.separate_out else None,
        "lse_s": plgpu.SMEM((num_compute, WARPGROUP_ROWS), jnp.float32),
        "marks_s": plgpu.SMEM((num_compute, clean.WARPS, 4), jnp.int32) if clears else None,
        "q_full": plgpu.Barrier(num_barriers=num_compute),
        "q_empty": plgpu.Barrier(num_barriers=num_compute),
        "k_full": plgpu.Barrier(num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=2 if has_labels else 1, num_barriers=stages),
        "bias_full": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "k_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "bias_empty": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "all_here": plgpu.Barrier(num_arrivals=num_compute) if clears else None,
    }
    kernel = plgpu.kernel(
        lambda *refs, **scratch_refs: body(*refs, **(dict.fromkeys(scratch) | scratch_refs)),
        out_type=[
            jax.ShapeDtypeStruct((parts * batch, q_len, num_heads, v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((parts * batch, num_heads, q_pad), jnp.float32),
        ],
        grid=(num_multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=num_compute + 1,
        thread_name="wg",
        scratch_types={name: x for name, x in scratch.items() if x is not None},
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        kernel_name=f"flash_attention_forward_d{head_dim}",
    )
    return tuple(kernel(*leaves))
