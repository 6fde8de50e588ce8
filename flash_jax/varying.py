"""Inside `jax.shard_map(check_vma=True)` the type of an array says over which mesh axes it varies, and operands must vary alike.

Functions of `jax.numpy` see to that; a primitive bound directly and the carry of a loop do not.
"""

from collections.abc import Sequence

import jax

Array = jax.Array


def _axes(x) -> frozenset:
    return jax.typeof(x).mat.varying


def _over(x: Array, axes: frozenset) -> Array:
    """Varying over these axes too."""
    return jax.lax.pcast(x, tuple(axes - _axes(x)), to="varying") if axes - _axes(x) else x


def vary_alike(arrays: Sequence[Array]) -> list[Array]:
    """Every array varies over the mesh axes that any of them varies over."""
    union = frozenset().union(*map(_axes, arrays))
    return [_over(x, union) for x in arrays]


def varying_like(tree, x: Array):
    """Fresh arrays, the start of a loop's carry, as varying over the mesh as what the loop will add to them."""
    return jax.tree.map(lambda leaf: _over(leaf, _axes(x)), tree)
