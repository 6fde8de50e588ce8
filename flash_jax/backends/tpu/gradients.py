"""What the backward and the gradient of the bias compute alike: scores again from q, k and lse, and the cotangents of a tile.

A tile of 16-bit dtypes is `[block_kv, block_q]`, so that lse and delta lie along lanes, as they do in memory. In float32 it is the
forward's, `[block_q, block_kv]`: an lse normalises the scores that it was made of, to their last bit, and a product of k and q may be
rounded otherwise than that of q and k. Of all roundings of the backward this one matters most (docs/numerics.md). Where such a tile
holds whole rows, their probabilities are normalised anew, and `sum(p * dp)` stands for `sum(out * dout)`, as in `xla`: of lse and out,
which are rounded, nothing is read.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flash_jax import softmax
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.config import Tiles
from flash_jax.backends.tpu.edge import Step
from flash_jax.backends.tpu.launch import Arrays, Ids
from flash_jax.backends.tpu.tile import Tile
from flash_jax.logits import dscores
from flash_jax.problem import Problem

Array = jax.Array


def whole_rows(problem: Problem, tiles: Tiles) -> bool:
    """A tile of float32 holds whole rows, as does each step within it."""
    return problem.dtype.itemsize == 4 and tiles.block_kv >= problem.kv_len


def _normalised(s: Array) -> Array:
    """Probabilities of whole rows."""
    m = s.max(1, keepdims=True)
    p = softmax.probs(s, softmax.pivot(m), lambda row: row)
    return p * softmax.weights_from_states(m, p.sum(1, keepdims=True))[1]


def tile_gradients(
    problem: Problem, tiles: Tiles, refs: Arrays, ids: Ids, first_tile, start, rows: slice, what: Step
) -> tuple[Tile, Callable]:
    """The tile, whose products of q with k and of dout with v it does, and a function that gives `(q, k, dout, p, dlogits, ds)`.

    `ds` is the cotangent of the scaled scores.
    """
    tile = Tile(problem, tiles, refs, ids, first_tile, start, what.width, rows, keys_first=problem.dtype.itemsize == 2)
    q, dout = refs.query[tile.rows, :], refs.dout[tile.rows, :]
    k, v = refs.key[tile.slice, :], refs.value[tile.slice, :]
    same = lambda row: row
    qk, dp = tile.product(q, k), tile.product(dout, v)

    def of_band(tile, qk, dp, band):
        s, tanh = tile.logits(qk)
        s, hidden = tile.hide(s, band)
        hidden = hidden and plan.hides(problem)[1]
        dp, delta = tile.drop(dp), tile.row(refs.delta)
        if whole_rows(problem, tiles):
            p = _normalised(s)
            if problem.q_len % tiles.block_q:  # rows past the end may see keys that no row does
                p = jnp.where(tile.q_ids < problem.q_len, p, 0)
            dp = jnp.where(p != 0, dp, 0) if hidden else dp
            delta += (p * dp).sum(1, keepdims=True)
        else:
            p = softmax.probs_from_lse(s, tile.row(refs.pivot), same)
            p = p if refs.weight is None else p * tile.row(refs.weight)
        dlogits = softmax.dlogits(p, dp, delta, same)
        dlogits = jnp.where(p != 0, dlogits, 0) if hidden else dlogits
        return tile.drop(p), dlogits, dscores(dlogits, tanh)

    def gradients():
        of_bands = [of_band(tile.of(band), tile.scores_of(qk, band), tile.scores_of(dp, band), band) for band in what.bands]
        return q, k, dout, *(tile.join(x, what.bands) for x in zip(*of_bands, strict=True))

    return tile, gradients
