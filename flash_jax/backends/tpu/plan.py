"""Which key tiles a q tile visits, from the static rule by arithmetic in the kernel; and what the rule leaves unseen."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax import schedule, visibility
from flash_jax.backends.tpu.config import Tiles
from flash_jax.problem import Problem


def divide(x, n: int):
    """`x // n` for `x >= 0`; a shift where it can be, which costs the scalar core one step."""
    if n == 1:
        return x
    if isinstance(x, np.ndarray):
        return x // n
    x = jnp.asarray(x, jnp.int32)
    return lax.shift_right_logical(x, jnp.int32(n.bit_length() - 1)) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def is_static(problem: Problem) -> bool:
    """The mask is a rule known before tracing and nothing else."""
    return problem.mask.is_interval and problem.mask.rule is not None


def ranges(problem: Problem, tiles: Tiles, i) -> schedule.Ranges:
    """`schedule.interval_ranges` of q tile `i` from the rule at the tile's first and last row: bounds never decrease."""
    assert problem.mask.rule is not None
    return ranges_of(problem.mask.rule, problem.q_len, tiles, i)


def ranges_of(rule: visibility.RowRule, q_len: int, tiles: Tiles, i) -> schedule.Ranges:
    """`ranges` of any rule; in NumPy where `i` is."""
    xp = schedule.numpy_or_jax(i)
    first = xp.asarray(i, xp.int32) * tiles.block_q
    last = xp.minimum(first + tiles.block_q, q_len) - 1
    (lo_min, hi_min), (lo_max, hi_max) = rule(first), rule(last)
    up = lambda x: divide(x + (tiles.block_kv - 1), tiles.block_kv)
    seen = lo_min < hi_max
    begin = xp.where(seen, divide(lo_min, tiles.block_kv), 0)
    end = xp.where(seen, up(hi_max), 0)
    full_begin = xp.clip(up(lo_max), begin, end)
    return schedule.Ranges(begin, full_begin, xp.clip(divide(hi_min, tiles.block_kv), full_begin, end), end)


@functools.lru_cache(maxsize=64)
def bounds(rule: visibility.RowRule, q_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule's bounds of all rows, before tracing."""
    return rule(np.arange(q_len, dtype=np.int32))


@functools.lru_cache(maxsize=64)
def unseen(rule: visibility.RowRule, q_len: int) -> tuple[bool, bool]:
    """Whether the rule leaves a row without keys, and a key without rows."""
    lo, hi = bounds(rule, q_len)
    rows = np.zeros(rule.kv_len + 1, int)  # that see each key, as differences
    np.add.at(rows, lo, 1)
    np.subtract.at(rows, hi, 1)
    return bool((lo >= hi).any()), bool((rows.cumsum()[:-1] == 0).any())


def hides(problem: Problem) -> tuple[bool, bool]:
    """Whether there may be rows that see no key, and keys that no row sees: what those hold must not matter."""
    if problem.bias_shape is not None or not is_static(problem):
        return True, True
    return unseen(problem.mask.rule, problem.q_len)


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
