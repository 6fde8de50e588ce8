"""What the backward and the gradient of the bias compute alike: scores again from q, k and lse, and the cotangents of a tile."""

import jax.numpy as jnp

from flash_jax import softmax
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.edge import Step
from flash_jax.backends.tpu.launch import Arrays
from flash_jax.backends.tpu.tile import NT, Tile, dot
from flash_jax.logits import dscores
from flash_jax.problem import Problem


def tile_gradients(problem: Problem, tile: Tile, refs: Arrays, what: Step):
    """Does the products q.k and dout.v of a tile, and gives a function that gives `(q, k, dout, p, dlogits, ds)`.

    `ds` is the cotangent of the scaled scores.
    """
    q, dout = refs.query[tile.rows, :], refs.dout[tile.rows, :]
    k, v = refs.key[tile.slice, :], refs.value[tile.slice, :]
    same = lambda row: row
    qk, dp = dot(problem, k, q, NT), dot(problem, v, dout, NT)

    def of_band(tile, qk, dp, band):
        s, tanh = tile.logits(qk)
        s, hidden = tile.hide(s, band)
        p = softmax.probs_from_lse(s, refs.pivot[:, tile.rows], same)
        if refs.weight is not None:
            p = p * refs.weight[:, tile.rows]
        dlogits = softmax.dlogits(p, tile.drop(dp), refs.delta[:, tile.rows], same)
        if hidden and plan.hides(problem)[1]:
            dlogits = jnp.where(p != 0, dlogits, 0)
        return tile.drop(p), dlogits, dscores(dlogits, tanh)

    def gradients():
        of_bands = [of_band(tile.of(band), tile.scores_of(qk, band), tile.scores_of(dp, band), band) for band in what.bands]
        return q, k, dout, *(tile.join(x, what.bands) for x in zip(*of_bands, strict=True))

    return gradients
