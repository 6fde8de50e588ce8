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
    """Whether the rule leaves a row without keys, and a key without rows."""
    lo, hi = _bounds(rule, q_len)
    rows = np.zeros(rule.kv_len + 1, int)  # that see each key, as differences
    np.add.at(rows, lo, 1)
    np.subtract.at(rows, hi, 1)
    return bool((lo >= hi).any()), bool((rows.cumsum()[:-1] == 0).any())


def hides(problem: Problem) -> tuple[bool, bool]:
    """Whether there may be rows that see no key, and keys that no row sees: what those hold must not matter."""
    if problem.bias_shape is not None or not is_static(problem):
        return True, True
    return unseen(problem.mask.rule, problem.q_len)


class Cut(NamedTuple):
    """Keys of a step, and what may hide some of them from some of its rows: the bounds of the interval, the other predicates."""

    begin: int
    end: int
    lower: bool
    upper: bool
    others: bool


Cuts = tuple[Cut, ...]  # of all keys of a step


def _whole(width: int, masked: bool) -> Cuts:
    return (Cut(0, width, masked, masked, masked),)


def _cuts(width: int, seen_begin: int, seen_end: int, others: bool) -> Cuts:
    """Of keys that all rows see from `seen_begin` to `seen_end`: outside, one bound is to be looked at, or both where there are none."""
    if seen_begin > seen_end:
        return (Cut(0, width, True, True, others),) if width else ()
    ends = (0, seen_begin, True, False), (seen_begin, seen_end, False, False), (seen_end, width, False, True)
    return tuple(Cut(*x, others) for x in ends if x[0] < x[1])


class Edge(NamedTuple):
    """Where the mask cuts through a q tile, as steps of static shape, one a piece of its rows, one after another without a branch.

    steps: of each piece, () for none. They start where the full tiles of the q tile end; or, where `alone`, at the first key that
    the piece sees, and then there is nothing else to visit.
    head, turn: the first `turn` q tiles, whose rows all see the first key, take these steps instead.
    """

    steps: tuple[Cuts, ...]
    alone: bool
    head: tuple[Cuts, ...] = ()
    turn: int = 0


def edge_of(problem: Problem, tiles: Tiles) -> Edge | None:
    """Of a static rule, alone or with labels: of other masks whole tiles may be hidden, and these are not to be visited."""
    spec = problem.mask
    if spec.rule is None or spec.rule.is_trivial or spec.num_dense or spec.block_sizes or spec.functions:
        return None
    return edge(spec.rule, problem.q_len, tiles, spec.has_labels)


