"""Arrays of a call, whatever leading axes they have, brought to the one layout that everything behind the call reads.

A batch of any axes becomes one axis, and an axis of 1 says that all entries share what it holds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.problem import as_array, as_integers, check_booleans, fold_batch

Array = jax.Array

LONGEST = 2**29  # lengths and offsets are at most this, so that positions and what is added to them stay in int32


class Shape(NamedTuple):
    """The sizes that arrays are aligned to; `batch` as the user gave it."""

    batch: tuple[int, ...]
    num_heads: int
    q_len: int
    kv_len: int


def collapse_batch(name: str, array, shape: Shape, trailing: tuple[int, ...]) -> Array:
    """`[*batch, *trailing]` (leading axes may be missing or 1) -> `[1 | batch, *trailing]`."""
    array = as_array(name, array)
    want = (*shape.batch, *trailing)
    if not shape.batch and array.shape == (1, *trailing):  # jax.nn: inputs without a batch axis count as a batch of one
        array = array[0]
    lead = array.ndim - len(trailing)
    fits = 0 <= lead <= len(shape.batch) and array.shape[lead:] == trailing
    fits = fits and all(n in (1, m) for n, m in zip(array.shape[:lead], shape.batch[len(shape.batch) - lead :], strict=True))
    if not fits:
        raise ValueError(f"{name} must have shape {list(want)}, got {list(array.shape)}.")
    if all(n == 1 for n in array.shape[:lead]):
        return array.reshape(1, *trailing)
    return fold_batch(jnp.broadcast_to(array, want), len(shape.batch))


def as_positions(name: str, array, shape: Shape) -> Array:
    """Offsets and lengths `[*batch]` as int32 `[1 | batch]`, clipped to where more means the same."""
    if isinstance(array, (int, np.integer, np.ndarray)) and np.asarray(array).dtype.kind in "iu":
        array = np.asarray(array)  # jnp.asarray would drop the high half of an int64
        array = np.minimum(array, min(LONGEST, np.iinfo(array.dtype).max)).astype(np.int64).clip(-LONGEST)
    array = as_integers(name, array)
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.int32)
    least = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -LONGEST
    return collapse_batch(name, jnp.clip(array, least, LONGEST).astype(jnp.int32), shape, ())


def as_labels(name: str, ids, shape: Shape, length: int) -> Array:
    """Segment ids `[*batch, length]` as int32 `[1 | batch, length]`."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and np.any(ids != ids.astype(np.int32)):
        raise ValueError(f"{name} must fit in int32, got {ids.min()} to {ids.max()}. Number the segments anew.")
    return collapse_batch(name, as_integers(name, ids), shape, (length,)).astype(jnp.int32)


def align(name: str, array, shape: Shape, trailing: tuple[int, int, int], *, dtype=jnp.bool_, broadcast=(True,) * 4) -> Array:
    """Right-align to `[*batch, *trailing]`, each axis 1 or full -> `[1 | batch, 1 | heads, 1 | rows, 1 | columns]`."""
    array = as_array(name, array)
    if dtype is jnp.bool_:
        check_booleans(name, array)
    want = (*shape.batch, *trailing)
    if not shape.batch and array.ndim == 4 and array.shape[0] == 1:  # jax.nn: inputs without a batch axis count as a batch of one
        array = array[0]
    refusal = f"{name} must broadcast to {list(want)}, got {list(array.shape)}."
    if array.ndim > len(want):
        raise ValueError(refusal)
    if shape.batch and array.ndim == len(want) - 1:
        refusal += " Axes are aligned at the right: batch entries without heads need an axis for them, as in x[:, None]."
    full = (1,) * (len(want) - array.ndim) + array.shape
    lead = len(shape.batch)
    for axis, (n, m) in enumerate(zip(full, want, strict=True)):
        may_be_one = axis < lead or broadcast[axis - lead + 1]
        if n != m and not (n == 1 and may_be_one):
            raise ValueError(refusal)
    array = array.reshape(full)
    if all(n == 1 for n in full[:lead]):
        return array.reshape(1, *full[lead:])
    return fold_batch(jnp.broadcast_to(array, (*shape.batch, *full[lead:])), lead)
