"""Where a static mask cuts through a q tile: steps of static shape, and what of their scores has to be looked at."""

import functools
from typing import NamedTuple

import numpy as np

from flash_jax import schedule, visibility
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.config import Tiles
from flash_jax.problem import Problem

_STRAIGHT = 5  # most tiles' worth of steps in one straight line of code: libtpu takes minutes for more


class Cut(NamedTuple):
    """Keys of a band, and what may hide some of them from some of its rows: the bounds of the interval, the other predicates."""

    begin: int
    end: int
    lower: bool
    upper: bool
    others: bool


class Band(NamedTuple):
    """Rows of a step, and the keys that they may see, cut after cut; what is outside of the cuts none of them sees."""

    rows: slice
    cuts: tuple[Cut, ...]

    @property
    def keys(self) -> slice:
        return slice(self.cuts[0].begin, self.cuts[-1].end)


class Step(NamedTuple):
    """Products of some rows with `width` keys, whose scores are then looked at band by band: products like many rows, masks few."""

    width: int
    bands: tuple[Band, ...]


def whole_tile(tiles: Tiles, masked: bool) -> Step:
    """All rows of a q tile with a tile of the keys."""
    return Step(tiles.block_kv, (Band(slice(0, tiles.block_q), (Cut(0, tiles.block_kv, masked, masked, masked),)),))


class Edge(NamedTuple):
    """The steps, one a piece of the q tile's rows, one after another without a branch.

    steps: of each piece, None where it has nothing to do. They start where the full tiles of the q tile end; or, where `alone`, at
    the first key that the piece sees, and then there is nothing else to visit.
    head, turn: the first `turn` q tiles, whose rows all see the first key, take these steps instead.
    """

    steps: tuple[Step | None, ...]
    alone: bool
    head: tuple[Step | None, ...] = ()
    turn: int = 0


def edge_of(problem: Problem, tiles: Tiles) -> Edge | None:
    """Of a static rule, alone or with labels: of other masks whole tiles may be hidden, and these are not to be visited."""
    spec = problem.mask
    if spec.rule is None or spec.rule.is_trivial or spec.has_patterns:
        return None
    return edge(spec.rule, problem.q_len, tiles, spec.has_labels)


@functools.lru_cache(maxsize=64)
def edge(rule: visibility.RowRule, q_len: int, tiles: Tiles, others: bool = False) -> Edge | None:
    """The same steps have to serve every q tile and stay within the resident keys, which must be all; else None."""
    if not tiles.pieces or rule.kv_len > tiles.resident:
        return None
    lo, _ = plan.bounds(rule, q_len)
    num_q, size = schedule.num_tiles(q_len, tiles.block_q), tiles.block_q // tiles.pieces
    r = plan.ranges_of(rule, q_len, tiles, np.arange(num_q))
    lo = lo[np.minimum(np.arange(num_q * tiles.pieces) * size, q_len - 1)].reshape(num_q, -1)  # of the first row of each piece
    first_key = lo // tiles.lanes * tiles.lanes
    steps = functools.partial(_steps, rule, q_len, tiles, others)
    after, alone = steps(np.broadcast_to(r.full_end[:, None] * tiles.block_kv, first_key.shape)), steps(first_key)
    widths = lambda steps: [step.width if step else 0 for step in steps]
    loops = int((r.full_end - r.begin).sum()) * tiles.block_kv * tiles.block_q // num_q
    no_larger_than_a_tile = max(widths(alone)) * size <= tiles.block_q * tiles.block_kv  # for which VMEM was planned
    no_more_scores = size * sum(widths(alone)) <= loops + size * sum(widths(after))
    little_code = size * sum(widths(alone)) <= _STRAIGHT * tiles.block_q * tiles.block_kv
    if no_larger_than_a_tile and no_more_scores and little_code:
        turn = int((lo[:, 0] == 0).sum())
        if turn in (0, num_q):
            return Edge(alone, alone=True)
        return Edge(steps(first_key, slice(turn, None)), True, steps(first_key, slice(turn)), turn)
    within_keys = (r.full_end * tiles.block_kv).max() + max(widths(after)) <= tiles.resident
    return Edge(after, alone=False) if within_keys and max(widths(after)) <= tiles.block_q + tiles.block_kv else None


def _steps(rule: visibility.RowRule, q_len: int, tiles: Tiles, others: bool, start: np.ndarray, of=slice(None)) -> tuple[Step | None, ...]:
    """start: `[q tiles, pieces]`, the first key of each step; of: the q tiles that take them."""
    lanes, size = tiles.lanes, tiles.block_q // tiles.pieces
    rows = tiles.band if tiles.band and size % tiles.band == 0 else size
    first = np.minimum(np.arange(start.shape[0] * tiles.block_q // rows) * rows, q_len - 1).reshape(*start.shape, -1)[of]
    last = np.minimum(first + rows, q_len) - 1
    down, up = lambda x: x // lanes * lanes, lambda x: -(-x // lanes) * lanes

    (lo, hi), start = plan.bounds(rule, q_len), start[of][:, :, None]
    empty = hi[last] <= lo[first]
    widths = up(np.where(empty, 0, hi[last] - start).max((0, 2)).clip(0))[:, None]
    start = np.minimum(start, tiles.resident - widths)
    begin, end = down(np.where(empty, widths, lo[first] - start).min(0)), up(np.where(empty, 0, hi[last] - start).max(0))
    seen = up((lo[last] - start).max(0)), down((hi[first] - start).min(0))

    def step(width, *bounds):
        bands = (
            Band(slice(n * rows, (n + 1) * rows), _cuts(*of_band, others, lanes)) for n, of_band in enumerate(zip(*bounds, strict=True))
        )
        return Step(int(width), tuple(bands)) if width else None

    return tuple(step(width[0], *x) for width, *x in zip(widths, *(x.clip(0, widths).tolist() for x in (begin, *seen, end)), strict=True))


def _cuts(begin: int, seen_begin: int, seen_end: int, end: int, others: bool, lanes: int) -> tuple[Cut, ...]:
    """Of keys that all rows see from `seen_begin` to `seen_end`: outside, one bound is to be looked at, or both where there are none."""
    if begin >= end:  # nothing is seen, and a band has to have keys
        return (Cut(0, lanes, True, True, others),)
    if seen_begin > seen_end:
        return (Cut(begin, end, True, True, others),)
    seen_begin, seen_end = (min(max(x, begin), end) for x in (seen_begin, seen_end))
    ends = (begin, seen_begin, True, False), (seen_begin, seen_end, False, False), (seen_end, end, False, True)
    return tuple(Cut(*x, others) for x in ends if x[0] < x[1])
