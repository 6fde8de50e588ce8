"""Forward on Hopper: one persistent, warp-specialised kernel.

One warp copies tiles of K, V, Q and the bias into shared memory; two or three warpgroups compute, 64 query rows each:

    S = Q K(0)^T;  P, m, l = softmax of S
    for each further key tile j:
        S = Q K(j)^T         started when it is this warpgroup's turn: the others' softmax runs beside it
        O += P V(j - 1)      started right after; the softmax of S runs beside it
        m, P, alpha = softmax of S;  l = l alpha + sum P;  O *= alpha
    O += P V(last);  out = O / l;  lse = m + log l

The maximum need not follow, for out and lse do not depend on it: m stays what it is after the first key tile (float16: after the first ones
that only some rows see), alpha is 1, and O needs no product until the end. A weight can then leave the range of its dtype; such a row is
lost, and its tile of rows is computed anew after all others, with an m that follows. A warpgroup that has lost a row by large logits
follows in all tiles that it has yet to begin.

Exponentials are base 2 with the scale folded in. P goes to the second product from registers. Row sums are kept per thread, eight columns
wide, and added across threads once a tile. Source: FlashAttention-3 (arXiv 2407.08608), section 3, whose maximum follows.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import clean, pipeline
from flash_jax.backends.hopper.forward_tile import UNSEEN, Bounds, Config, Inputs, Masked, Rows, Tile
from flash_jax.backends.hopper.pipeline import ROWS, WARPGROUP_ROWS, WGMMA, shared, swizzled
from flash_jax.problem import Problem

_ALIGNMENT = 1024  # of an array in shared memory
SHARED_MEMORY = 227 * 1024 - 2304  # of a block, less barriers, lse, marks and flags, and what alignment leaves empty
# Flags of a warpgroup. Number n % (_FLAGS - 1): tile n has lost a row, or another tile of that number. The last: the maximum follows.
_FLAGS = WARPGROUP_ROWS


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
        words_s,
        q_full,
        q_empty,
        k_full,
        v_full,
        bias_full,
        k_empty,
        v_empty,
        bias_empty,
        all_here,
        all_tried,
    ):
        *input_refs, out_g, lse_g = refs
        g: Inputs = jax.tree.unflatten(tree, input_refs)
        out_s = q_s if out_s is None else out_s
        multiprocessor, wg = lax.axis_index("multiprocessor"), lax.axis_index("wg")

        def lost(w, n):
            """Where warpgroup w says that it has lost a row of tile n."""
            return words_s.at[w, clean.MARKS + lax.rem(n, jnp.int32(_FLAGS - 1))]

        def any_lost(n):
            return sum((lost(w, n)[...] for w in range(1, num_compute)), lost(0, n)[...])

        def for_each_tile(do, carry, await_all):
            """`carry = do(n, is_again, tile, carry)` on all tiles, and again, after `await_all()`, on those that are lost."""
            count = g.counts[multiprocessor]

            def one(i, carry):
                n, is_again = lax.rem(i, count), i >= count
                pl.when(i == count)(await_all)

                def visit():
                    tile = Tile(*(g.table[field, multiprocessor, n] for field in range(len(Tile._fields))))
                    return do(n, is_again, tile, carry)

                wanted = lax.cond(is_again, lambda: any_lost(n), lambda: jnp.int32(1))
                return lax.cond(wanted != 0, visit, lambda: carry)

            return lax.fori_loop(0, 2 * count, one, carry)

        def kv_tile_of(tile: Tile, step):
            if g.lists is None:
                return tile.first - step
            return g.lists[shared(g.lists, 0, tile.b), shared(g.lists, 1, tile.head), tile.q_tile, tile.first + step]

        def slot_of(count):
            return lax.rem(count, jnp.int32(stages))

        def copy_tiles():
            def one_tile(n, is_again, tile, count):
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
                            pl.when(count > 0)(lambda w=w: plgpu.barrier_wait(q_empty.at[w]))
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

            for_each_tile(one_tile, jnp.int32(0), lambda: plgpu.barrier_wait(all_tried))

        def compute_tiles():
            def take_turn(start):
                if not config.take_turns:
                    return start()
                pipeline.await_turn(wg)
                result = start()
                pipeline.pass_turn(lax.rem(wg + 1, jnp.int32(num_compute)))
                return result

            def meet(barrier):
                """What each warpgroup wrote to shared memory is there for all, once all are here."""
                plgpu.commit_smem()
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

            follows_flag = words_s.at[wg, clean.MARKS + _FLAGS - 1]

            def one_tile(n, is_again, tile, count):
                both = (functools.partial(attend_tile, follows=follows) for follows in (True, False))
                # All warps agree: they have met in `commit_smem` since the flag was raised.
                return lax.cond(is_again | (follows_flag[...] != 0), *both, n, tile, count)

            def attend_tile(n, tile, count, follows):
                q_start = tile.q_tile * config.block_q + wg * WARPGROUP_ROWS
                rows = Rows(problem, config, g, tile, q_start, follows)

                def attend(acc_ref):
                    def second_product(p16, slot):
                        if not clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        plgpu.wgmma(acc_ref, p16, v_s.at[slot])

                    def logits(qk, slot, kv_tile):
                        if clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        if not copies_bias:
                            return rows.logits(qk, rows.bias(kv_tile))
                        plgpu.barrier_wait(bias_full.at[wg])
                        s = rows.logits(qk, plgpu.load(bias_s.at[wg], layout=WGMMA))
                        plgpu.commit_smem()  # before the copy engine overwrites it
                        plgpu.barrier_arrive(bias_empty.at[wg])
                        return s

                    def hide(s, slot, kv_tile, notes, mask, blank=False):
                        return s if mask is None else rows.mask(s, kv_tile, labels_s.at[slot] if has_labels else None, notes, mask, blank)

                    def clear(p16, slot, notes):
                        """What V holds in keys whose weights are all 0 is not there for the product to come."""
                        if notes is not None:
                            pl.when((notes & UNSEEN) != 0)(lambda: clear_columns(p16, slot))

                    def clear_columns(p16, slot):
                        clean.mark_columns(p16, words_s.at[wg])
                        meet(all_here)
                        clean.clear_rows(words_s, v_s.at[slot], config.v_swizzle, wg, num_compute)
                        meet(all_here)

                    def first_product(slot):
                        """Q K^T with nothing beside it."""
                        plgpu.barrier_wait(k_full.at[slot])
                        qk = pipeline.finish_product(take_turn(lambda: pipeline.start_product(q_s.at[wg], k_s.at[slot])), 0)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        return qk

                    def first_step():
                        slot = slot_of(count)
                        qk = first_product(slot)
                        kv_tile = kv_tile_of(tile, 0)
                        notes = None if masked.first is None else rows.notes(kv_tile)
                        s = hide(logits(qk, slot, kv_tile), slot, kv_tile, notes, masked.first, masked.blank)
                        p, state, _ = rows.softmax(s, None, masked.first is not None, follows=True)
                        p16 = rows.weights(p, kv_tile)
                        clear(p16, slot, notes)
                        return (*state, p16)

                    def kept_step(j, carry, mask, follows):
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

                        def softmax():
                            s = hide(logits(qk, slot, kv_tile), slot, kv_tile, notes, mask)
                            return rows.softmax(s, state, mask is not None, follows)

                        if not late:
                            p, state, alpha = softmax()
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        if late:
                            p, state, alpha = softmax()
                        p16 = rows.weights(p, kv_tile)  # not before the wait: at head_dim 256 that serialises the products
                        if alpha is not None:
                            acc_ref[...] = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0) * rows.column(alpha, v_head_dim)
                        clear(p16, slot, notes)
                        return (*state, p16)

                    def kept_steps(lower, upper, mask, carry, follows=False):
                        return lax.fori_loop(lower, upper, lambda j, carry: kept_step(j, carry, mask, follows), carry)

                    full_begin, full_end = (lax.max(jnp.int32(1), x) for x in (tile.full_begin, tile.full_end))

                    def keep_maximum():
                        """The second product of a step runs beside the first one of the next, and beside its softmax."""
                        carry = first_step()
                        if masked.first is None:
                            carry = kept_steps(1, tile.steps, None, carry)
                        else:
                            if masked.before is not None:
                                carry = kept_steps(1, full_begin, masked.before, carry, rows.follows_at_first)
                            carry = kept_steps(full_begin, full_end, None, carry)
                            if masked.after is not None:
                                carry = kept_steps(full_end, tile.steps, masked.after, carry)
                        *state, p16 = carry
                        if config.separate_out:
                            plgpu.barrier_arrive(q_empty.at[wg])
                        slot = slot_of(count + tile.steps - 1)
                        second_product(p16, slot)
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(v_empty.at[slot])
                        return state, acc

                    def following_step(j, state):
                        slot, kv_tile = slot_of(count + j), kv_tile_of(tile, j)
                        is_full, notes = (full_begin <= j) & (j < full_end), None
                        if masked.first is not None:
                            notes = rows.notes(kv_tile)
                        if notes is not None:  # to clear V warpgroups meet; those that keep their maximum meet in no full tile
                            notes = lax.cond(is_full, lambda: jnp.zeros((), notes.dtype), lambda: notes)
                        s = logits(first_product(slot), slot, kv_tile)
                        if masked.first is not None:
                            mask = lambda s: hide(s, slot, kv_tile, notes, Bounds(), masked.blank)
                            s = lax.cond(is_full, lambda s: s, mask, s)
                        p, state, alpha = rows.softmax(s, state, masked=True, follows=True)
                        p16 = rows.weights(p, kv_tile)
                        acc_ref[...] = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0) * rows.column(alpha, v_head_dim)
                        clear(p16, slot, notes)
                        second_product(p16, slot)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(v_empty.at[slot])
                        return state

                    def follow_maximum():
                        """One product after the other, for less code."""
                        state = lax.fori_loop(0, tile.steps, following_step, rows.empty_state())
                        if config.separate_out:
                            plgpu.barrier_arrive(q_empty.at[wg])
                        return state, plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)

                    plgpu.barrier_wait(q_full.at[wg])
                    state, acc = follow_maximum() if follows else keep_maximum()
                    out, lse = rows.finish(state, acc)
                    if not follows:
                        is_lost, is_large = rows.is_lost(state, out)
                        pipeline.raise_flag(lost(wg, n), is_lost)
                        pipeline.raise_flag(follows_flag, is_large)
                    return out, lse

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
            words_s[wg, pl.ds(clean.MARKS, _FLAGS)] = plgpu.layout_cast(jnp.zeros((_FLAGS,), jnp.int32), ROWS)
            plgpu.commit_smem()  # before another warp raises or reads one

            def await_all():
                plgpu.wait_smem_to_gmem(0)  # what was stored lies there before it is stored anew
                meet(all_tried)

            for_each_tile(one_tile, jnp.int32(0), await_all)
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
        # Marks, then flags: one array, for each takes whole kilobytes.
        "words_s": plgpu.SMEM((num_compute, clean.MARKS + _FLAGS), jnp.int32),
        "q_full": plgpu.Barrier(num_barriers=num_compute),
        "q_empty": plgpu.Barrier(num_barriers=num_compute),
        "k_full": plgpu.Barrier(num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=2 if has_labels else 1, num_barriers=stages),
        "bias_full": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "k_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "bias_empty": plgpu.Barrier(num_barriers=num_compute) if copies_bias else None,
        "all_here": plgpu.Barrier(num_arrivals=num_compute) if clears else None,
        "all_tried": plgpu.Barrier(num_arrivals=num_compute),
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
