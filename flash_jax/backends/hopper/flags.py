"""What the warpgroups of a block tell each other of the tiles of rows in its list: which have lost a row.

A flag is a word in shared memory, of a warpgroup and a kind. Number n % `_TILES` is tile n's, and those's of the same number: that these
are computed anew as well harms nothing.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import clean, pipeline
from flash_jax.backends.hopper.pipeline import ROWS, WARPGROUP_ROWS

_TILES = WARPGROUP_ROWS // 2
WORDS = clean.MARKS + 2 * _TILES  # of a warpgroup: `clean` has the first, for each array in shared memory takes whole kilobytes
_BEHIND = 3  # tiles: what is copied for tile n waits until all warpgroups have queries of tile n - 2, and so are done with tile n - 3


class Flags:
    """words: int32 `[warpgroups, WORDS]` in shared memory."""

    def __init__(self, words):
        self._words = words

    def lower(self, warpgroup) -> None:
        """At first: all flags of a warpgroup."""
        self._words[warpgroup, pl.ds(clean.MARKS, 2 * _TILES)] = plgpu.layout_cast(jnp.zeros((2 * _TILES,), jnp.int32), ROWS)
        plgpu.commit_smem()  # before another warp raises or reads one

    def raise_lost(self, warpgroup, n, is_lost, is_large) -> None:
        """Of tile n. Nonzero int32 `[64]`: rows that are lost, and those of them that are so by large logits."""
        pipeline.raise_flag(self._lost(warpgroup, n), is_lost)
        pipeline.raise_flag(self._large(warpgroup, n), is_large)

    def raise_searched(self, warpgroup, n) -> None:
        """Tile n would have lost rows, had its maximum not been searched for."""
        pipeline.raise_flag(self._large(warpgroup, n), plgpu.layout_cast(jnp.ones((WARPGROUP_ROWS,), jnp.int32), ROWS))

    def is_lost(self, n):
        """Whether a warpgroup has lost a row of tile n."""
        return self._is_raised(self._lost, n)

    def searches(self, n, is_again):
        """Whether the maximum of tile n is searched for before it is attended. All warps agree, and so in each run."""
        return lax.cond(~is_again & (n >= _BEHIND), lambda: self._is_raised(self._large, n - _BEHIND), lambda: is_again)

    def _lost(self, warpgroup, n):
        return self._words.at[warpgroup, clean.MARKS + pipeline.remainder(n, _TILES)]

    def _large(self, warpgroup, n):
        return self._words.at[warpgroup, clean.MARKS + _TILES + pipeline.remainder(n, _TILES)]

    def _is_raised(self, flag, n):
        of_each = [flag(w, n)[...] for w in range(self._words.shape[0])]
        return sum(of_each[1:], of_each[0]) != 0
