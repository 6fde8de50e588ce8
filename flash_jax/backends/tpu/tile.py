"""One tile of scores inside a kernel: its operands oriented, what of it is visible, its logits, its dropout."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import dropout
from flash_jax.backends.tpu import edge, plan
from flash_jax.backends.tpu.config import LANES, Tiles
from flash_jax.backends.tpu.launch import Arrays, Ids
from flash_jax.logits import logits
from flash_jax.problem import Problem
from flash_jax.schedule import num_tiles

Array = jax.Array

_SINGLE_PASS = ("default", "fastest", "bfloat16", "BF16_BF16_F32")  # of `jax.default_matmul_precision`
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # contracted axes of a.b, a.bT, aT.b


def dot(problem: Problem, a: Array, b: Array, axes) -> Array:
    """A product in float32; float32 operands are not rounded to bfloat16 unless `jax.default_matmul_precision` says so."""
    a, b = a.astype(problem.dtype), b.astype(problem.dtype)
    exact = problem.dtype.itemsize == 4 and problem.matmul_precision not in _SINGLE_PASS
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def across(x: Array) -> Array:
    """Transpose `[1, n]` or `[n, 1]` of 32-bit numbers."""
    if x.shape[0] == 1:
        return jnp.broadcast_to(x, (LANES, x.shape[1])).T[:, :1]
    return jnp.broadcast_to(x, (x.shape[0], LANES)).T[:1]


def transpose(x: Array) -> Array:
    """Of a tile or of what broadcasts against one."""
    return x if x.shape == (1, 1) else across(x) if 1 in x.shape else x.T


class Tile:
    """Keys `start` to `start + width` of the resident ones against some rows of the q tile.

    keys_first: the tile is `[width, rows]`, else `[rows, width]`. A number a row or a number a key broadcasts against it.
    """

    def __init__(
        self, problem: Problem, tiles: Tiles, refs: Arrays, ids: Ids, first_tile, start, width: int, rows: slice, *, keys_first: bool
    ):
        self.problem, self.tiles, self.refs, self.ids, self.keys_first = problem, tiles, refs, ids, keys_first
        self.rows, self.num_keys, self.start, self.first_tile = rows, width, start, first_tile
        self.first_key = first_tile * tiles.block_kv + start
        self.slice = pl.ds(pl.multiple_of(start, tiles.lanes), width)

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def row(self, ref) -> Array:
        """Numbers a row, from `[1, block_q]`."""
        x = ref[:, self.rows]
        if self.keys_first:
            return x
        if self.num_keys % LANES:
            return across(x)
        return jnp.tile(jnp.broadcast_to(x, (LANES, self.num_rows)).T, (1, self.num_keys // LANES))

    def _key(self, ref) -> Array:
        x = ref[:, self.slice]
        return across(x) if self.keys_first else x

    def _both(self, ref) -> Array:
        """Of an array `[1 | block_q, 1 | resident]`, widened to 32 bits."""
        rows = slice(None) if ref.shape[0] == 1 else self.rows
        x = ref[rows, :] if ref.shape[1] == 1 else ref[rows, self.slice]
        x = x.astype(jnp.float32)
        return transpose(x) if self.keys_first else x

    def _iota(self, of_keys: bool) -> Array:
        n = self.num_keys if of_keys else self.num_rows
        axis = 0 if of_keys == self.keys_first else 1
        return lax.broadcasted_iota(jnp.int32, (n, 1) if axis == 0 else (1, n), axis)

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        shape = (self.num_rows, self.num_keys)
        return shape[::-1] if self.keys_first else shape

    @functools.cached_property
    def q_ids(self) -> Array:
        return self.ids.i * self.tiles.block_q + self.rows.start + self._iota(of_keys=False)

    @functools.cached_property
    def kv_ids(self) -> Array:
        return self.first_key + self._iota(of_keys=True)

    @functools.cached_property
    def bias(self) -> Array | None:
        return None if self.refs.bias is None else self._both(self.refs.bias)

    @property
    def scale(self):
        return self.problem.scale if self.refs.scale is None else self.refs.scale[0, 0]

    def product(self, of_rows: Array, of_keys: Array) -> Array:
        """A tile of the inner products of `[rows, dim]` and `[width, dim]`."""
        return dot(self.problem, of_keys, of_rows, NT) if self.keys_first else dot(self.problem, of_rows, of_keys, NT)

    def over_rows(self, x: Array, of_rows: Array) -> Array:
        """`[width, dim]`: a tile's numbers times `[rows, dim]`, summed over the rows."""
        return dot(self.problem, x, of_rows, NN if self.keys_first else TN)

    def over_keys(self, x: Array, of_keys: Array) -> Array:
        """`[rows, dim]`: a tile's numbers times `[width, dim]`, summed over the keys."""
        return dot(self.problem, x, of_keys, TN if self.keys_first else NN)

    def logits(self, qk: Array) -> tuple[Array, Array | None]:
        """See `flash_jax.logits.logits`."""
        return logits(qk, self.scale, self.problem.logits_soft_cap, self.bias)

    def hide(self, s: Array, band: edge.Band) -> tuple[Array, bool]:
        """Scores of this tile, a band's, that are -inf where hidden; and whether any may be. A bias of -inf hides too."""
        axis, parts = 0 if self.keys_first else 1, []
        for cut in band.cuts:
            keys = slice(cut.begin - band.keys.start, cut.end - band.keys.start)
            part = self._part(slice(0, self.num_rows), keys)
            terms, scores = part._mask(cut), lax.slice_in_dim(s, keys.start, keys.stop, axis=axis)
            if terms:
                scores = jnp.where(jnp.broadcast_to(functools.reduce(jnp.logical_and, terms), part.shape), scores, -jnp.inf)
            parts.append((scores, bool(terms)))
        scores, hidden = zip(*parts, strict=True)
        return jnp.concatenate(scores, axis), any(hidden)

    def of(self, band: edge.Band) -> "Tile":
        """The rows and keys of a band."""
        return self._part(band.rows, band.keys)

    def _part(self, rows: slice, keys: slice) -> "Tile":
        if (rows.start, keys.start) == (0, 0) and (rows.stop, keys.stop) == (self.num_rows, self.num_keys):
            return self
        start, rows = self.start + keys.start, slice(self.rows.start + rows.start, self.rows.start + rows.stop)
        width = keys.stop - keys.start
        return Tile(self.problem, self.tiles, self.refs, self.ids, self.first_tile, start, width, rows, keys_first=self.keys_first)

    def scores_of(self, x: Array, band: edge.Band) -> Array:
        """What a band has of a tile's numbers."""
        return x[band.keys, band.rows] if self.keys_first else x[band.rows, band.keys]

    def join(self, parts: list[Array], bands: tuple[edge.Band, ...]) -> Array:
        """A tile's numbers from those of its bands, 0 where no band has any."""
        along = 1 if self.keys_first else 0

        def all_keys(x, band):
            zeros = lambda n: [jnp.zeros((n, x.shape[1]) if self.keys_first else (x.shape[0], n), x.dtype)] if n else []
            return jnp.concatenate([*zeros(band.keys.start), x, *zeros(self.num_keys - band.keys.stop)], 1 - along)

        return jnp.concatenate([all_keys(*part) for part in zip(parts, bands, strict=True)], along)

    def _mask(self, cut: edge.Cut) -> list[Array]:
        spec, refs, terms = self.problem.mask, self.refs, []
        if self.bias is not None:
            terms.append(self.bias != -jnp.inf)
        if cut.lower or cut.upper:
            kv_lo, kv_hi = (self.row(refs.kv_lo), self.row(refs.kv_hi)) if spec.rule is None else spec.rule.unclipped(self.q_ids)
            if cut.lower and kv_lo is not None:
                terms.append(self.kv_ids >= kv_lo)
            if cut.upper and kv_hi is not None:
                terms.append(self.kv_ids < kv_hi)
            if cut.upper and spec.rule is not None and self.problem.kv_len % self.tiles.resident:  # of padding a rule says nothing
                terms.append(self.kv_ids < self.problem.kv_len)
        if not cut.others:
            return terms
        if spec.has_labels:
            terms.append(self.row(refs.q_labels) == self._key(refs.kv_labels))
        terms += [self._both(ref) != 0 for ref in refs.dense]
        terms += [self._in_blocks(ref, sizes) for ref, sizes in zip(refs.blocks, spec.block_sizes, strict=True)]
        terms += [self._by_function(n) for n in range(len(spec.functions))]
        return terms

    def _in_blocks(self, ref, sizes: tuple[int, int]) -> Array:
        """A block map (`launch.block_maps`) at the tile's rows and keys, picked by two products with 0 and 1: a kernel has no gather."""
        rows, columns = ref.shape
        width = min(columns, LANES * num_tiles(LANES + num_tiles(self.num_keys, sizes[1]), LANES))  # from a whole register on
        first_row = plan.divide(self.ids.i * self.tiles.block_q, sizes[0])
        resident, first_column = (plan.divide(key, sizes[1]) for key in (self.first_tile * self.tiles.block_kv, self.first_key))
        begin = jnp.minimum(plan.divide(first_column - resident, LANES) * LANES, columns - width) if width < columns else 0
        part = ref[:, pl.ds(pl.multiple_of(begin, LANES), width)].astype(jnp.float32)
        first_column = resident + begin

        def chosen(ids, size, first, n, along):  # [len, n] or [n, len]: which block each id lies in
            begin = (first + lax.broadcasted_iota(jnp.int32, (1, n) if along == 0 else (n, 1), 1 - along)) * size
            return ((ids >= begin) & (ids < begin + size)).astype(jnp.float32)

        exact = functools.partial(lax.dot_general, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
        nn, nt = (NN, ((), ())), (NT, ((), ()))
        if self.keys_first:
            of_keys, of_rows = chosen(self.kv_ids, sizes[1], first_column, width, 0), chosen(self.q_ids, sizes[0], first_row, rows, 1)
            return exact(exact(of_keys, part, nt), of_rows, nn) > 0.5
        of_rows, of_keys = chosen(self.q_ids, sizes[0], first_row, rows, 0), chosen(self.kv_ids, sizes[1], first_column, width, 1)
        return exact(of_rows, exact(part, of_keys, nn), nn) > 0.5

    def _by_function(self, n: int) -> Array:
        function = self.problem.mask.functions[n]
        dtypes = [v.aval.dtype for v in function.jaxpr.invars[4:]]
        full = lambda x: jnp.broadcast_to(x, self.shape)

        def read(kind, dtype, ref):
            match kind:
                case "query":
                    x = full(self.row(ref))
                case "key":
                    x = full(self._key(ref))
                case "head":
                    x = ref[0, self.ids.h]
                case _:
                    x = ref[0, 0]
            return x != 0 if dtype == jnp.bool_ else lax.bitcast_convert_type(x, dtype) if dtype == jnp.uint32 else x

        operands = map(read, function.kinds, dtypes, self.refs.functions[n])
        by_tile = [0 if kind in ("query", "key") else None for kind in function.kinds]
        evaluate = jax.vmap(jax.vmap(function, (None, None, 0, 0, *by_tile)), (None, None, 0, 0, *by_tile))
        batch = self.refs.batch_ids[0, 0]
        return evaluate(batch, jnp.asarray(self.ids.h, jnp.int32), full(self.q_ids), full(self.kv_ids), *operands)

    def drop(self, x: Array) -> Array:
        """Dropout: kept entries times `1 / (1 - rate)`, others 0."""
        if self.refs.row_keys is None:
            return x
        row_keys = lax.bitcast_convert_type(self.row(self.refs.row_keys), jnp.uint32)
        kept = dropout.keep(row_keys, self.kv_ids, self.problem.dropout_rate)
        return jnp.where(kept, x * (1 / (1 - self.problem.dropout_rate)), 0)
