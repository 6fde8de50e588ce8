"""What is counted: arrays, kernels, and the tiles that a loop over tiles touches."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import mask as masks
from flash_jax import schedule
from flash_jax.align import Shape
from flash_jax.mask import Mask
from flash_jax.problem import Problem, static_scale
from flash_jax.visibility import RowRule

_ROWS_AT_ONCE = 8192  # one shape for all lengths: JAX compiles what it does with them once


class Traffic(NamedTuple):
    """One array in one kernel, in bytes.

    size: of the array. read, written: what the kernel moves; more than `size` where it comes back to the array.
    pieces: independent parts of the array, one for each batch entry and head.
    temporary: neither an input nor an output of attention; it passes from one kernel to a later one.
    """

    array: str
    size: int
    pieces: int
    read: int = 0
    written: int = 0
    temporary: bool = False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One pass over memory.

    flops: of its matrix products, a multiplication and an addition being two.
    sram: bytes that a core needs at once, or None where any block will do.
    sweepers: tiles of one head that different cores work on at the same time, each walking through the same arrays.
    """

    name: str
    flops: int
    traffic: tuple[Traffic, ...]
    sram: int | None = None
    sweepers: int = 1


@dataclasses.dataclass(frozen=True)
class Cost:
    """An algorithm: its kernels, one after another. Bytes and FLOPs are of the whole batch and all heads.

    recomputed: the part of `flops` that computes scores again which the forward had already.
    """

    name: str
    kernels: tuple[Kernel, ...]
    recomputed: int = 0

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def read(self) -> int:
        """Bytes from HBM to SRAM."""
        return sum(t.read for kernel in self.kernels for t in kernel.traffic)

    @property
    def written(self) -> int:
        """Bytes from SRAM to HBM."""
        return sum(t.written for kernel in self.kernels for t in kernel.traffic)

    @property
    def hbm(self) -> int:
        """Bytes in both directions."""
        return self.read + self.written

    @property
    def sram(self) -> int | None:
        """Bytes of SRAM that a core needs, or None where any block will do."""
        return max((kernel.sram for kernel in self.kernels if kernel.sram is not None), default=None)

    @property
    def memory(self) -> int:
        """Bytes in HBM beyond inputs and outputs: every temporary array, as if none reused the place of another."""
        return sum({t.array: t.size for kernel in self.kernels for t in kernel.traffic if t.temporary}.values())


class Visits(NamedTuple):
    """The tiles that a loop over tiles visits, summed over the batch and the query heads. Partial last tiles count what exists of them.

    tiles: visited ones. scores: entries in them. rows, keys: query rows and keys in them, once for each tile that they are in.
    """

    block_q: int
    block_kv: int
    tiles: int
    scores: int
    rows: int
    keys: int


def make_problem(
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype="bfloat16",
    mask: Mask | None = None,
) -> Problem:
    """A problem by its sizes; what is left out equals its counterpart (keys as queries, values as keys)."""
    kv_len = q_len if kv_len is None else kv_len
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    sizes |= {"head_dim": head_dim, "v_head_dim": v_head_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}.")
    spec, _ = masks.resolve(Mask(()) if mask is None else mask, Shape((batch,), num_heads, q_len, kv_len), 0)
    return Problem(
        batch,
        q_len,
        kv_len,
        num_heads,
        num_kv_heads,
        head_dim,
        v_head_dim,
        dtype=np.dtype(jnp.dtype(dtype)),
        mask=spec,
        scale=static_scale(None, head_dim),
    )


def with_length(problem: Problem, length: int) -> Problem:
    """The same problem with `length` queries and keys."""
    rule = problem.mask.rule
    if rule is None or not problem.mask.is_interval:
        raise ValueError("problem: only a mask that is an interval known before tracing has a length to change.")
    mask = problem.mask._replace(rule=dataclasses.replace(rule, kv_len=length))
    return dataclasses.replace(problem, q_len=length, kv_len=length, mask=mask)


