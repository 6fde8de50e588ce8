"""What the backward and the gradient of the bias compute alike: scores again from q, k and lse, and the cotangents of a tile."""

import jax.numpy as jnp

from flash_jax import softmax
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.launch import Arrays
from flash_jax.backends.tpu.tile import NT, Tile, dot
from flash_jax.logits import dscores
from flash_jax.problem import Problem


def tile_gradients(problem: Problem, tile: Tile, refs: Arrays, cuts: plan.Cuts):
    """`(q, k, dout, p, dlogits, ds)` of a tile; `ds` is the cotangent of the scaled scores."""
    q, dout = refs.query[tile.rows, :], refs.dout[tile.rows, :]
    k, v = refs.key[tile.slice, :], refs.value[tile.slice, :]
    same = lambda row: row
    s, tanh = tile.logits(dot(problem, k, q, NT))
    s, hidden = tile.hide(s, cuts)
    p = softmax.probs_from_lse(s, refs.pivot[:, tile.rows], same)
    if refs.weight is not None:
        p = p * refs.weight[:, tile.rows]
    dp = tile.drop(dot(problem, v, dout, NT))
    dlogits = softmax.dlogits(p, dp, refs.delta[:, tile.rows], same)
    if hidden and plan.hides(problem)[1]:
        dlogits = jnp.where(p != 0, dlogits, 0)
    return q, k, dout, p, dlogits, dscores(dlogits, tanh)
