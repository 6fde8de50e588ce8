"""What the backward and the gradient of the bias compute alike: scores again from q, k and lse, and the cotangents of a tile."""

import jax.numpy as jnp

from flash_jax import softmax
from flash_jax.backends.tpu.launch import Arrays
from flash_jax.backends.tpu.tile import NT, Tile, dot
from flash_jax.logits import dscores
from flash_jax.problem import Problem


def tile_gradients(problem: Problem, tile: Tile, refs: Arrays, masked: bool):
    """`(q, k, dout, p, dlogits, ds)` of a tile, padding cleaned; `ds` is the cotangent of the scaled scores."""
    visible = tile.visible(masked)
    q, dout = (tile.clean(x[tile.rows, :], visible, of_keys=False) for x in (refs.query, refs.dout))
    k, v = (tile.clean(x[tile.slice, :], visible, of_keys=True) for x in (refs.key, refs.value))
    same = lambda row: row
    s, tanh = tile.logits(dot(problem, k, q, NT))
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    p = softmax.probs_from_lse(s, refs.pivot[:, tile.rows], same)
    if refs.weight is not None:
        p = p * refs.weight[:, tile.rows]
    dp = tile.drop(dot(problem, v, dout, NT))
    dlogits = softmax.dlogits(p, dp, refs.delta[:, tile.rows], same)
    return q, k, dout, p, dlogits, dscores(dlogits, tanh)
