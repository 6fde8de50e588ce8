"""The key tiles of 64 query rows on a warpgroup of the forward: products, the softmax beside them, and whom they wait for."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from flash_jax import softmax
from flash_jax.backends.hopper import clean, pipeline
from flash_jax.backends.hopper.forward_tile import UNSEEN, Bounds, Masked, Rows, kv_tile_of
from flash_jax.backends.hopper.pipeline import WGMMA


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads; None where a call has no use for it. `_full`: copied; `_empty`: read."""

    q_s: Any
    k_s: Any
    v_s: Any
    lse_s: Any
    words_s: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    all_attended: Any
    labels_s: Any = None
    labels_full: Any = None
    bias_s: Any = None
    bias_full: Any = None
    bias_empty: Any = None
    v_marked: Any = None
    out_s: Any = None


class Steps:
    """A tile of rows. acc: reference of the accumulator of out, 0. late: softmax after the wait for the second product."""

    def __init__(self, rows: Rows, masked: Masked, scratch: Scratch, acc, wg, late: bool):
        self.rows, self.masked, self.scratch, self.acc, self.wg, self.late = rows, masked, scratch, acc, wg, late
        self.config, self.tile = rows.config, rows.tile
        # float16 has little room: where only some rows see the first key tile, m follows through the masked steps before the full ones.
        self.follows = rows.problem.dtype.name == "float16" and masked.before is not None

    def attend(self, count, m):
        """`(pivot, l, O)` after `count` steps on other tiles. m `[64]`: -inf, or the maximum of each row over all its keys."""
        masked, tile = self.masked, self.tile
        carry = self._first_step(count, m)
        if masked.first is None:
            carry = self._steps(1, tile.steps, count, None, carry)
        else:
            if masked.before is not None:
                carry = self._steps(1, tile.full_begin, count, masked.before, carry, self.follows)
                if self.follows:
                    carry = softmax.pivot(carry[0]), *carry[1:]
            carry = self._steps(tile.full_begin, tile.full_end, count, None, carry)
            if masked.after is not None:
                carry = self._steps(tile.full_end, tile.steps, count, masked.after, carry)
        m, l, p16 = carry
        if self.config.separate_out:
            plgpu.barrier_arrive(self.scratch.q_empty.at[self.wg])
        slot = self._slot(count + tile.steps - 1)
        self._second_product(p16, slot)
        acc = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
        plgpu.barrier_arrive(self.scratch.v_empty.at[slot])
        return m, l, acc

    def search(self, count):
        """The maximum of each row over all its keys."""

        def step(j, m):
            slot, kv_tile = self._slot(count + j), kv_tile_of(self.rows.g, self.tile, j)
            s = self._logits(self._first_product(slot), slot, kv_tile)
            if self.masked.first is not None:
                hide = lambda s: self._hide(s, slot, kv_tile, self.rows.notes(kv_tile), Bounds(), self.masked.blank)
                s = pipeline.cond((j < self.tile.full_begin) | (self.tile.full_end <= j), hide, lambda s: s, s)
            plgpu.barrier_wait(self.scratch.v_full.at[slot])  # V is copied too, and not read
            plgpu.barrier_arrive(self.scratch.v_empty.at[slot])
            return self.rows.maximum(s, m)

        return lax.fori_loop(0, self.tile.steps, step, self.rows.no_maximum())

    def _first_step(self, count, m):
        slot = self._slot(count)
        qk = self._first_product(slot)
        kv_tile, mask = kv_tile_of(self.rows.g, self.tile, 0), self.masked.first
        notes = None if mask is None else self.rows.notes(kv_tile)
        s = self._hide(self._logits(qk, slot, kv_tile), slot, kv_tile, notes, mask, self.masked.blank)
        m = self.rows.maximum(s, m)
        pivot = softmax.pivot(m)
        p, l = self.rows.softmax(s, pivot, None)
        p16 = self.rows.weights(p, kv_tile)
        self._clear(p16, slot, notes)
        return (m if self.follows else pivot), l, p16

    def _steps(self, lower, upper, count, mask, carry, follows=False):
        return lax.fori_loop(lower, upper, lambda j, carry: self._step(j, count, mask, carry, follows), carry)

    def _step(self, j, count, mask, carry, follows):
        """The second product of a step runs beside the first one of the next, and beside its softmax.

        m of carry: the pivot, or, while it follows, the maximum.
        """
        m, l, p16 = carry
        slot, v_slot = self._slot(count + j), self._slot(count + j - 1)
        kv_tile = kv_tile_of(self.rows.g, self.tile, j)
        notes = None if mask is None else self.rows.notes(kv_tile)

        def probs():
            s = self._hide(self._logits(qk, slot, kv_tile), slot, kv_tile, notes, mask)
            return self.rows.following(s, m, l) if follows else (m, *self.rows.softmax(s, m, l), None)

        qk = self._both_products(slot, p16, v_slot)
        if not self.late:
            m, p, l, alpha = probs()
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.scratch.v_empty.at[v_slot])
        if self.late:
            m, p, l, alpha = probs()
        p16 = self.rows.weights(p, kv_tile)  # not before the wait: at head_dim 256 that serialises the products
        if alpha is not None:
            out = plgpu.wgmma_accumulator_load(self.acc, wait_n=0)
            self.acc[...] = out * self.rows.column(alpha, out.shape[1])
        self._clear(p16, slot, notes)
        return m, l, p16

    def _slot(self, count):
        return pipeline.remainder(count, self.config.stages)

    def _first_product(self, slot):
        """Q K^T with nothing beside it."""
        plgpu.barrier_wait(self.scratch.k_full.at[slot])
        qk = pipeline.finish_product(self._in_turn(lambda: self._start_first(slot)), 0)
        plgpu.barrier_arrive(self.scratch.k_empty.at[slot])
        return qk

    def _both_products(self, slot, p16, v_slot):
        """Q K^T, and the other one still at work. The turn ends with Q K^T (measured: docs/dev/experiments.md)."""

        def run():
            qk = self._start_first(slot)
            self._second_product(p16, v_slot)
            return pipeline.finish_product(qk, 1)

        plgpu.barrier_wait(self.scratch.k_full.at[slot])
        qk = self._in_turn(run)
        plgpu.barrier_arrive(self.scratch.k_empty.at[slot])
        return qk

    def _start_first(self, slot):
        return pipeline.start_product(self.scratch.q_s.at[self.wg], self.scratch.k_s.at[slot])

    def _in_turn(self, run):
        if not self.config.take_turns:
            return run()
        pipeline.await_turn(self.wg)
        result = run()
        pipeline.pass_turn(pipeline.remainder(self.wg + 1, self.config.warpgroups))
        return result

    def _second_product(self, p16, slot):
        if not self.masked.clears:
            plgpu.barrier_wait(self.scratch.v_full.at[slot])
        plgpu.wgmma(self.acc, p16, self.scratch.v_s.at[slot])

    def _logits(self, qk, slot, kv_tile):
        if self.scratch.labels_full is not None:
            plgpu.barrier_wait(self.scratch.labels_full.at[slot])
        if self.scratch.bias_s is None:
            return self.rows.logits(qk, self.rows.bias(kv_tile))
        plgpu.barrier_wait(self.scratch.bias_full.at[self.wg])
        s = self.rows.logits(qk, plgpu.load(self.scratch.bias_s.at[self.wg], layout=WGMMA))
        plgpu.commit_smem()  # before the copy engine overwrites it
        plgpu.barrier_arrive(self.scratch.bias_empty.at[self.wg])
        return s

    def _hide(self, s, slot, kv_tile, notes, mask, blank=False):
        if mask is None:
            return s
        labels = None if self.scratch.labels_s is None else self.scratch.labels_s.at[slot]
        return self.rows.mask(s, kv_tile, labels, notes, mask, blank)

    def _clear(self, p16, slot, notes):
        """What V holds in keys whose weights are all 0 is not there for the product to come."""
        if self.masked.clears:
            plgpu.barrier_wait(self.scratch.v_full.at[slot])
        if notes is not None:
            pipeline.when((notes & UNSEEN) != 0)(lambda: self._clear_columns(p16, slot))

    def _clear_columns(self, p16, slot):
        words, v = self.scratch.words_s, self.scratch.v_s.at[slot]
        clean.mark_columns(p16, words.at[self.wg])
        pipeline.meet(self.scratch.v_marked)
        clean.clear_rows(words, v, self.config.v_swizzle, self.wg, self.config.warpgroups)
        pipeline.meet(self.scratch.v_marked)
