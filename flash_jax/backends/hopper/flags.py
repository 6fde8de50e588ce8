"""What the warpgroups of a block tell each other of its tiles of rows: which have lost a row, and after which the maximum is searched for.

A flag is a word in shared memory, of a warpgroup and a kind. Tiles of the same number n % `_TILES` share it: to compute one anew, or to
search, without need harms nothing.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import clean, pipeline
from flash_jax.backends.hopper.pipeline import ROWS, WARPGROUP_ROWS

_TILES = WARPGROUP_ROWS // 2
WORDS = clean.MARKS + 2 * _TILES  # of a warpgroup: `clean` has the first, for each array in shared memory takes whole kilobytes
_BEHIND = 3  # tiles: Q of tile n is copied after all warpgroups have read that of tile n - 2 for the last time, and so ended tile n - 3


class Flags:
    """words: int32 `[warpgroups, WORDS]` in shared memory."""

    def __init__(self, words):
        self._words = words

    def lower(self, warpgroup) -> None:
        """At first: all flags of a warpgroup."""
        self._words[warpgroup, pl.ds(clean.MARKS, 2 * _TILES)] = plgpu.layout_cast(jnp.zeros((2 * _TILES,), jnp.int32), ROWS)
        plgpu.commit_smem()  # before another warp raises or reads one

    def raise_lost(self, warpgroup, n, is_lost, has_sum) -> None:
        """Of tile n, int32 `[64]`, nonzero: rows that are lost, and those of them that have a sum. For these later tiles search at once."""
        pipeline.raise_flag(self._lost(warpgroup, n), is_lost)
        pipeline.raise_flag(self._search(warpgroup, n), has_sum)

    def raise_searched(self, warpgroup, n) -> None:
        """Tile n's maximum was searched for: so will that of tile n + 3 be."""
        pipeline.raise_flag(self._search(warpgroup, n), plgpu.layout_cast(jnp.ones((WARPGROUP_ROWS,), jnp.int32), ROWS))

    def is_lost(self, n):
        """Whether a warpgroup has lost a row of tile n."""
        return self._is_raised(self._lost, n)

    def searches(self, n, is_again):
        """Whether the maximum of tile n is searched for: always when it is computed anew, else if tile n - 3 was, or lost rows with a sum.

        All warps must agree, for turns and copies depend on it. In a branch: before tile 3 not all flags are lowered.
        """
        return lax.cond(~is_again & (n >= _BEHIND), lambda: self._is_raised(self._search, n - _BEHIND), lambda: is_again)

    def _lost(self, warpgroup, n):
        return self._words.at[warpgroup, clean.MARKS + pipeline.remainder(n, _TILES)]

    def _search(self, warpgroup, n):
        return self._words.at[warpgroup, clean.MARKS + _TILES + pipeline.remainder(n, _TILES)]

    def _is_raised(self, flag, n):
        of_each = [flag(w, n)[...] for w in range(self._words.shape[0])]
        return sum(of_each[1:], of_each[0]) != 0
