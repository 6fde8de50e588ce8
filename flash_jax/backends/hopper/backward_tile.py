"""What the backward kernels share: their inputs, the walk over query tiles, and the arithmetic of one score tile.

Score tiles keep keys as rows: `[64, block_q]` a warpgroup, in the layout of a wgmma accumulator. A mask is then a pair of bounds a
key, the transpose of the row bounds: key `k` is seen by the queries in `[q_lo(k), q_hi(k))`.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import dropout
from flash_jax.backends.hopper import blocks, functions, pipeline, soft_cap
from flash_jax.backends.hopper.host import BOUNDS, LABELS
from flash_jax.backends.hopper.pipeline import WARPGROUP_ROWS, WGMMA, shared, swizzled
from flash_jax.logits import dscores, logits
from flash_jax.problem import Problem
from flash_jax.schedule import EMPTY
from flash_jax.softmax import LOG2E, dlogits, log2_probs

WARPGROUPS = 2
KEYS, QUERIES = pipeline.ROWS, pipeline.COLUMNS
_SECTION_BYTES = 32 * 2**20
_KEEP_COLUMNS = 64  # of a matrix that is cleaned, in registers at once


class Inputs(NamedTuple):
    """Operands of a kernel, a feature that is absent being None. `q_pad`, `kv_pad`: lengths padded to whole tiles.

    query, dout, key, value: `[batch, len, heads, head_dim]`, head_dim padded; lengths as they are.
    pivot, delta: float32 `[batch, num_heads, q_pad]`: lse, base 2 or with a bias natural, +inf for an empty row; `sum(out * dout) - dlse`.
    lost: int32 `[1]`, with a bias: nonzero where an lse has lost log(l); pivot is m then, and log2_l, float32 like it, log2(l).
    scale: float32 `[1 | batch]`.
    ranges: int32 `[1 | batch, num_kv_tiles, 4]`: `schedule.Ranges` of q tiles.
    notes: int8 `[1 | batch, num_kv_tiles, num_q_tiles]`, with labels: which of bounds and labels may hide scores, see `host.notes`.
    lists: int32 `[1 | batch, 1 | num_kv_heads, num_kv_tiles, 2 + num_q_tiles]`: full_end, end and index of `schedule.TileLists`.
    kinds: int32 `[1 | batch, 1 | num_heads, num_kv_tiles, num_q_tiles]`, kinds of `schedule` where what is visited may be hidden:
      heads of a group differ.
    unseen_tiles: int32 `[1 | batch, 1 | num_kv_heads, num_kv_tiles]`, 0 where a query sees each key of the tile, or no query sees any; None
      where that is so in every tile.
    seen: int32 `[1 | batch, 1 | num_kv_heads, kv_pad]`, nonzero where a query sees the key; None where a block has to find out itself.
    empty_tiles: int32 `[batch, num_heads, num_q_tiles]`, nonzero where a row of the tile sees nothing; None where no row can.
    q_lo, q_hi: int32 `[1 | batch, kv_pad]`; no q_hi where no key stops being seen.
    q_labels, kv_labels: int32 `[1 | batch, 1, q_pad]`, `[1 | batch, kv_pad]`.
    dense: int32 or int8 `[1 | batch, 1 | num_heads, 1 | kv_pad, 1 | q_pad]`, nonzero = visible.
    bias: `[1 | batch, 1 | num_heads, 1 | kv_pad, 1 | q_pad]`; `[.., .., q_pad, kv_pad]` where it is copied (`is_copied`).
    row_keys: uint32 `[1 | batch, 1 | num_heads, q_pad]`.
    functions: operands of each mask function, `[1 | batch, len]`, see `functions.as_words`; batch_ids: int32 `[batch]`, what it sees.
    blocks: by number of a block map whose blocks are not whole tiles, `blocks.as_bits` of its transpose.
    turns: int32 `[1 | batch, 1 | num_kv_heads, num_kv_tiles, num_q_tiles]`, `turns.table`; None where dq adds up in any order.
    """

    query: Any
    key: Any
    value: Any
    dout: Any
    pivot: Any
    delta: Any
    lost: Any = None
    log2_l: Any = None
    scale: Any = None
    ranges: Any = None
    notes: Any = None
    lists: Any = None
    kinds: Any = None
    seen: Any = None
    unseen_tiles: Any = None
    empty_tiles: Any = None
    q_lo: Any = None
    q_hi: Any = None
    q_labels: Any = None
    kv_labels: Any = None
    dense: tuple = ()
    bias: Any = None
    row_keys: Any = None
    functions: tuple = ()
    batch_ids: Any = None
    blocks: Any = None
    turns: Any = None


def grid(problem: Problem, inputs: Inputs, block_kv: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Blocks of threads as (section, key tile, kv head of the section), the last one fastest.

    A section is as many (batch, kv head) as keep their queries, dout and dq in the second-level cache. Where the mask makes key
    tiles unequal the long ones come first over a whole section, so that blocks end together; else one head after the other.
    """
    heads = problem.batch * problem.num_kv_heads
    per_head = problem.q_len * inputs.query.shape[-1] * 8  # one query head at a time: two inputs of 2 bytes, dq of 4
    limit = 1 if inputs.ranges is None and inputs.lists is None else max(1, _SECTION_BYTES // per_head)
    section = max(n for n in range(1, min(heads, limit) + 1) if heads % n == 0)
    return (heads // section, pl.cdiv(problem.kv_len, block_kv), section), ("section", "kv", "head")


def position(problem: Problem):
    """`(batch, kv_head, key tile)` of this block of threads."""
    head = lax.axis_index("section") * lax.axis_size("head") + lax.axis_index("head")
    return lax.div(head, problem.num_kv_heads), lax.rem(head, problem.num_kv_heads), lax.axis_index("kv")


class Walk:
    """The steps of one block of threads: every query head of its group, and for each the q tiles that see its keys.

    masked_first: the q tiles that need a mask come before those that need none, for all heads, each in a loop of its own; else every
    step asks. Not where blocks take turns, who visit q tiles in one order.
    """

    def __init__(self, problem: Problem, refs: Inputs, block_q: int, b, kv_head, kv_tile, masked_first: bool = False):
        self.group, self.block_q, self.b, self.kv_head = problem.group, block_q, b, kv_head
        self.full_begin = self.full_end = self.row = self.turns = None
        if refs.turns is not None:
            self.turns = refs.turns.at[shared(refs.turns, 0, b), shared(refs.turns, 1, kv_head), kv_tile]
        if refs.lists is not None:
            self.row = refs.lists.at[shared(refs.lists, 0, b), shared(refs.lists, 1, kv_head), kv_tile]
            self.begin, self.full_begin, self.full_end, self.tiles = 0, 0, self.row[0], self.row[1]
        elif refs.ranges is not None:
            row = refs.ranges.at[shared(refs.ranges, 0, b), kv_tile]
            self.begin, self.full_begin, self.full_end = row[0], row[1], row[2]
            self.tiles = row[3] - self.begin
        else:
            self.begin = jnp.int32(0)  # traced: a slice at a known place must lie in the array, and the second tile may not be there
            self.tiles = -(-problem.q_len // block_q)
        self.steps = self.tiles * self.group
        self.masked_first = masked_first and self.full_end is not None
        if self.masked_first:
            self.masked = self.tiles - (self.full_end - self.full_begin)  # of each head
            self.masked_steps = self.masked * self.group

    def _split(self, i):
        """Head of the group, and which of its tiles, in step i."""
        if self.turns is not None:  # see `turns`
            return lax.rem(i, self.group), self.tiles - 1 - lax.div(i, self.group)
        if not self.masked_first:
            head = lax.div(i, self.tiles) if self.group > 1 else 0
            return head, i - head * self.tiles
        is_masked, lead = i < self.masked_steps, self.full_begin - self.begin
        n, head = jnp.where(is_masked, i, i - self.masked_steps), 0
        if self.group > 1:
            tiles = jnp.where(is_masked, self.masked, self.tiles - self.masked)
            head = lax.div(n, tiles)
            n -= head * tiles
        after = jnp.where(n < lead, n, n + self.tiles - self.masked)  # past the full ones, which stand between
        return head, jnp.where(is_masked, after, n + lead)

    def __call__(self, i):
        """Query head and q tile of step i."""
        head, n = self._split(i)
        tile = self.begin + n if self.row is None else self.row[2 + n]
        return self.kv_head * self.group + head, tile

    def is_full(self, i):
        """No mask is needed in step i."""
        _, n = self._split(i)
        tile = self.begin + n
        return (tile >= self.full_begin) & (tile < self.full_end)

    def load(self, i, barrier, matrix, matrix_s, numbers: tuple) -> None:
        """Start copying what step i reads to its slot in shared memory.

        matrix: `[batch, q_len, heads, head_dim]`. numbers: pairs of `[1 | batch, 1 | heads, q_pad]` and where its tiles go.
        """
        head, tile = self(i)
        slot, rows = slot_of(i, matrix_s), pl.ds(tile * self.block_q, self.block_q)
        barrier = barrier if matrix_s.shape[0] == 1 else barrier.at[slot]
        plgpu.copy_gmem_to_smem(matrix.at[self.b, rows, head], matrix_s.at[slot], barrier)
        for row, row_s in numbers:
            plgpu.copy_gmem_to_smem(row.at[shared(row, 0, self.b), shared(row, 1, head), rows], row_s.at[slot], barrier)

    def for_each(self, step) -> None:
        """Run `step(i, partial)`, partial being static."""

        def one(i, _):
            full = self.is_full(i)
            pipeline.when(full)(lambda: step(i, False))
            pipeline.when(jnp.logical_not(full))(lambda: step(i, True))

        if self.masked_first:
            lax.fori_loop(0, self.masked_steps, lambda i, _: step(i, True), None)
            lax.fori_loop(self.masked_steps, self.steps, lambda i, _: step(i, False), None)
        else:
            lax.fori_loop(0, self.steps, one if self.full_end is not None else lambda i, _: step(i, False), None)


def slot_of(i, staged):
    """Where step i finds its tile in shared memory `[stages, ...]`."""
    return 0 if staged.shape[0] == 1 else pipeline.remainder(i, staged.shape[0])


def opaque_zero(i):
    """0 for a number that is new in every step, unknown to the compiler: it hoists no descriptors of K and V (and spills none)."""
    return lax.shift_right_logical(i, 24)


def store(ref, x) -> None:
    """To global memory from registers, in sectors that may be partial: JAX 0.12 wants that said, 0.11 has no word for it."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


class ScoreTile:
    """The arithmetic on 64 keys of a warpgroup against the q tiles of the walk."""

    def __init__(self, problem: Problem, refs: Inputs, block_q: int, b, kv_tile, key_start):
        self.problem, self.refs, self.block_q = problem, refs, block_q
        self.b, self.kv_tile, self.key_start = b, kv_tile, key_start
        self.scale = problem.scale if refs.scale is None else refs.scale[shared(refs.scale, 0, b)]
        self.q_lo, self.q_hi = self._keys(refs.q_lo), self._keys(refs.q_hi)
        self.kv_labels = self._keys(refs.kv_labels)

    def has_unseen_keys(self, walk: Walk):
        unseen = self.refs.unseen_tiles
        return unseen[shared(unseen, 0, self.b), shared(unseen, 1, walk.kv_head), self.kv_tile] != 0

    def keep_keys(self, walk: Walk, *refs) -> None:
        """Zero the rows of K, V `[64, head_dim]` that no query of the walk sees."""
        seen = self.refs.seen
        seen = self._seen(walk) if seen is None else self._keys(seen.at[:, shared(seen, 1, walk.kv_head)]) != 0
        for ref in refs:
            keep_rows(ref, seen)

    def _seen(self, walk: Walk):
        """Booleans `[64]`, by the mask of every step and by rows that are not empty."""

        def step(i, best):
            head, tile = walk(i)
            pivot = self._load(self.refs.pivot.at[self.b, head, pl.ds(tile * self.block_q, self.block_q)], QUERIES)
            return jnp.maximum(best, self._visible(self.beside_queries(-pivot), self.labels(tile), head, tile))

        nothing = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS, self.block_q), -jnp.inf, jnp.float32), WGMMA)
        return lax.fori_loop(0, walk.steps, step, nothing).max(axis=1) > -jnp.inf

    def has_empty_rows(self, head, tile):
        return self.refs.empty_tiles[self.b, head, tile] != 0

    def keep_queries(self, ref, pivot) -> None:
        """Zero the rows of Q, dO `[block_q, head_dim]` that see nothing: their pivot is +inf."""
        for start in range(0, self.block_q, WARPGROUP_ROWS):
            rows = pl.ds(start, WARPGROUP_ROWS)
            keep_rows(ref.at[rows], self._load(pivot.at[rows], KEYS) < jnp.inf)

    def _load(self, ref, layout):
        return plgpu.load(ref, layout=layout, optimized=False)

    def _keys(self, ref):
        if ref is None:
            return None
        return self._load(ref.at[shared(ref, 0, self.b), pl.ds(self.key_start, WARPGROUP_ROWS)], KEYS)

    def _key_ids(self):
        return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=KEYS) + self.key_start

    def beside_queries(self, row):
        return lax.broadcast_in_dim(row, (WARPGROUP_ROWS, self.block_q), [1])

    def _beside_keys(self, row):
        return lax.broadcast_in_dim(row, (WARPGROUP_ROWS, self.block_q), [0])

    def queries(self, ref):
        """One value a query, in shared or global memory, beside the tile."""
        return self.beside_queries(self._load(ref, QUERIES))

    def _elements(self, ref, head, q_start):
        """A tile of `[1 | batch, 1 | heads, 1 | kv_pad, 1 | q_pad]` in global memory."""
        ref = ref.at[shared(ref, 0, self.b), shared(ref, 1, head)]
        keys, queries = pl.ds(self.key_start, WARPGROUP_ROWS), pl.ds(q_start, self.block_q)
        one_key, one_query = ref.shape[0] == 1, ref.shape[1] == 1
        if one_key and one_query:
            return lax.broadcast_in_dim(ref[0, 0], (WARPGROUP_ROWS, self.block_q), [])
        if one_key:
            return self.queries(ref.at[0, queries])
        if one_query:
            return self._beside_keys(self._load(ref.at[keys, 0], KEYS))
        return self._load(ref.at[keys, queries], WGMMA)

    def labels(self, tile):
        """Reference to the labels of the tile's queries, in global memory."""
        labels = self.refs.q_labels
        return None if labels is None else labels.at[shared(labels, 0, self.b), 0, pl.ds(tile * self.block_q, self.block_q)]

    def bias(self, head, tile):
        if self.refs.bias is None:
            return None
        return self._elements(self.refs.bias, head, tile * self.block_q).astype(jnp.float32)

    def weights(self, qk, pivot, q_labels, head, tile, partial, bias=None):
        """`(p, weight)`: probabilities, and the same times the derivative of the soft cap.

        pivot, q_labels: references to the pivots and the labels of the tile's queries. partial: whether the tile needs a mask, a
        boolean known now or not.
        """
        s, tanh = self.masked_logits(qk, q_labels, head, tile, partial, bias)
        exponent = log2_probs(s, pivot, self.queries, unit=1 if bias is None else LOG2E)
        if bias is not None:
            log2_l = self.refs.log2_l.at[self.b, head, pl.ds(tile * self.block_q, self.block_q)]
            exponent = pipeline.cond(self.refs.lost[0] != 0, lambda x: x - self.queries(log2_l), lambda x: x, exponent)
        p = jnp.exp2(exponent)
        return p, dscores(p, tanh)

    def masked_logits(self, qk, q_labels, head, tile, partial, bias):
        """As `logits.logits`, in natural units with a bias; -inf where masked."""
        s, tanh = logits(
            qk, self.scale, self.problem.logits_soft_cap, bias, soft_cap.tanh_by_exponential, unit=LOG2E if bias is None else 1
        )
        visible = lambda s: self._visible(s, q_labels, head, tile)
        if isinstance(partial, jax.Array):
            s = pipeline.cond(partial, visible, lambda s: s, s)
        elif partial:
            s = visible(s)
        return s, tanh

    def dscores(self, weight, dp, delta):
        """Cotangent of `scale * q . k`; delta: reference."""
        return dlogits(weight, dp, delta, self.queries)

    def dropout(self, head, tile):
        """A function that drops and rescales `[64, block_q]` values, or the identity."""
        keys = self.refs.row_keys
        if keys is None:
            return lambda x: x
        rate, q_start = self.problem.dropout_rate, tile * self.block_q
        row_keys = self.queries(keys.at[shared(keys, 0, self.b), shared(keys, 1, head), pl.ds(q_start, self.block_q)])
        kv_ids = self._beside_keys(self._key_ids())
        kept = dropout.keep(row_keys, kv_ids, rate)
        return lambda x: jnp.where(kept, x * (1 / (1 - rate)), 0.0)

    def _visible(self, s, q_labels, head, tile):
        start = tile * self.block_q
        in_interval = lambda s: pipeline.keep_interval(s, self.q_lo - start, None if self.q_hi is None else self.q_hi - start)
        if self.kv_labels is not None:
            noted = self.refs.notes[shared(self.refs.notes, 0, self.b), self.kv_tile, tile]
            alike = lambda s: jnp.where(self.queries(q_labels) == self._beside_keys(self.kv_labels), s, -jnp.inf)
            s = pipeline.cond((noted & BOUNDS) != 0, in_interval, lambda s: s, s)
            s = pipeline.cond((noted & LABELS) != 0, alike, lambda s: s, s)
        elif self.q_lo is not None:
            s = in_interval(s)
        if self.refs.kinds is not None:
            kind = self.refs.kinds.at[shared(self.refs.kinds, 0, self.b), shared(self.refs.kinds, 1, head)][self.kv_tile, tile]
            s = jnp.where(lax.broadcast_in_dim(kind != EMPTY, s.shape, []), s, -jnp.inf)
        for ref in self.refs.dense:
            s = jnp.where(self._elements(ref, head, start) != 0, s, -jnp.inf)
        for n, ref in (self.refs.blocks or {}).items():
            words = ref.at[shared(ref, 0, self.b), shared(ref, 1, head)]
            row = lax.div(self._key_ids(), jnp.int32(self.problem.mask.block_sizes[n][1]))
            row = jnp.minimum(row, words.shape[0] - 1)  # of keys past the end
            s = blocks.keep_blocks(s, words, row, lax.div(start, jnp.int32(blocks.WORD)))
        for function, refs in zip(self.problem.mask.functions, self.refs.functions, strict=True):
            s = jnp.where(self._by_function(function, refs, head, start), s, -jnp.inf)
        return s

    def _by_function(self, function, refs, head, q_start):
        queries = pl.ds(q_start, self.block_q)

        def read(kind, ref):
            ref = ref.at[shared(ref, 0, self.b)]
            match kind:
                case "query":
                    return self.queries(ref.at[queries])
                case "key":
                    return self._beside_keys(self._load(ref.at[pl.ds(self.key_start, WARPGROUP_ROWS)], KEYS))
                case "head":
                    return ref[head]
                case _:
                    return ref[...]

        q_ids = self.beside_queries(plgpu.broadcasted_iota(jnp.int32, (self.block_q,), 0, layout=QUERIES) + q_start)
        kv_ids = self._beside_keys(self._key_ids())
        batch = self.refs.batch_ids[shared(self.refs.batch_ids, 0, self.b)]
        operands = map(read, function.kinds, refs)
        return functions.evaluate(function, q_ids.shape, batch, head, q_ids, kv_ids, *operands)


def is_copied(bias) -> bool:
    """Whether the copy engine brings tiles of the bias to shared memory: of what has two bytes for each score."""
    return bias is not None and 1 not in bias.shape[2:] and bias.dtype.itemsize == 2


class BiasTile:
    """Tiles of a bias that is copied, `[64 keys, block_q]`, the keys those of one warpgroup.

    tile_s: `[block_q, 64]` in shared memory, see `bias_scratch`. cells: `[1 | batch, 1 | num_heads, q_pad, kv_pad]` in global memory.
    """

    def __init__(self, tile_s, barrier, key_start, b):
        self.tile_s, self.barrier, self.b, self.keys = tile_s, barrier, b, pl.ds(key_start, WARPGROUP_ROWS)

    def _cells(self, cells, head, tile):
        block_q = self.tile_s.shape[0]
        return cells.at[shared(cells, 0, self.b), shared(cells, 1, head), pl.ds(tile * block_q, block_q), self.keys]

    def start_load(self, cells, head, tile) -> None:
        plgpu.copy_gmem_to_smem(self._cells(cells, head, tile), self.tile_s, self.barrier)

    def await_load(self) -> jax.Array:
        plgpu.barrier_wait(self.barrier)
        return self.read()

    def read(self) -> jax.Array:
        return plgpu.load(self.tile_s.transpose((1, 0)), layout=WGMMA).astype(jnp.float32)

    def store(self, x: jax.Array, cells, head, tile) -> None:
        """Put x there, by way of the shared memory."""
        self.tile_s.transpose((1, 0))[...] = x.astype(self.tile_s.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.tile_s, self._cells(cells, head, tile))


def labels_scratch(inputs: Inputs, stages: int, block_q: int) -> dict:
    """`labels_s` of a kernel, for the labels of query tiles; empty where there are none."""
    return {} if inputs.q_labels is None else {"labels_s": plgpu.SMEM((stages, block_q), jnp.int32)}


def bias_scratch(bias, block_q: int, warpgroups: int) -> dict:
    """`bias_s` and `bias_bar` of a kernel, for that many warpgroups; empty where the bias is not copied."""
    if not is_copied(bias):
        return {}
    tiles = swizzled((warpgroups, block_q, WARPGROUP_ROWS), bias.dtype)
    return {"bias_s": tiles, "bias_bar": plgpu.Barrier(num_barriers=warpgroups)}


def keep_rows(ref, kept) -> None:
    """Zero the rows of a matrix in shared memory `[64, columns]` where `kept` (booleans `[64]`) is not: no 0 * NaN in a product."""
    for start in range(0, ref.shape[-1], _KEEP_COLUMNS):
        part = ref.at[:, pl.ds(start, _KEEP_COLUMNS)]
        x = plgpu.load(part, layout=WGMMA)
        part[...] = jnp.where(lax.broadcast_in_dim(kept, x.shape, [0]), x, jnp.zeros_like(x))


def call(body, problem: Problem, inputs: Inputs, block_kv: int, scratch: dict, dq, done) -> tuple[jax.Array, jax.Array]:
    """Run `body(g, dq, done, dk, dv, **scratch)` in every block of threads, two warpgroups each; `(dk, dv)`.

    g: `Inputs` of references. dq, done: references that blocks add to; done is None where dq adds up in any order.
    """
    leaves, tree = jax.tree.flatten((inputs, dq, done))

    def flat_body(*refs, **scratch_refs):
        g, dq_g, done_g = jax.tree.unflatten(tree, refs[: len(leaves)])
        body(g, dq_g, done_g, *refs[len(leaves) :], **scratch_refs)

    grid_sizes, grid_names = grid(problem, inputs, block_kv)
    kernel = plgpu.kernel(
        flat_body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.key, inputs.value)],
        grid=grid_sizes,
        grid_names=grid_names,
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name=f"flash_attention_backward_d{inputs.query.shape[-1]}",
    )
    return tuple(kernel(*leaves))
