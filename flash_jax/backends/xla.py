"""Any machine: loops over tiles in plain `jnp`, linear memory, every feature.

The score matrix is cut into tiles; a schedule lists the tiles that hold a visible score, and only those are visited, so the
work of a masked problem is that of its tiles. A tile is `[batch_inner, head_inner, group, block_q, block_kv]`: as many batch
entries and heads as share one schedule. Those that do not are slots, visited one after another (see `Split`).

Forward: FlashAttention's Algorithm 1 (arXiv 2205.14135) with the q tile outside (as arXiv 2307.08691). Backward: its
Algorithm 4, scores recomputed from q, k and lse; one pass with five products a tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax import dropout, schedule, softmax, visibility
from flash_jax.backends.base import Backend, Device
from flash_jax.logits import dscores, logits
from flash_jax.mask import row_bounds
from flash_jax.problem import Operands, Problem

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """block_q, block_kv: the tile of scores.
    split_batch: one batch entry at a time, so that each skips its own tiles; else all in one tile, skipping what all skip.
    static_loops: loops of fixed length that skip inside, which JAX can differentiate in reverse; else loops over exactly the
      tiles listed.
    """

    block_q: int
    block_kv: int
    split_batch: bool = True
    static_loops: bool = False


def default_config(problem: Problem, device: Device) -> Config:
    block_q, block_kv = problem.block_sizes or (256, 256)

    def even(length, block):  # tiles as equal as possible: least padding
        return -(-length // max(schedule.num_tiles(length, block), 1))

    return Config(even(problem.q_len, block_q), even(problem.kv_len, block_kv), split_batch=device.platform == "cpu")


def why_not(problem: Problem, device: Device) -> str | None:
    """Nothing is declined."""
    del problem, device


# ------------------------------------------------------------------------------------------------------ layout
class Split(NamedTuple):
    """batch = batch_slots * batch_inner, num_kv_heads = head_slots * head_inner; a tile holds the inner ones.

    Arrays are laid out `[batch_slots, head_slots, batch_inner, head_inner, group, ...]`, an axis that is shared being 1.
    """

    batch_slots: int
    batch_inner: int
    head_slots: int
    head_inner: int
    group: int

    @classmethod
    def of(cls, problem: Problem, config: Config, operands: Operands) -> "Split":
        mask = operands.mask
        by_head = any(x.shape[1] > 1 for x in (*mask.dense, *mask.blocks)) or any(f.reads_head for f in problem.mask.functions)
        batch_slots = problem.batch if config.split_batch else 1
        head_slots = problem.num_kv_heads if config.split_batch and by_head else 1
        return cls(batch_slots, problem.batch // batch_slots, head_slots, problem.num_kv_heads // head_slots, problem.group)

    def arrange(self, x: Array) -> Array:
        """`[1 | batch, 1 | num_heads | num_kv_heads, ...]` -> the layout."""
        batch = (1, 1) if x.shape[0] == 1 else (self.batch_slots, self.batch_inner)
        num_kv_heads = self.head_slots * self.head_inner
        heads = (1, 1, 1) if x.shape[1] == 1 else (self.head_slots, self.head_inner, x.shape[1] // num_kv_heads)
        return x.reshape(*batch, *heads, *x.shape[2:]).transpose(0, 2, 1, 3, 4, *range(5, x.ndim + 3))

    def restore(self, x: Array) -> Array:
        """The layout -> `[batch, heads, ...]`."""
        x = x.transpose(0, 2, 1, 3, 4, *range(5, x.ndim))
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3] * x.shape[4], *x.shape[5:])


def _pad(x: Array, axis: int, block: int, fill=0) -> Array:
    """Fill the partial last tile of an axis; an axis of 1 is shared, not padded."""
    axis %= x.ndim
    missing = -x.shape[axis] % block
    if x.shape[axis] == 1 or missing == 0:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def _slice(x: Array, axis: int, tile: Array, block: int) -> Array:
    """Tile number `tile` of an axis; an axis of 1 is shared."""
    if x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, tile * block, block, axis)


def _at_slot(x: Array, batch_slot: Array, head_slot: Array) -> Array:
    x = lax.dynamic_index_in_dim(x, batch_slot if x.shape[0] > 1 else 0, keepdims=False)
    return lax.dynamic_index_in_dim(x, head_slot if x.shape[0] > 1 else 0, keepdims=False)


class Arrays(NamedTuple):
    """All operands in the layout, padded to whole tiles. After `_at_slot` the two leading axes are gone."""

    query: Array  # [..., group, q_len, head_dim]
    key: Array  # [..., 1, kv_len, head_dim]
    value: Array  # [..., 1, kv_len, v_head_dim]
    bias: Array | None  # [..., 1 | q_len, 1 | kv_len]
    scale: Array | None  # [..., 1, 1]
    kv_lo: Array  # [..., q_len]
    kv_hi: Array
    q_labels: Array | None  # [..., q_len]
    kv_labels: Array | None  # [..., kv_len]
    dense: tuple[Array, ...]  # [..., 1 | q_len, 1 | kv_len]
    blocks: tuple[Array, ...]  # [..., num_q_blocks, num_kv_blocks]
    functions: tuple[tuple[Array, ...], ...]  # [..., axes of the operand's kind]
    batch_ids: Array | None  # [batch_inner, 1, 1]
    dropout_row_keys: Array | None  # [..., q_len]


def _arrange(problem: Problem, config: Config, operands: Operands, split: Split) -> Arrays:
    mask, block_q, block_kv = operands.mask, config.block_q, config.block_kv
    one_head = lambda x: split.arrange(x[:, None])
    rows = lambda x, fill: None if x is None else _pad(one_head(x), -1, block_q, fill)
    kv_lo, kv_hi = row_bounds(problem.mask, mask, problem.q_len)
    by_kind = {
        "query": lambda x: rows(x, 0),
        "key": lambda x: _pad(one_head(x), -1, block_kv),
        "head": split.arrange,
        "scalar": one_head,
        "captured": one_head,
    }
    optional = lambda function, x: None if x is None else function(x)
    tiled = lambda x: _pad(_pad(split.arrange(x), -2, block_q), -1, block_kv)
    by_rows = lambda x, block: _pad(split.arrange(x.swapaxes(1, 2)), -2, block)
    return Arrays(
        query=by_rows(operands.query, block_q),
        key=by_rows(operands.key, block_kv),
        value=by_rows(operands.value, block_kv),
        bias=optional(tiled, operands.bias),
        scale=optional(lambda x: one_head(x)[..., None, None], operands.scale),
        kv_lo=rows(kv_lo, 0),
        kv_hi=rows(kv_hi, 0),
        q_labels=rows(mask.q_labels, 0),
        kv_labels=optional(by_kind["key"], mask.kv_labels),
        dense=tuple(map(tiled, mask.dense)),
        blocks=tuple(map(split.arrange, mask.blocks)),
        functions=tuple(
            tuple(by_kind[kind](x) for kind, x in zip(function.kinds, arrays, strict=True))
            for function, arrays in zip(problem.mask.functions, mask.functions, strict=True)
        ),
        batch_ids=optional(one_head, mask.batch_ids),
        dropout_row_keys=optional(lambda x: _pad(split.arrange(x), -1, block_q), operands.dropout_row_keys),
    )


# -------------------------------------------------------------------------------------------------------- slots
class Slot:
    """One slot's operands, read by tile: `i` numbers q tiles, `j` key tiles."""

    def __init__(self, problem: Problem, config: Config, split: Split, arrays: Arrays, slot: Array):
        self.problem, self.config, self.split = problem, config, split
        self.index = (slot // split.head_slots, lax.rem(slot, jnp.int32(split.head_slots)))
        self.arrays: Arrays = jax.tree.map(self.take, arrays)

    def take(self, x: Array) -> Array:
        return _at_slot(x, *self.index)

    def rows(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[..., q_len, dim]`."""
        return _slice(x, x.ndim - 2, i, self.config.block_q)

    def row_numbers(self, x: Array, i: Array) -> Array:
        """Tile `i` of `[..., q_len]`."""
        return _slice(x, x.ndim - 1, i, self.config.block_q)

    def keys(self, x: Array, j: Array) -> Array:
        """Tile `j` of `[..., 1, kv_len, dim]`, without the group axis."""
        return _slice(x, x.ndim - 2, j, self.config.block_kv)[:, :, 0]

    def tile(self, x: Array, i: Array, j: Array) -> Array:
        """Tile `(i, j)` of `[..., 1 | q_len, 1 | kv_len]`."""
        return _slice(self.rows(x, i), x.ndim - 1, j, self.config.block_kv)

    def q_ids(self, i: Array) -> Array:
        return i * self.config.block_q + jnp.arange(self.config.block_q, dtype=jnp.int32)

    def kv_ids(self, j: Array) -> Array:
        return j * self.config.block_kv + jnp.arange(self.config.block_kv, dtype=jnp.int32)

    def bias(self, i: Array, j: Array) -> Array | None:
        if self.arrays.bias is None:
            return None
        return self.tile(self.arrays.bias, i, j).astype(self.problem.compute_dtype)

    def scale(self) -> float | Array:
        return self.problem.scale if self.arrays.scale is None else self.arrays.scale

    def kept(self, i: Array, j: Array) -> Array:
        row_keys = self.row_numbers(self.arrays.dropout_row_keys, i)
        return dropout.keep(row_keys[..., None], self.kv_ids(j), self.problem.dropout_rate)

    def drop(self, x: Array, i: Array, j: Array) -> Array:
        """Dropout on a tile: kept entries times `1 / (1 - rate)`, others 0."""
        if self.arrays.dropout_row_keys is None:
            return x
        return jnp.where(self.kept(i, j), x * (1 / (1 - self.problem.dropout_rate)), 0)

    def by_function(self, n: int, i: Array, j: Array) -> Array:
        """Mask function `n` on a tile, `[batch_inner, 1 | head_inner, 1 | group, block_q, block_kv]`."""
        function, split = self.problem.mask.functions[n], self.split
        heads = (split.head_inner, split.group) if function.reads_head else (1, 1)
        first = self.index[1] * (split.head_inner * split.group)
        head_ids = first + jnp.arange(heads[0] * heads[1], dtype=jnp.int32)

        def read(kind: str, x: Array) -> Array:  # leading axes batch_inner, head_inner, group
            match kind:
                case "query":
                    return self.row_numbers(x, i)[:, 0, 0]
                case "key":
                    return _slice(x, x.ndim - 1, j, self.config.block_kv)[:, 0, 0]
                case "head":
                    return x.reshape(x.shape[0], -1)
                case _:
                    return x[:, 0, 0]

        operands = tuple(read(kind, x) for kind, x in zip(function.kinds, self.arrays.functions[n], strict=True))
        batch_ids = self.arrays.batch_ids[:, 0, 0]
        seen = visibility.by_function(function, batch_ids, head_ids, self.q_ids(i), self.kv_ids(j), operands)
        return seen.reshape(seen.shape[0], *heads, *seen.shape[2:])

    def seen(self, i: Array, j: Array, masked: bool) -> Array | None:
        """Visible scores of a tile, broadcastable against it; None where all are."""
        terms = []
        a = self.arrays
        if masked:
            kv_ids = self.kv_ids(j)
            terms.append(visibility.in_interval(self.row_numbers(a.kv_lo, i), self.row_numbers(a.kv_hi, i), kv_ids))
            if a.q_labels is not None:
                kv_labels = _slice(a.kv_labels, a.kv_labels.ndim - 1, j, self.config.block_kv)
                terms.append(visibility.equal_labels(self.row_numbers(a.q_labels, i), kv_labels))
            terms += [self.tile(x, i, j) for x in a.dense]
            for blocks, sizes in zip(a.blocks, self.problem.mask.block_sizes, strict=True):
                terms.append(visibility.in_blocks(blocks, sizes, self.q_ids(i), kv_ids))
            terms += [self.by_function(n, i, j) for n in range(len(a.functions))]
        if a.bias is not None:
            terms.append(self.tile(a.bias, i, j) > -jnp.inf)
        return functools.reduce(jnp.logical_and, terms) if terms else None

    def kinds(self) -> Array:
        """Kind of each tile, int8 `[num_q_tiles, num_kv_tiles]`: empty or full where it is for all batch entries and heads."""
        problem, a = self.problem, self.arrays
        lengths, blocks = (problem.q_len, problem.kv_len), (self.config.block_q, self.config.block_kv)
        q, kv = (slice(0, n) for n in lengths)
        kinds = [schedule.interval_kinds(a.kv_lo[..., q], a.kv_hi[..., q], *blocks, problem.kv_len)]
        if a.q_labels is not None:
            kinds.append(schedule.label_kinds(a.q_labels[..., q], a.kv_labels[..., kv], *blocks))
        kinds += [schedule.dense_kinds(x[..., q, kv], *blocks, *lengths) for x in a.dense]
        kinds += [
            schedule.block_kinds(x, sizes, *blocks, *lengths) for x, sizes in zip(a.blocks, problem.mask.block_sizes, strict=True)
        ]
        kinds = [k.reshape(-1, *k.shape[-2:]) for k in kinds]
        kinds += [self._function_kinds(n)[None] for n in range(len(a.functions))]
        one = [jnp.where(k.max(0) == schedule.EMPTY, schedule.EMPTY, jnp.where(k.min(0) == schedule.FULL, schedule.FULL, schedule.PARTIAL)) for k in kinds]
        return functools.reduce(jnp.minimum, one)

    def _function_kinds(self, n: int) -> Array:
        """Tile by tile, O(tiles) memory."""
        problem, config = self.problem, self.config

        def kind(i, j):
            inside = (self.q_ids(i) < problem.q_len)[:, None] & (self.kv_ids(j) < problem.kv_len)
            seen = self.by_function(n, i, j)
            return jnp.where(jnp.any(seen & inside), jnp.where(jnp.all(seen | ~inside), schedule.FULL, schedule.PARTIAL), schedule.EMPTY)

        tiles = lambda length, block: jnp.arange(schedule.num_tiles(length, block), dtype=jnp.int32)
        kv_tiles = tiles(problem.kv_len, config.block_kv)
        return lax.map(lambda i: lax.map(lambda j: kind(i, j), kv_tiles), tiles(problem.q_len, config.block_q))


# --------------------------------------------------------------------------------------------------------- loops
def _all_full(problem: Problem, config: Config, operands: Operands) -> bool:
    """Known before tracing that no tile needs a mask."""
    spec, mask = problem.mask, operands.mask
    predicates = mask.q_labels is not None or mask.dense or mask.blocks or mask.functions
    return spec.rule is not None and spec.rule.is_trivial and not predicates and problem.kv_len % config.block_kv == 0


def _loop(config: Config, lower, upper, length: int, body: Callable[[Array, Any], Any], carry):
    """`carry = body(t, carry)` for `lower <= t < upper`, at most `length` times."""
    if not config.static_loops:
        return lax.fori_loop(lower, upper, body, carry)
    step = jax.checkpoint(body)

    def skip_or_step(carry, t):
        inside = (lower <= t) & (t < upper)
        return lax.cond(inside, step, lambda t, carry: carry, t, carry), None

    return lax.scan(skip_or_step, carry, jnp.arange(length, dtype=jnp.int32))[0]


def _over_slots(problem: Problem, config: Config, operands: Operands, body, carry):
    """Scan `body(slot, visit, carry) -> (carry, results)`; `visit(i, step, state)` runs `step(j, masked, state)` over q tile i's
    tiles. Returns the carry and the results, stacked by slot and unfolded into the layout's two leading axes."""
    split = Split.of(problem, config, operands)
    arrays = _arrange(problem, config, operands, split)
    all_full = _all_full(problem, config, operands)
    num_kv_tiles = schedule.num_tiles(problem.kv_len, config.block_kv)

    def one_slot(carry, number):
        slot = Slot(problem, config, split, arrays, number)
        lists = None if all_full else schedule.tile_lists(slot.kinds())

        def visit(i, step, state):
            if lists is None:
                return _loop(config, jnp.int32(0), jnp.int32(num_kv_tiles), num_kv_tiles, lambda t, s: step(t, False, s), state)
            index, full_end, end = (lax.dynamic_index_in_dim(x, i, keepdims=False) for x in lists)
            state = _loop(config, jnp.int32(0), full_end, num_kv_tiles, lambda t, s: step(index[t], False, s), state)
            return _loop(config, full_end, end, num_kv_tiles, lambda t, s: step(index[t], True, s), state)

        return body(slot, visit, carry)

    slots = split.batch_slots * split.head_slots
    carry, results = lax.scan(one_slot, carry, jnp.arange(slots, dtype=jnp.int32))
    return carry, jax.tree.map(lambda x: x.reshape(split.batch_slots, split.head_slots, *x.shape[1:]), results)


def _q_tiles(problem: Problem, config: Config) -> Array:
    return jnp.arange(schedule.num_tiles(problem.q_len, config.block_q), dtype=jnp.int32)


def _rows_from_tiles(x: Array) -> Array:
    """`[batch_slots, head_slots, num_q_tiles, batch_inner, head_inner, group, block_q, ...]` -> the layout with rows in one axis."""
    x = jnp.moveaxis(x, 2, 5)
    return x.reshape(*x.shape[:5], x.shape[5] * x.shape[6], *x.shape[7:])


# ------------------------------------------------------------------------------------------------------ products
def _dot(problem: Problem, a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product over one axis each, batched over (batch_inner, head_inner), accumulated in the compute dtype.

    float32 stays float32 on hardware whose default is less (TF32, bfloat16 passes), unless the user says otherwise.
    """
    a, b = a.astype(problem.dtype), b.astype(problem.dtype)
    precision = lax.Precision.HIGHEST if jax.config.jax_default_matmul_precision is None and problem.dtype.itemsize >= 4 else None
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=problem.compute_dtype)


def _dot_rows(problem: Problem, tile: Array, rows: Array) -> Array:
    """Sum over group and rows: `[b, h, group, q, kv]`, `[b, h, group, q, d]` -> `[b, h, kv, d]`."""
    b, h, g, q, kv = tile.shape
    return _dot(problem, tile.reshape(b, h, g * q, kv), rows.reshape(b, h, g * q, rows.shape[-1]), (2, 2))


def _clean_keys(seen: Array | None, x: Array) -> Array:
    """Zero the keys of a tile that none of its rows sees: whatever padding holds must not meet 0 * NaN."""
    if seen is None:
        return x
    return jnp.where(seen.any((2, 3))[..., None], x, jnp.zeros_like(x))


def _clean_rows(seen: Array | None, x: Array) -> Array:
    """Zero the rows of a tile that see none of its keys."""
    if seen is None:
        return x
    return jnp.where(seen.any(-1)[..., None], x, jnp.zeros_like(x))


def _scores(slot: Slot, i: Array, j: Array, q: Array, k: Array, bias: Array | None, scale, seen: Array | None):
    """`(qk, s, tanh)` of a tile: products, base-2 logits with -inf where not seen, the soft cap's tanh."""
    qk = _dot(slot.problem, q, k, (4, 3))
    s, tanh = logits(qk, scale, slot.problem.logits_soft_cap, bias)
    return qk, s if seen is None else jnp.where(seen, s, -jnp.inf), tanh


# -------------------------------------------------------------------------------------------------------- passes
def forward(problem: Problem, config: Config, operands: Operands) -> tuple[Array, Array]:
    """See `base.Backend.forward`."""
    acc_dtype = problem.compute_dtype

    def one_slot(slot: Slot, visit, carry):
        def one_q_tile(_, i):
            q = slot.rows(slot.arrays.query, i)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)
                k, v = slot.keys(slot.arrays.key, j), _clean_keys(seen, slot.keys(slot.arrays.value, j))
                _, s, _ = _scores(slot, i, j, q, k, slot.bias(i, j), slot.scale(), seen)
                m, l, acc = state
                m, pivot, alpha = softmax.rescale(m, s.max(-1))
                p = softmax.probs(s, pivot)
                l = l * alpha + p.sum(-1)
                acc = acc * alpha[..., None] + _dot(problem, slot.drop(p, i, j), v, (4, 2))
                return softmax.State(m, l, acc)

            rows = q.shape[:-1]
            zero = softmax.State(
                jnp.full(rows, -jnp.inf, acc_dtype), jnp.zeros(rows, acc_dtype), jnp.zeros((*rows, problem.v_head_dim), acc_dtype)
            )
            out, lse = softmax.finish(*visit(i, step, zero))
            return None, (out.astype(problem.dtype), lse)

        return carry, lax.scan(one_q_tile, None, _q_tiles(problem, config))[1]

    _, (out, lse) = _over_slots(problem, config, operands, one_slot, None)
    split = Split.of(problem, config, operands)
    out, lse = (split.restore(_rows_from_tiles(x)).swapaxes(1, 2)[:, : problem.q_len] for x in (out, lse))
    return out, lse


def _rows_layout(split: Split, config: Config, x: Array, fill=0) -> Array:
    """`[batch, q_len, num_heads(, dim)]` -> the layout, padded."""
    return _pad(split.arrange(x.swapaxes(1, 2)), 5, config.block_q, fill)


def backward(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array, wanted: tuple[str, ...]
) -> dict[str, Array]:
    """See `base.Backend.backward`."""
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    delta = -jnp.where(lse == -jnp.inf, 0, dlse)
    whole_rows = config.block_kv >= problem.kv_len  # then sum(out * dout) is sum(p * dp), without out's rounding
    if not whole_rows:
        delta += (out.astype(acc_dtype) * dout.astype(acc_dtype)).sum(-1)
    dout_rows, delta_rows, pivot_rows = (
        _rows_layout(split, config, dout),
        _rows_layout(split, config, delta),
        _rows_layout(split, config, softmax.lse_pivot(lse), jnp.inf),
    )
    dbias = None
    if "bias" in wanted:
        assert operands.bias is not None
        padded = _pad(_pad(split.arrange(operands.bias), -2, config.block_q), -1, config.block_kv)
        dbias = jnp.zeros(padded.shape, acc_dtype)

    def one_slot(slot: Slot, visit, dbias):
        a = slot.arrays
        dout, delta, pivot = (slot.take(x) for x in (dout_rows, delta_rows, pivot_rows))

        def one_q_tile(carry, i):
            q_tile, dout_tile = slot.rows(a.query, i), slot.rows(dout, i)
            delta_tile, pivot_tile = slot.row_numbers(delta, i), slot.row_numbers(pivot, i)

            def step(j, masked, carry):
                seen = slot.seen(i, j, masked)
                q, dout = _clean_rows(seen, q_tile), _clean_rows(seen, dout_tile)
                k, v = (_clean_keys(seen, slot.keys(x, j)) for x in (a.key, a.value))
                qk, s, tanh = _scores(slot, i, j, q, k, slot.bias(i, j), slot.scale(), seen)
                p = softmax.probs_from_lse(s, pivot_tile)
                dp = slot.drop(_dot(problem, dout, v, (4, 3)), i, j)
                delta = delta_tile + (p * dp).sum(-1) if whole_rows else delta_tile
                dlogits = softmax.dlogits(p, dp, delta)
                ds = dscores(dlogits, tanh)
                new = dict(carry)
                if "scale" in carry:
                    new["scale"] = carry["scale"] + (ds * qk).sum((1, 2, 3, 4))
                ds = ds * slot.scale()
                if "query" in carry:
                    new["query"] = carry["query"] + _dot(problem, ds, k, (4, 2))
                if "key" in carry:
                    new["key"] = _add_keys(carry["key"], j, _dot_rows(problem, ds, q))
                if "value" in carry:
                    new["value"] = _add_keys(carry["value"], j, _dot_rows(problem, slot.drop(p, i, j), dout))
                if "bias" in carry:
                    new["bias"] = _add_bias(slot, carry["bias"], i, j, dlogits)
                return new

            if "query" in wanted:
                carry = carry | {"query": jnp.zeros(q_tile.shape, acc_dtype)}
            carry = visit(i, step, carry)
            dq = carry.pop("query").astype(problem.dtype) if "query" in wanted else None
            return carry, dq

        carry = {name: jnp.zeros(x.shape[:2] + x.shape[3:], acc_dtype) for name, x in (("key", a.key), ("value", a.value)) if name in wanted}
        if "scale" in wanted:
            carry["scale"] = jnp.zeros(split.batch_inner, acc_dtype)
        if dbias is not None:
            carry["bias"] = dbias
        carry, dq = lax.scan(one_q_tile, carry, _q_tiles(problem, config))
        dbias = carry.pop("bias", None)
        return dbias, (dq, carry)

    def _add_keys(total, j, part):
        old = _slice(total, 2, j, config.block_kv)
        if total.shape[2] == 1:
            return total + part
        return lax.dynamic_update_slice_in_dim(total, old + part, j * config.block_kv, 2)

    def _add_bias(slot, total, i, j, dlogits):
        size = (1, 1, *(b if n > 1 else 1 for n, b in zip(total.shape[2:], dlogits.shape, strict=True)))
        start = [k if n > 1 else 0 for n, k in zip(total.shape, (*slot.index, 0, 0, 0, i * config.block_q, j * config.block_kv), strict=True)]
        start = [jnp.int32(n) for n in start]
        shared = tuple(axis for axis, n in enumerate(size[2:]) if n == 1)
        part = dlogits.sum(shared, keepdims=True)[None, None]
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, size) + part, start)

    dbias, (dq, others) = _over_slots(problem, config, operands, one_slot, dbias)
    gradients = {}
    if "query" in wanted:
        gradients["query"] = split.restore(_rows_from_tiles(dq)).swapaxes(1, 2)[:, : problem.q_len]
    for name in ("key", "value"):
        if name in wanted:
            total = split.restore(others[name][:, :, :, :, None]).swapaxes(1, 2)[:, : problem.kv_len]
            gradients[name] = total.astype(problem.dtype)
    if "bias" in wanted:
        rows, columns = problem.bias_shape[2:]
        gradients["bias"] = split.restore(dbias)[:, :, :rows, :columns].astype(problem.bias_dtype)
    if "scale" in wanted:
        by_batch = others["scale"].sum(1).reshape(-1)
        gradients["scale"] = by_batch if operands.scale.shape[0] != 1 else by_batch.sum(keepdims=True)
    return gradients


def jvp(
    problem: Problem, config: Config, operands: Operands, out: Array, lse: Array, tangents: dict[str, Array]
) -> tuple[Array, Array]:
    """Tangents of `(out, lse)` from those of the operands named in `tangents`, in one pass over the tiles.

    With `p_j = exp(s_j - lse)` at the point, `d lse = sum_j dp_j` and `d out = sum_j d(p_j v_j) - out * d lse`, where `lse` is held fixed
    inside `dp`: so each tile's part is the derivative of a tile function, taken by JAX.
    """
    acc_dtype = problem.compute_dtype
    split = Split.of(problem, config, operands)
    pivot_rows = _rows_layout(split, config, softmax.lse_pivot(lse), jnp.inf)
    dotted = operands._replace(**{name: jnp.zeros_like(x) for name in ("query", "key", "value", "bias", "scale") if (x := getattr(operands, name)) is not None})
    dotted = _arrange(problem, config, dotted._replace(**tangents), split)

    def one_slot(slot: Slot, visit, carry):
        a, pivot, dot = slot.arrays, slot.take(pivot_rows), jax.tree.map(slot.take, dotted)
        scale = jnp.asarray(slot.scale(), acc_dtype)
        dscale = jnp.zeros_like(scale) if dot.scale is None else dot.scale

        def one_q_tile(_, i):
            pivot_tile = slot.row_numbers(pivot, i)

            def step(j, masked, state):
                seen = slot.seen(i, j, masked)

                def weights(q, k, v, bias, scale):
                    _, s, _ = _scores(slot, i, j, q, k, bias, scale, seen)
                    p = softmax.probs_from_lse(s, pivot_tile)
                    return p.sum(-1), _dot(problem, slot.drop(p, i, j), v, (4, 2))

                def read(a, scale):
                    bias = None if a.bias is None else slot.tile(a.bias, i, j).astype(acc_dtype)
                    rows = _clean_rows(seen, slot.rows(a.query, i))
                    keys = (_clean_keys(seen, slot.keys(x, j)) for x in (a.key, a.value))
                    return (rows, *keys, bias, scale)

                _, (dl, dacc) = jax.jvp(weights, read(a, scale), read(dot, dscale))
                return state[0] + dl, state[1] + dacc

            rows = pivot_tile.shape
            zero = jnp.zeros(rows, acc_dtype), jnp.zeros((*rows, problem.v_head_dim), acc_dtype)
            return None, visit(i, step, zero)

        return carry, lax.scan(one_q_tile, None, _q_tiles(problem, config))[1]

    _, (dlse, dacc) = _over_slots(problem, config, operands, one_slot, None)
    dlse, dacc = (split.restore(_rows_from_tiles(x)).swapaxes(1, 2)[:, : problem.q_len] for x in (dlse, dacc))
    return (dacc - out.astype(acc_dtype) * dlse[..., None]).astype(problem.dtype), dlse


BACKEND = Backend("xla", why_not, default_config, forward, backward)
