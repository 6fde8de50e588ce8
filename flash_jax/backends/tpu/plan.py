"""Which key tiles a q tile visits: from the static rule by arithmetic in the kernel, else from a table of kinds in SMEM."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flash_jax import schedule, visibility
from flash_jax.backends.tpu.config import Tiles
from flash_jax.problem import Operands, Problem

Array = jax.Array


def divide(x, n: int):
    """`x // n` for `x >= 0`; a shift where it can be, which costs the scalar core one step."""
    if n == 1:
        return x
    x = jnp.asarray(x, jnp.int32)
    return lax.shift_right_logical(x, jnp.int32(n.bit_length() - 1)) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def is_static(problem: Problem) -> bool:
    """The mask is a rule known before tracing and nothing else."""
    return problem.mask.is_interval and problem.mask.rule is not None


def ranges(problem: Problem, tiles: Tiles, i) -> schedule.Ranges:
    """`schedule.interval_ranges` of q tile `i` from the rule at the tile's first and last row: bounds never decrease."""
    assert problem.mask.rule is not None
    return _ranges(problem.mask.rule, problem.q_len, tiles, i)


def _ranges(rule: visibility.RowRule, q_len: int, tiles: Tiles, i) -> schedule.Ranges:
    first = jnp.asarray(i, jnp.int32) * tiles.block_q
    last = jnp.minimum(first + tiles.block_q, q_len) - 1
    (lo_min, hi_min), (lo_max, hi_max) = rule(first), rule(last)
    up = lambda x: divide(x + (tiles.block_kv - 1), tiles.block_kv)
    seen = lo_min < hi_max
    begin = jnp.where(seen, divide(lo_min, tiles.block_kv), 0)
    end = jnp.where(seen, up(hi_max), 0)
    full_begin = jnp.clip(up(lo_max), begin, end)
    return schedule.Ranges(begin, full_begin, jnp.clip(divide(hi_min, tiles.block_kv), full_begin, end), end)


