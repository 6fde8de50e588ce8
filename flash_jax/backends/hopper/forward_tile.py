"""What the forward on Hopper is fed, and its arithmetic on the 64 query rows of a warpgroup against one key tile."""

import dataclasses
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import dropout, softmax
from flash_jax.backends.hopper import blocks, functions, pipeline, soft_cap
from flash_jax.backends.hopper.host import BOUNDS, LABELS
from flash_jax.backends.hopper.pipeline import COLUMNS, ROWS, WARPGROUP_ROWS, WGMMA, shared
from flash_jax.logits import base_2, logits
from flash_jax.problem import FLOAT32_TINY, Problem
from flash_jax.softmax import LOG2E

_PARTIAL_SUM_COLUMNS = 8
_LARGE = 28  # log2 of a maximum in base-2 units; below it half its last bit is at most 8, which an exponential bears
# Of a row's weights where m is the first tile's. Below the least, what p cannot hold would count: exp2 gives 0 in place of weights below
# 2^-126, and products with small values are no normal numbers; in float16 p is off by up to 2^-25. Only rows that see nothing in their
# first key tile get there. Above the largest, the inverse is no normal number.
_LEAST_SUM = {"bfloat16": 2.0**-32, "float16": 2.0**-2}
_LARGEST_SUM = 2.0**126
UNSEEN = 4  # of `Inputs.notes`, beside the bits of `host.notes`


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
    table: int32 `[9, multiprocessors, longest]`, see `Tile`; counts: int32 `[multiprocessors]`, its tiles.
    scale: float32 `[1 | batch]`.
    lists: int32 `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`, `schedule.TileLists.index`.
    notes: int8 `[1 | batch, 1 | num_q_tiles, num_kv_tiles]`, the sum of what holds of a masked tile: `UNSEEN`, that it may have keys which
      no row of the batch entry sees; with labels, `BOUNDS`, that row bounds may hide scores of it, and `LABELS`, that labels may.
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
    notes: Any = None
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
    full_begin, full_end: steps that need no mask; at least 1 once it is dealt out, for the first step is one by itself.
    visible: 0 where no row sees any key.
    b, head, q_tile: which rows. out: leading index of their results: b, or `part * batch + b` where keys are split.
    """

    steps: Any
    first: Any
    full_begin: Any
    full_end: Any
    visible: Any
    b: Any = None
    head: Any = None
    q_tile: Any = None
    out: Any = None


def kv_tile_of(g: Inputs, tile: Tile, step):
    """The key tile of a step."""
    if g.lists is None:
        return tile.first - step
    return g.lists[shared(g.lists, 0, tile.b), shared(g.lists, 1, tile.head), tile.q_tile, tile.first + step]


class Bounds(NamedTuple):
    """Which of the row bounds may hide a score."""

    lo: bool = True
    hi: bool = True


class Masked(NamedTuple):
    """Static facts about the steps.

    first, before, after: which bounds may hide scores in the first step, in those between it and the full ones, and after these; None where
      no such step has a mask.
    blank: may a tile of rows be one that sees nothing though its mask does not hide it (`Tile.visible`).
    clears: may V hold something in keys that no row sees (`Inputs.notes`).
    """

    first: Bounds | None
    before: Bounds | None
    after: Bounds | None
    blank: bool
    clears: bool


class Rows:
    """The arithmetic on 64 query rows of a warpgroup against the key tiles of its steps."""

    def __init__(self, problem: Problem, config: Config, g: Inputs, tile: Tile, q_start):
        self.problem, self.config, self.g, self.tile, self.q_start = problem, config, g, tile, q_start
        rows = lambda ref: None if ref is None else self._load(ref.at[shared(ref, 0, tile.b), self._rows()], ROWS)
        self.kv_lo, self.kv_hi, self.q_labels = rows(g.kv_lo), rows(g.kv_hi), rows(g.q_labels)
        self.row_keys = None
        if g.row_keys is not None:
            ref = g.row_keys.at[shared(g.row_keys, 0, tile.b), shared(g.row_keys, 1, tile.head), self._rows()]
            self.row_keys = self._load(ref, ROWS)
        raw = problem.logits_soft_cap is None and g.bias is None and problem.scale is not None and problem.scale * LOG2E >= FLOAT32_TINY
        self.factor = problem.scale * LOG2E if raw else None  # of raw products, folded into the exponential
        self.scale = problem.scale if g.scale is None else g.scale[shared(g.scale, 0, tile.b)]
        cap = problem.logits_soft_cap
        # Not at head_dim 256: there products set the pace, and the polynomial spills (measured: docs/dev/experiments.md).
        by_polynomial = cap is not None and cap <= soft_cap.LARGEST_CAP and g.value.shape[-1] < 256
        self._tanh = soft_cap.tanh_by_polynomial if by_polynomial else soft_cap.tanh_by_exponential

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

    def bias(self, kv_tile):
        """The tile of the bias from global memory."""
        return None if self.g.bias is None else self._elements(self.g.bias, kv_tile * self.config.block_kv)

    def notes(self, kv_tile):
        """Of `Inputs.notes`."""
        notes = self.g.notes
        return None if notes is None else notes[shared(notes, 0, self.tile.b), shared(notes, 1, self.tile.q_tile), kv_tile]

    def _keep_interval(self, s, kv_start, masked: Bounds):
        bounds = [bound if may_hide else None for bound, may_hide in zip((self.kv_lo, self.kv_hi), masked, strict=True)]
        if bounds == [None, None]:
            return s
        return pipeline.keep_interval(s, *(None if bound is None else bound - kv_start for bound in bounds))

    def _keep_equal_labels(self, s, kv_labels):
        labels = self._beside_keys(self._load(kv_labels, COLUMNS))
        plgpu.commit_smem()  # before the copy engine overwrites them
        return jnp.where(self.column(self.q_labels) == labels, s, -jnp.inf)

    def logits(self, qk, bias):
        """Raw products, or logits where more than a scale is applied, in base-2 units without a bias."""
        if bias is not None:
            return logits(qk, self.scale, self.problem.logits_soft_cap, bias.astype(jnp.float32), self._tanh, unit=1)[0]
        if self.factor is None:
            return logits(qk, self.scale, self.problem.logits_soft_cap, None, self._tanh)[0]
        return qk

    def mask(self, s, kv_tile, kv_labels, notes, masked: Bounds, blank: bool):
        """Logits where visible, else -inf.

        kv_labels: the labels of the keys in shared memory, or None. notes: of the tile, see `notes`.
        """
        kv_start = kv_tile * self.config.block_kv
        in_interval = lambda s: self._keep_interval(s, kv_start, masked)
        if self.q_labels is None:
            s = in_interval(s)
        else:
            where_noted = lambda rule, keep, s: pipeline.cond((notes & rule) != 0, keep, lambda s: s, s)
            s = where_noted(BOUNDS, in_interval, s)
            s = where_noted(LABELS, lambda s: self._keep_equal_labels(s, kv_labels), s)
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

    def no_maximum(self):
        """-inf `[64]`: that of no key."""
        return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), ROWS)

    def maximum(self, s, m):
        """m `[64]`, or the largest score of each row if that is larger, in the units of `_exponents`."""
        largest = s.max(axis=1)
        return jnp.maximum(m, largest if self.factor is None else largest * self.factor)

    def softmax(self, s, pivot, l):
        """`(p, l)`: `p = 2^(s - pivot)` and its sum over keys with l, partial sums of a row or None before the first step.

        pivot `[64]`: `softmax.pivot` of a maximum.
        """
        p = jnp.exp2(self._exponents(s, pivot))
        parts = [p[:, n : n + _PARTIAL_SUM_COLUMNS] for n in range(0, self.config.block_kv, _PARTIAL_SUM_COLUMNS)]
        total = sum(parts[1:], parts[0])
        return p, total if l is None else l + total

    def following(self, s, m, l):
        """`(m, p, l, alpha)` relative to a maximum that follows; alpha `[64]` is the weight that what came before has now."""
        m, before = self.maximum(s, m), m
        pivot = softmax.pivot(m)
        alpha = jnp.exp2(self._in_base_2(before - pivot))
        return m, *self.softmax(s, pivot, l * self.column(alpha, _PARTIAL_SUM_COLUMNS)), alpha

    def shrunk(self, m, q_s):
        """m times a power of two a row, and the queries in q_s too, so that no |m| is above 2^28, which bears the rounding of `m * factor`.

        Scores that large are alike or so far apart that only the largest count, before and after.
        """
        if self.factor is None:
            return m
        exponent = (lax.bitcast_convert_type(m, jnp.int32) >> 23) & 255
        is_large = (exponent >= 127 + _LARGE) & (exponent < 255)
        power = lax.bitcast_convert_type(jnp.where(is_large, 254 + _LARGE - 1 - exponent, 127) << 23, jnp.float32)

        def shrink(n, _):  # 64 columns at a time, for registers
            columns = q_s.at[:, pl.ds(pl.multiple_of(n * 64, 64), 64)]
            query = plgpu.load(columns, layout=WGMMA)
            columns[...] = (query.astype(jnp.float32) * self.column(power, 64)).astype(query.dtype)

        lax.fori_loop(0, q_s.shape[1] // 64, shrink, None)
        plgpu.commit_smem()
        return m * power

    def restored(self, m, kept):
        """m as it was before `shrunk`, which is kept `[64]` in shared memory. Where nothing was searched for and m is large, anything.

        `is_lost` has such rows.
        """
        if self.factor is None:
            return m
        return jnp.where(self._is_large(m), self._load(kept, ROWS), m)

    def _is_large(self, m):
        """Whether |m| is at least 2^27, as `shrunk` leaves what it has changed, or NaN or infinite."""
        return jnp.logical_not(jnp.abs(m) < 2.0 ** (_LARGE - 1))

    def _exponents(self, s, pivot):
        """`s - pivot` in base-2 units. pivot is in base-2 units but with a bias, where only the difference is sure to be finite there.

        So the pivot is the very number that is subtracted: all weights of a row are off alike by its rounding, which cancels.
        """
        x = s - self.column(pivot) if self.factor is None else s * self.factor - self.column(pivot)
        return self._in_base_2(x)

    def _in_base_2(self, difference):
        return difference if self.g.bias is None else difference * LOG2E

    def finish(self, m, l, acc):
        """`(out, lse)` in float32; m: the pivot that l and acc are relative to."""
        m = m if self.g.bias is None else base_2(m)
        return softmax.finish(m, l.sum(axis=1), acc, lambda row: self.column(row, acc.shape[1]))

    def is_lost(self, tile: Tile, m, l, out):
        """Rows that may have weights which their dtype cannot hold, of an out that `finish` gave, and those of them that have a sum: int32.

        Those which see a key and have no sum, or one too small or too large, or an m whose rounding an exponential may not bear, and those
        whose out is not finite. A row that sees nothing is among the first where neither bounds nor its only step tell. tile: that of these
        rows, as it was read last. m: the pivot.
        """
        total = l.sum(axis=1)
        fits = (total >= _LEAST_SUM[self.problem.dtype.name]) & (total < _LARGEST_SUM) & ((out * 0).sum(axis=1) == 0)
        if self.factor is not None:
            fits &= jnp.logical_not(self._is_large(m))
        lo, hi = jnp.int32(0), jnp.int32(self.problem.kv_len)
        if self.g.lists is None:
            hi = (tile.first + 1) * self.config.block_kv
            lo = hi - tile.steps * self.config.block_kv
        lo = lo if self.kv_lo is None else jnp.maximum(self.kv_lo, lo)
        hi = hi if self.kv_hi is None else jnp.minimum(self.kv_hi, hi)
        may_see = (m != 0) | (total != 0) | jnp.broadcast_to(tile.steps > 1, m.shape)  # m is 0 where none of the first tile's keys is seen
        may_see &= jnp.broadcast_to((lo < hi) & (tile.visible != 0), m.shape)
        as_words = lambda rows: jnp.where(rows, jnp.int32(1), jnp.int32(0))
        return as_words(may_see & ~fits), as_words(may_see & ~fits & (total != 0))

    def weights(self, p, kv_tile):
        """p as operand of the second product."""
        if self.row_keys is not None:
            rate = self.problem.dropout_rate
            shape = (WARPGROUP_ROWS, self.config.block_kv)
            kv_ids = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + kv_tile * self.config.block_kv
            kept = dropout.keep(self.column(self.row_keys), kv_ids, rate)
            p = jnp.where(kept, p * (1 / (1 - rate)), 0.0)
        return p.astype(self.problem.dtype)