@functools.cache
def edge(rule: visibility.RowRule, q_len: int, tiles: Tiles, others: bool = False) -> Edge | None:
    """The same steps have to serve every q tile and stay within the resident keys, which must be all; else None."""
    if not tiles.pieces or rule.kv_len > tiles.resident:
        return None
    lo, hi = _bounds(rule, q_len)
    num_q, size, lanes = schedule.num_tiles(q_len, tiles.block_q), tiles.block_q // tiles.pieces, tiles.lanes
    with jax.ensure_compile_time_eval():
        r = schedule.Ranges(*(np.asarray(x) for x in _ranges(rule, q_len, tiles, jnp.arange(num_q))))
    first = np.minimum(np.arange(num_q * tiles.pieces) * size, q_len - 1).reshape(num_q, tiles.pieces)
    last = np.minimum(first + size, q_len) - 1
    empty = hi[last] <= lo[first]

    def steps(start, of=slice(None)) -> tuple[Cuts, ...]:
        """`start`: first key of each q tile's step of each piece; `of`: the q tiles that take them."""
        widths = -(-np.where(empty, 0, hi[last] - start)[of].max(0).clip(0) // lanes) * lanes
        start = np.minimum(start, tiles.resident - widths)[of]
        seen_begin = -(-(lo[last[of]] - start).max(0) // lanes) * lanes
        seen_end = (hi[first[of]] - start).min(0) // lanes * lanes
        return tuple(
            _cuts(int(w), *(int(n.clip(0, w)) for n in seen), others) for w, *seen in zip(widths, seen_begin, seen_end, strict=True)
        )

    from_first_key = lo[first] // lanes * lanes
    after, alone = steps(r.full_end[:, None] * tiles.block_kv), steps(from_first_key)
    width = lambda steps: [cuts[-1].end if cuts else 0 for cuts in steps]
    loops = int((r.full_end - r.begin).sum()) * tiles.block_kv * tiles.block_q // num_q
    if max(width(alone)) * size <= tiles.block_q * tiles.block_kv and size * sum(width(alone)) <= loops + size * sum(width(after)):
        turn = int((lo[first[:, 0]] == 0).sum())
        if turn in (0, num_q):
            return Edge(alone, alone=True)
        return Edge(steps(from_first_key, slice(turn, None)), True, steps(from_first_key, slice(turn)), turn)
    fits = (r.full_end * tiles.block_kv).max() + max(width(after)) <= tiles.resident and max(width(after)) <= tiles.block_q + tiles.block_kv
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


class Work(NamedTuple):
    """What a kernel does with rows of a q tile: `begin(rows)`, steps, `end(rows)`.

    `step(start, rows, cuts, first)`: keys from `start`, counted from the first resident one; `first`: in place of `begin`.
    """

    begin: Callable
    step: Callable
    end: Callable


def visit(problem: Problem, tiles: Tiles, ids, first_tile, kinds_ref, work: Work) -> None:
    """The work of everything that the q tile visits."""
    all_rows = slice(0, tiles.block_q)
    at_edge = edge_of(problem, tiles)
    if at_edge is not None and at_edge.alone:
        if not at_edge.turn:
            _alone(problem, tiles, ids, at_edge.steps, work)
            return
        pl.when(ids.i < at_edge.turn)(lambda: _alone(problem, tiles, ids, at_edge.head, work))
        pl.when(ids.i >= at_edge.turn)(lambda: _alone(problem, tiles, ids, at_edge.steps, work))
        return
    work.begin(all_rows)
    if kinds_ref is None:
        full_end = _by_range(problem, tiles, ids, first_tile, at_edge is not None, work)
    else:
        full_end = tiles.tiles_resident if at_edge is None else ranges(problem, tiles, ids.i).full_end
        _by_kind(tiles, first_tile, kinds_ref, full_end, work)
    if at_edge is None:
        work.end(all_rows)
        return
    for rows, cuts in _pieces(tiles, at_edge.steps):
        if cuts:
            work.step(full_end * tiles.block_kv, rows, cuts, False)
        work.end(rows)


def _pieces(tiles: Tiles, steps: tuple[Cuts, ...]):
    size = tiles.block_q // tiles.pieces
    return [(slice(n * size, (n + 1) * size), cuts) for n, cuts in enumerate(steps)]


def _alone(problem: Problem, tiles: Tiles, ids, steps: tuple[Cuts, ...], work: Work) -> None:
    """Piece after piece, in one straight line of code: the end of one hides behind the products of the next."""
    before = None
    for rows, cuts in _pieces(tiles, steps):
        if cuts:
            lo, _ = problem.mask.rule(jnp.minimum(jnp.asarray(ids.i, jnp.int32) * tiles.block_q + rows.start, problem.q_len - 1))
            start = jnp.minimum(divide(lo, tiles.lanes) * tiles.lanes, tiles.resident - cuts[-1].end)
            work.step(start, rows, cuts, True)
        else:
            work.begin(rows)
        if before is not None:
            work.end(before)
        before = rows
    work.end(before)


def _tile(tiles: Tiles, work: Work, masked: bool, j) -> None:
    work.step(j * tiles.block_kv, slice(0, tiles.block_q), _whole(tiles.block_kv, masked), False)


def _by_kind(tiles: Tiles, first_tile, kinds_ref, last, work: Work) -> None:
    """Tiles of the table, those from `last` on left out."""

    def by_kind(j, _):
        kind = kinds_ref[0, first_tile + j]
        pl.when(kind == schedule.PARTIAL)(lambda: _tile(tiles, work, True, j))
        pl.when(kind == schedule.FULL)(lambda: _tile(tiles, work, False, j))

    begin, end = (jnp.clip(kinds_ref[0, kinds_ref.shape[1] - n] - first_tile, 0, last) for n in (2, 1))
    lax.fori_loop(begin, end, by_kind, None)


def _by_range(problem: Problem, tiles: Tiles, ids, first_tile, but_edge: bool, work: Work):
    """Tiles of the static rule, `but_edge` not those from the end of the full ones, which is returned."""
    resident = tiles.tiles_resident
    masked, full = functools.partial(_tile, tiles, work, True), functools.partial(_tile, tiles, work, False)
    rule = problem.mask.rule
    if rule.is_trivial and problem.kv_len % tiles.resident == 0:
        _unrolled(jnp.int32(0), resident // tiles.unroll, tiles.unroll, full)
        if resident % tiles.unroll:
            _loop(jnp.int32(resident - resident % tiles.unroll), jnp.int32(resident), full)
        return resident
    r = schedule.Ranges(*(jnp.clip(x - first_tile, 0, resident) for x in ranges(problem, tiles, ids.i)))
    if rule.left is not None or rule.chunk is not None:
        _loop(r.begin, r.full_begin, masked)
    times = divide(r.full_end - r.full_begin, tiles.unroll)
    _unrolled(r.full_begin, times, tiles.unroll, full)
    if tiles.unroll > 1:
        _loop(r.full_begin + times * tiles.unroll, r.full_end, full)
    if not but_edge:
        _loop(r.full_end, r.end, masked)
    return r.full_end


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
    r, _ = schedule.ranges_of_kinds(joined)
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
        return schedule.classify((seen & inside).any((2, 3)), (seen | ~inside).all((2, 3)))

    numbers = lambda length, size: jnp.arange(schedule.num_tiles(length, size), dtype=jnp.int32)
    kv_tiles = numbers(problem.kv_len, tiles.block_kv)
    by_tile = lax.map(lambda i: lax.map(lambda j: kind(i, j), kv_tiles), numbers(problem.q_len, tiles.block_q))
    return by_tile.transpose(2, 3, 0, 1)