@functools.cache
def _bounds(rule: visibility.RowRule, q_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule's bounds of all rows, before tracing."""
    with jax.ensure_compile_time_eval():
        lo, hi = rule(jnp.arange(q_len, dtype=jnp.int32))
    return np.asarray(lo), np.asarray(hi)


@functools.cache
def unseen(rule: visibility.RowRule, q_len: int) -> tuple[bool, bool]:
    """Whether the rule leaves a row without keys, and a key without rows: what padding may hold then has to be cleaned."""
    lo, hi = _bounds(rule, q_len)
    rows = np.zeros(rule.kv_len + 1, int)  # that see each key, as differences
    np.add.at(rows, lo, 1)
    np.subtract.at(rows, hi, 1)
    return bool((lo >= hi).any()), bool((rows.cumsum()[:-1] == 0).any())


class Edge(NamedTuple):
    """Where the mask cuts through a q tile, as steps of static shape, one a piece of its rows, one after another without a branch.

    widths: keys of each step, 0 for none. They start where the full tiles of the q tile end; or, where `alone`, at the first key that
    the piece sees, and then there is nothing else to visit.
    """

    widths: tuple[int, ...]
    alone: bool


@functools.cache
def edge(rule: visibility.RowRule, q_len: int, tiles: Tiles) -> Edge | None:
    """The same steps have to serve every q tile and stay within the resident keys, which must be all; else None."""
    if not tiles.pieces or rule.kv_len > tiles.resident:
        return None
    lo, hi = _bounds(rule, q_len)
    with jax.ensure_compile_time_eval():
        r = schedule.Ranges(*(np.asarray(x) for x in _ranges(rule, q_len, tiles, jnp.arange(schedule.num_tiles(q_len, tiles.block_q)))))
    size = tiles.block_q // tiles.pieces
    first = np.minimum(np.arange(r.end.size * tiles.pieces) * size, q_len - 1).reshape(-1, tiles.pieces)
    last = np.minimum(first + size, q_len) - 1
    up = lambda x: tuple(int(-(-max(n, 0) // tiles.lanes) * tiles.lanes) for n in x.max(0))
    after, start = up(hi[last] - r.full_end[:, None] * tiles.block_kv), lo[first] // tiles.lanes * tiles.lanes
    alone = up(np.where(hi[last] > lo[first], hi[last] - start, 0))
    others = int((r.full_end - r.begin).sum()) * tiles.block_kv * tiles.block_q // r.end.size
    if max(alone) * size <= tiles.block_q * tiles.block_kv and size * sum(alone) <= others + size * sum(after):
        return Edge(alone, alone=True)
    fits = (r.full_end * tiles.block_kv).max() + max(after) <= tiles.resident and max(after) <= tiles.block_q + tiles.block_kv
    return Edge(after, alone=False) if fits else None


def held_slice(problem: Problem, tiles: Tiles) -> Callable | None:
    """Of the slices of the keys, the visited one nearest to the current one: an unvisited slice is then never fetched."""
    if not is_static(problem):
        return None

    def held(ids):
        r = ranges(problem, tiles, ids.i)
        first = divide(r.begin, tiles.tiles_resident)
        last = divide(jnp.maximum(r.end - 1, r.begin), tiles.tiles_resident)
        return jnp.clip(ids.c, first, last)

    return held


def visit(problem: Problem, tiles: Tiles, ids, first_tile, kinds_ref, step: Callable) -> None:
    """`step(start, width, rows, masked)` for everything that the q tile visits: keys from `start`, counted from the first resident one."""
    resident, all_rows = tiles.tiles_resident, slice(0, tiles.block_q)

    def tile(j, masked):
        step(j * tiles.block_kv, tiles.block_kv, all_rows, masked)

    if kinds_ref is not None:

        def by_kind(j, _):
            kind = kinds_ref[0, first_tile + j]
            pl.when(kind == schedule.PARTIAL)(lambda: tile(j, True))
            pl.when(kind == schedule.FULL)(lambda: tile(j, False))

        begin, end = (jnp.clip(kinds_ref[0, kinds_ref.shape[1] - n] - first_tile, 0, resident) for n in (2, 1))
        lax.fori_loop(begin, end, by_kind, None)
        return

    masked, full = functools.partial(tile, masked=True), functools.partial(tile, masked=False)
    rule = problem.mask.rule
    if rule.is_trivial and problem.kv_len % tiles.resident == 0:
        _unrolled(jnp.int32(0), resident // tiles.unroll, tiles.unroll, full)
        if resident % tiles.unroll:
            _loop(jnp.int32(resident - resident % tiles.unroll), jnp.int32(resident), full)
        return
    at_edge = edge(rule, problem.q_len, tiles)
    r = schedule.Ranges(*(jnp.clip(x - first_tile, 0, resident) for x in ranges(problem, tiles, ids.i)))
    if at_edge is None or not at_edge.alone:
        if rule.left is not None or rule.chunk is not None:
            _loop(r.begin, r.full_begin, masked)
        times = divide(r.full_end - r.full_begin, tiles.unroll)
        _unrolled(r.full_begin, times, tiles.unroll, full)
        if tiles.unroll > 1:
            _loop(r.full_begin + times * tiles.unroll, r.full_end, full)
    if at_edge is None:
        _loop(r.full_end, r.end, masked)
        return
    size = tiles.block_q // tiles.pieces
    for n, width in enumerate(at_edge.widths):
        start = r.full_end * tiles.block_kv
        if at_edge.alone:
            lo, _ = rule(jnp.minimum(jnp.asarray(ids.i, jnp.int32) * tiles.block_q + n * size, problem.q_len - 1))
            start = jnp.minimum(divide(lo, tiles.lanes) * tiles.lanes, tiles.resident - width)
        if width:
            step(start, width, slice(n * size, (n + 1) * size), True)


def _loop(begin, end, body) -> None:
    lax.fori_loop(begin, end, lambda j, _: body(j), None)


def _unrolled(begin, times, unroll: int, body) -> None:
    """`body(j)` for `begin <= j < begin + times * unroll`; several tiles a turn let the products of one hide the softmax of another."""

    def turn(t, _):
        for n in range(unroll):
            body(begin + t * unroll + n)

    lax.fori_loop(jnp.int32(0), times, turn, None)


def kinds(problem: Problem, tiles: Tiles, operands: Operands) -> Array | None:
    """int32 `[1 | batch, 1 | heads, q tiles, 1, kv tiles + 2]`, or None when static.

    Padded with EMPTY to whole slices of the keys; the last two are the first visited tile and one past the last.
    """
    if is_static(problem):
        return None
    of_functions = (_function_kinds(problem, tiles, operands, n) for n in range(len(problem.mask.functions)))
    lengths, blocks = (problem.q_len, problem.kv_len), (tiles.block_q, tiles.block_kv)
    joined = visibility.tile_kinds(problem.mask, operands.mask, lengths, blocks, of_functions).astype(jnp.int32)
    missing = -joined.shape[-1] % tiles.tiles_resident
    r = schedule.ranges_of_kinds(joined)
    parts = jnp.pad(joined, [(0, 0)] * 3 + [(0, missing)]), r.begin[..., None], r.end[..., None]
    return jnp.concatenate(parts, -1)[:, :, :, None]


def _function_kinds(problem: Problem, tiles: Tiles, operands: Operands, n: int) -> Array:
    """Kinds of a mask function, tile by tile: O(tiles) memory, O(scores) work."""
    function, arrays, ids = problem.mask.functions[n], operands.mask.functions[n], operands.mask.batch_ids
    head_ids = jnp.arange(problem.num_heads if function.reads_head else 1, dtype=jnp.int32)

    def cut(x, length, block, number):
        padded = jnp.pad(x, [(0, 0), (0, -length % block)])
        return lax.dynamic_slice_in_dim(padded, number * block, block, 1)

    def kind(i, j):
        def read(of_kind, x):
            match of_kind:
                case "query":
                    return cut(x, problem.q_len, tiles.block_q, i)
                case "key":
                    return cut(x, problem.kv_len, tiles.block_kv, j)
                case _:
                    return x

        q_ids = i * tiles.block_q + jnp.arange(tiles.block_q, dtype=jnp.int32)
        kv_ids = j * tiles.block_kv + jnp.arange(tiles.block_kv, dtype=jnp.int32)
        seen = visibility.by_function(function, ids, head_ids, q_ids, kv_ids, tuple(map(read, function.kinds, arrays)))
        inside = (q_ids < problem.q_len)[:, None] & (kv_ids < problem.kv_len)
        some, every = (seen & inside).any((2, 3)), (seen | ~inside).all((2, 3))
        return jnp.where(some, jnp.where(every, schedule.FULL, schedule.PARTIAL), schedule.EMPTY)

    numbers = lambda length, size: jnp.arange(schedule.num_tiles(length, size), dtype=jnp.int32)
    kv_tiles = numbers(problem.kv_len, tiles.block_kv)
    by_tile = lax.map(lambda i: lax.map(lambda j: kind(i, j), kv_tiles), numbers(problem.q_len, tiles.block_q))
    return by_tile.transpose(2, 3, 0, 1)