def visits(problem: Problem, block_q: int, block_kv: int, density: float | None = None, kinds=None) -> Visits:
    """The tiles that `flash_jax.schedule` would visit.

    Args:
      problem: its mask must be an interval known before tracing (causal, window, prefix, chunks), unless the tiles are given.
      block_q: query rows of a tile.
      block_kv: keys of a tile.
      density: for a problem without a mask, the fraction of the tiles that are visited (block-sparse attention), in (0, 1].
      kinds: for any mask, kinds of tiles from `flash_jax.schedule`, `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`.
    """
    if block_q < 1 or block_kv < 1:
        raise ValueError(f"block_q and block_kv must be at least 1, got {block_q} and {block_kv}.")
    if density is not None and (kinds is not None or not problem.mask.hides_nothing):
        raise ValueError("density says which tiles are visited, and so do kinds or the problem's mask. Give one of them.")
    sizes = (problem.q_len, problem.kv_len, block_q, block_kv)
    if kinds is not None:
        leading, per_head = _of_kinds(np.asarray(kinds), *sizes)
    elif density is not None:
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {density}.")
        leading, per_head = 1, _four(round(density * n) for n in _of_all(*sizes))
    elif problem.mask.hides_nothing:
        leading, per_head = 1, _of_all(*sizes)
    elif problem.mask.is_interval and problem.mask.rule is not None:
        with jax.ensure_compile_time_eval():
            leading, per_head = 1, _of_interval(problem.mask.rule, *sizes)
    else:
        raise ValueError("problem: its mask depends on data or is no interval. Give density, or kinds from flash_jax.schedule.")
    heads = problem.batch * problem.num_heads
    if heads % leading:
        raise ValueError(f"kinds must have 1 or {problem.batch}, 1 or {problem.num_heads} leading entries, got {leading}.")
    return Visits(block_q, block_kv, *(n * (heads // leading) for n in per_head))


def _of_all(q_len: int, kv_len: int, block_q: int, block_kv: int) -> tuple[int, int, int, int]:
    q_tiles, kv_tiles = schedule.num_tiles(q_len, block_q), schedule.num_tiles(kv_len, block_kv)
    return q_tiles * kv_tiles, q_len * kv_len, q_len * kv_tiles, kv_len * q_tiles


@functools.cache
def _of_interval(rule: RowRule, q_len: int, kv_len: int, block_q: int, block_kv: int) -> tuple[int, int, int, int]:
    counts = np.zeros(4, np.int64)
    tiles = max(_ROWS_AT_ONCE // block_q, 1)
    for first in range(0, q_len, tiles * block_q):
        q_ids = jnp.arange(tiles * block_q, dtype=jnp.int32) + first
        lo, hi = rule(q_ids)
        ranges = schedule.interval_ranges(lo, jnp.where(q_ids < q_len, hi, lo), block_q, block_kv)  # a row past the end sees nothing
        begin, end = (np.asarray(x, np.int64) for x in (ranges.begin, ranges.end))
        rows = np.clip(q_len - first - np.arange(tiles) * block_q, 0, block_q)
        keys = np.where(end > begin, np.minimum(end * block_kv, kv_len) - begin * block_kv, 0)
        counts += (end - begin).sum(), (rows * keys).sum(), (rows * (end - begin)).sum(), keys.sum()
    return _four(counts)


def _of_kinds(kinds: np.ndarray, q_len: int, kv_len: int, block_q: int, block_kv: int) -> tuple[int, tuple[int, int, int, int]]:
    rows, keys = _sizes(q_len, block_q), _sizes(kv_len, block_kv)
    if kinds.shape[-2:] != (len(rows), len(keys)):
        raise ValueError(
            f"kinds must end in {[len(rows), len(keys)]}, q tiles and key tiles of {block_q} x {block_kv}, got {list(kinds.shape)}."
        )
    visited = (kinds != schedule.EMPTY).reshape(-1, len(rows), len(keys)).sum(0, dtype=np.int64)
    counts = visited.sum(), rows @ visited @ keys, (rows @ visited).sum(), (visited @ keys).sum()
    return int(np.prod(kinds.shape[:-2])), _four(counts)


def _four(counts) -> tuple[int, int, int, int]:
    tiles, scores, rows, keys = (int(n) for n in counts)
    return tiles, scores, rows, keys


def _sizes(length: int, block: int) -> np.ndarray:
    """Rows that exist of each tile."""
    starts = np.arange(schedule.num_tiles(length, block), dtype=np.int64) * block
    return np.minimum(length - starts, block)
