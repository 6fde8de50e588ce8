"""Forward on Hopper: one persistent, warp-specialised kernel.

One warp copies tiles of K, V and Q into shared memory; two or three warpgroups compute, 64 query rows each:

    S = Q K(0)^T;  P, m, l = softmax of S
    for each further key tile j:
        S = Q K(j)^T         started when it is this warpgroup's turn: the others' softmax runs beside it
        O += P V(j - 1)      started right after; the softmax of S runs beside it
        m, P, alpha = softmax of S;  l = l alpha + sum P;  O *= alpha
    O += P V(last);  out = O / l;  lse = m + log l

Exponentials are base 2 with the scale folded in. P goes to the second product from registers. Row sums are kept per thread, eight
columns wide, and added across threads once a tile. Source: FlashAttention-3 (arXiv 2407.08608), section 3.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import dropout, softmax
from flash_jax.backends.hopper import blocks, clean, functions, pipeline
from flash_jax.backends.hopper.pipeline import COLUMNS, ROWS, WARPGROUP_ROWS, WGMMA, shared, swizzled
from flash_jax.logits import logits, tanh_by_exp2
from flash_jax.problem import Problem
from flash_jax.softmax import LOG2E

_PARTIAL_SUM_COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and registers of the forward.

    warpgroups: 1 to 3 that compute, 64 query rows each. block_kv: keys of a tile. stages: tiles of K and of V in flight.
    take_turns: order the warpgroups' products. separate_out: out leaves through its own shared memory, not the query's.
    v_swizzle: bytes, by what divides block_kv.
    """

    warpgroups: int
    block_kv: int
    stages: int = 2
    take_turns: bool = True
    separate_out: bool = True
    v_swizzle: int = 128

    @property
    def block_q(self) -> int:
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a compute warpgroup's and of the copying warp's threads."""
        compute, copy = (160, 32) if self.warpgroups == 3 else (240, 24)
        assert compute * self.warpgroups + copy <= pipeline.MAX_REGISTERS
        return compute, copy


class Inputs(NamedTuple):
    """Operands of the kernel, a feature that is absent being None. `q_pad`, `kv_pad`: lengths padded to whole tiles.

    query, key, value: `[batch, len, heads, head_dim]`, head_dim padded to the kernel's.
    table: int32 `[multiprocessors, longest, 10]`, see `Tile`; counts: int32 `[multiprocessors]`, its tiles.
    scale: float32 `[1 | batch]`.
    lists: int32 `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`, `schedule.TileLists.index`.
    kv_lo, kv_hi: int32 `[1 | batch, q_pad]`; None where no row has such a bound.
    q_labels, kv_labels: int32 `[1 | batch, q_pad | kv_pad]`.
    dense: int8 `[1 | batch, 1 | num_heads, 1 | q_pad, 1 | kv_pad]`, nonzero = visible.
    functions: operands of each mask function, `[1 | batch, len]`, see `functions.as_words`; batch_ids: int32 `[batch]`, what it sees.
    blocks: `blocks.as_bits` of the block maps that are not whole tiles, by number, `[1 | batch, 1 | num_heads, rows, words]`.
    bias: `[1 | batch, 1 | num_heads, 1 | q_pad, 1 | kv_pad]`.
    row_keys: uint32 `[1 | batch, 1 | num_heads, q_pad]`.
    """

    query: Any
    key: Any
    value: Any
    table: Any
    counts: Any
    scale: Any = None
    lists: Any = None
    kv_lo: Any = None
    kv_hi: Any = None
    q_labels: Any = None
    kv_labels: Any = None
    dense: tuple = ()
    functions: tuple = ()
    batch_ids: Any = None
    blocks: Any = None
    bias: Any = None
    row_keys: Any = None


class Tile(NamedTuple):
    """An entry of the table: what a tile of rows visits, and, once it is dealt out, which rows.

    steps: key tiles to visit, at least 1; the first one is always masked where there is a mask.
    first: the key tile of step 0, from where steps go down; with `Inputs.lists` the place in the list, from where they go up.
    full_begin, full_end: steps that need no mask.
    visible: 0 where no row sees any key. unseen: 0 where every key of the key tiles is seen by a row of its batch entry.
    b, head, q_tile: which rows. out: leading index of their results: b, or `part * batch + b` where keys are split.
    """

    steps: Any
    first: Any
    full_begin: Any
    full_end: Any
    visible: Any
    unseen: Any
    b: Any = None
    head: Any = None
    q_tile: Any = None
    out: Any = None


class Masked(NamedTuple):
    """Static facts about the steps: is there a mask, are there masked steps between the first and the full ones, and after them.

    blank: may a tile of rows be one that sees nothing though its mask does not hide it (`Tile.visible`).
    clears: may V hold something in keys that no row sees (`Tile.unseen`).
    """

    any: bool
    before: bool
    after: bool
    blank: bool
    clears: bool


class _Rows:
    """The arithmetic on 64 query rows of a warpgroup against the key tiles of its steps."""

    def __init__(self, problem: Problem, config: Config, g: Inputs, tile: Tile, q_start):
        self.problem, self.config, self.g, self.tile, self.q_start = problem, config, g, tile, q_start
        rows = lambda ref: None if ref is None else self._load(ref.at[shared(ref, 0, tile.b), self._rows()], ROWS)
        self.kv_lo, self.kv_hi, self.q_labels = rows(g.kv_lo), rows(g.kv_hi), rows(g.q_labels)
        self.row_keys = None
        if g.row_keys is not None:
            ref = g.row_keys.at[shared(g.row_keys, 0, tile.b), shared(g.row_keys, 1, tile.head), self._rows()]
            self.row_keys = self._load(ref, ROWS)
        plain = problem.logits_soft_cap is None and g.bias is None and problem.scale is not None and problem.scale > 0
        self.factor = problem.scale * LOG2E if plain else None  # of raw products, folded into the exponential
        self.scale = problem.scale if g.scale is None else g.scale[shared(g.scale, 0, tile.b)]

    def _rows(self):
        return pl.ds(self.q_start, WARPGROUP_ROWS)

    def _load(self, ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def _row_ids(self):
        return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS) + self.q_start

    def column(self, row, n=None):
        """Row numbers beside a tile of n columns."""
        return lax.broadcast_in_dim(row, (WARPGROUP_ROWS, n or self.config.block_kv), [0])

    def _beside_keys(self, key):
        return lax.broadcast_in_dim(key, (WARPGROUP_ROWS, self.config.block_kv), [1])

    def _elements(self, ref, kv_start):
        """A tile of `[1 | batch, 1 | heads, 1 | q_pad, 1 | kv_pad]` in global memory."""
        ref = ref.at[shared(ref, 0, self.tile.b), shared(ref, 1, self.tile.head)]
        keys = pl.ds(kv_start, self.config.block_kv)
        one_row, one_key = ref.shape[0] == 1, ref.shape[1] == 1
        if one_row and one_key:
            return lax.broadcast_in_dim(ref[0, 0], (WARPGROUP_ROWS, self.config.block_kv), [])
        if one_row:
            return self._beside_keys(self._load(ref.at[0, keys], COLUMNS))
        if one_key:
            return self.column(self._load(ref.at[self._rows(), 0], ROWS))
        return self._load(ref.at[self._rows(), keys], WGMMA)

    def _by_function(self, function, refs, kv_start):
        keys = pl.ds(kv_start, self.config.block_kv)

        def read(kind, ref):
            ref = ref.at[shared(ref, 0, self.tile.b)]
            match kind:
                case "query":
                    return self.column(self._load(ref.at[self._rows()], ROWS))
                case "key":
                    return self._beside_keys(self._load(ref.at[keys], COLUMNS))
                case "head":
                    return ref[self.tile.head]
                case _:
                    return ref[...]

        q_ids = self.column(self._row_ids())
        kv_ids = self._beside_keys(plgpu.broadcasted_iota(jnp.int32, (self.config.block_kv,), 0, layout=COLUMNS) + kv_start)
        batch = self.g.batch_ids[shared(self.g.batch_ids, 0, self.tile.b)]
        operands = map(read, function.kinds, refs)
        return functions.evaluate(function, q_ids.shape, batch, self.tile.head, q_ids, kv_ids, *operands)

    def logits(self, qk, kv_tile, kv_labels, masked: bool, blank: bool = False):
        """Raw products, or base-2 logits where more than a scale is applied; -inf where masked.

        kv_labels: the labels of the keys in shared memory, or None.
        """
        kv_start = kv_tile * self.config.block_kv
        s = qk
        if self.factor is None:
            bias = None if self.g.bias is None else self._elements(self.g.bias, kv_start).astype(jnp.float32)
            s, _ = logits(qk, self.scale, self.problem.logits_soft_cap, bias, tanh_by_exp2)
        if not masked:
            return s
        if self.kv_lo is not None or self.kv_hi is not None:
            below = lambda bound: None if bound is None else bound - kv_start
            s = pipeline.keep_interval(s, below(self.kv_lo), below(self.kv_hi))
        if self.q_labels is not None:
            labels = self._beside_keys(self._load(kv_labels, COLUMNS))
            plgpu.commit_smem()  # before the copy engine overwrites them
            s = jnp.where(self.column(self.q_labels) == labels, s, -jnp.inf)
        for ref in self.g.dense:
            s = jnp.where(self._elements(ref, kv_start) != 0, s, -jnp.inf)
        for n, ref in (self.g.blocks or {}).items():
            words = ref.at[shared(ref, 0, self.tile.b), shared(ref, 1, self.tile.head)]
            row = lax.div(self._row_ids(), jnp.int32(self.problem.mask.block_sizes[n][0]))
            row = jnp.minimum(row, words.shape[0] - 1)  # of rows past the end
            s = blocks.keep_blocks(s, words, row, lax.div(kv_start, jnp.int32(blocks.WORD)))
        for function, refs in zip(self.problem.mask.functions, self.g.functions, strict=True):
            s = jnp.where(self._by_function(function, refs, kv_start), s, -jnp.inf)
        if blank:  # a tile of rows that sees nothing still takes one step
            s = jnp.where(lax.broadcast_in_dim(self.tile.visible != 0, s.shape, []), s, -jnp.inf)
        return s

    def softmax(self, s, state, masked: bool):
        """One online step: `(p, state, alpha)`; state is (m in the units of s, l as partial sums), None before the first."""
        s_max = s.max(axis=1)
        m = s_max if state is None else jnp.maximum(state[0], s_max)
        guarded = masked or self.g.bias is not None
        pivot = jnp.where(m == -jnp.inf, 0.0, m) if guarded else m
        base_2 = (lambda x: x) if self.factor is None else (lambda x: x * self.factor)
        p = jnp.exp2(base_2(s) - self.column(base_2(pivot)))
        alpha = None if state is None else jnp.exp2(base_2(state[0]) - base_2(pivot))
        parts = [p[:, n : n + _PARTIAL_SUM_COLUMNS] for n in range(0, self.config.block_kv, _PARTIAL_SUM_COLUMNS)]
        l = sum(parts[1:], parts[0])
        if state is not None:
            l = state[1] * self.column(alpha, _PARTIAL_SUM_COLUMNS) + l
        return p, (m, l), alpha

    def finish(self, state, acc):
        """`(out, lse)` in float32."""
        m, l = state
        m = m if self.factor is None else m * self.factor
        return softmax.finish(m, l.sum(axis=1), acc, lambda row: self.column(row, acc.shape[1]))

    def weights(self, p, kv_tile):
        """p as operand of the second product."""
        if self.row_keys is not None:
            rate = self.problem.dropout_rate
            shape = (WARPGROUP_ROWS, self.config.block_kv)
            kv_ids = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + kv_tile * self.config.block_kv
            kept = dropout.keep(self.column(self.row_keys), kv_ids, rate)
            p = jnp.where(kept, p * (1 / (1 - rate)), 0.0)
        return p.astype(self.problem.dtype)


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
    assert clears or not has_labels
    assert config.separate_out or (head_dim == v_head_dim and parts == 1)
    leaves, tree = jax.tree.flatten(inputs)
    num_multiprocessors = inputs.table.shape[0]

    def body(*refs, q_s, k_s, v_s, labels_s, out_s, lse_s, marks_s, q_full, q_empty, k_full, v_full, k_empty, v_empty, all_here):
        *input_refs, out_g, lse_g = refs
        g: Inputs = jax.tree.unflatten(tree, input_refs)
        out_s = q_s if out_s is None else out_s
        multiprocessor, wg = lax.axis_index("multiprocessor"), lax.axis_index("wg")

        def for_each_tile(do, carry):
            def one(n, carry):
                return do(n, Tile(*(g.table[multiprocessor, n, field] for field in range(len(Tile._fields)))), carry)

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

                def step(j, count):
                    slot = slot_of(count)
                    keys = pl.ds(kv_tile_of(tile, j) * block_kv, block_kv)
                    at = (tile.b, keys, kv_head)
                    pl.when(count >= stages)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(g.key.at[at], k_s.at[slot], k_full.at[slot])

                    @pl.when(j == 0)
                    def _():
                        for w in range(num_compute):
                            rows = pl.ds(tile.q_tile * config.block_q + w * WARPGROUP_ROWS, WARPGROUP_ROWS)
                            pl.when(n > 0)(lambda w=w: plgpu.barrier_wait(q_empty.at[w]))
                            plgpu.copy_gmem_to_smem(g.query.at[tile.b, rows, tile.head], q_s.at[w], q_full.at[w])

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
                rows = _Rows(problem, config, g, tile, q_start)

                def attend(acc_ref):
                    def second_product(p16, slot):
                        if not clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        plgpu.wgmma(acc_ref, p16, v_s.at[slot])

                    def logits(qk, slot, kv_tile, *is_masked):
                        if clears:
                            plgpu.barrier_wait(v_full.at[slot])
                        return rows.logits(qk, kv_tile, labels_s.at[slot] if has_labels else None, *is_masked)

                    def clear(p16, slot, is_masked):
                        """What V holds in keys whose weights are all 0 is not there for the product to come."""
                        if clears and is_masked:
                            pl.when(tile.unseen != 0)(lambda: clear_columns(p16, slot))

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
                        p, state, _ = rows.softmax(logits(qk, slot, kv_tile, masked.any, masked.blank), None, masked.any)
                        p16 = rows.weights(p, kv_tile)
                        clear(p16, slot, masked.any)
                        return (*state, p16)

                    def step(j, carry, is_masked):
                        *state, p16 = carry
                        slot, v_slot = slot_of(count + j), slot_of(count + j - 1)
                        kv_tile = kv_tile_of(tile, j)
                        plgpu.barrier_wait(k_full.at[slot])

                        def start():
                            qk = pipeline.start_product(q_s.at[wg], k_s.at[slot])
                            second_product(p16, v_slot)
                            return qk

                        qk = pipeline.finish_product(take_turn(start), 1)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        p, state, alpha = rows.softmax(logits(qk, slot, kv_tile, is_masked), state, is_masked)
                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(v_empty.at[v_slot])
                        p16 = rows.weights(p, kv_tile)  # not before the wait: at head_dim 256 that serialises the products
                        acc_ref[...] = acc * rows.column(alpha, v_head_dim)
                        clear(p16, slot, is_masked)
                        return (*state, p16)

                    def steps(lower, upper, is_masked, carry):
                        return lax.fori_loop(lower, upper, lambda j, c: step(j, c, is_masked), carry)

                    carry = first_step()
                    full_begin, full_end = (lax.max(jnp.int32(1), x) for x in (tile.full_begin, tile.full_end))
                    if masked.before:
                        carry = steps(1, full_begin, True, carry)
                    carry = steps(full_begin if masked.any else 1, full_end if masked.any else tile.steps, False, carry)
                    if masked.after:
                        carry = steps(full_end, tile.steps, True, carry)
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
        "out_s": swizzled((num_compute, WARPGROUP_ROWS, v_head_dim), out_dtype) if config.separate_out else None,
        "lse_s": plgpu.SMEM((num_compute, WARPGROUP_ROWS), jnp.float32),
        "marks_s": plgpu.SMEM((num_compute, clean.WARPS, 4), jnp.int32) if clears else None,
        "q_full": plgpu.Barrier(num_barriers=num_compute),
        "q_empty": plgpu.Barrier(num_barriers=num_compute),
        "k_full": plgpu.Barrier(num_barriers=stages),
        "v_full": plgpu.Barrier(num_arrivals=2 if has_labels else 1, num_barriers=stages),
        "k_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
        "v_empty": plgpu.Barrier(num_arrivals=num_compute, num_barriers=stages),
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
