"""Which scores of a tile are visible: the predicates of a `Visibility`, evaluated at given rows and keys.

The reference evaluates one tile that spans everything; `xla` and the kernels evaluate partial tiles. Shapes broadcast:
whatever the layout of the tile, `batch`, `head`, `q_ids` and `kv_ids` line up against it.
"""

import jax
import jax.numpy as jnp

from flash_jax.mask import MaskFunction

Array = jax.Array


def in_interval(kv_lo: Array, kv_hi: Array, kv_ids: Array) -> Array:
    """`[..., block_q]` bounds and `[block_kv]` key positions -> booleans `[..., block_q, block_kv]`."""
    return (kv_lo[..., None] <= kv_ids) & (kv_ids < kv_hi[..., None])


def equal_labels(q_labels: Array, kv_labels: Array) -> Array:
    """`[..., block_q]` and `[..., block_kv]` -> booleans `[..., block_q, block_kv]`."""
    return q_labels[..., :, None] == kv_labels[..., None, :]


def in_blocks(blocks: Array, block_sizes: tuple[int, int], q_ids: Array, kv_ids: Array) -> Array:
    """Block map `[..., num_q_blocks, num_kv_blocks]` at `q_ids`, `kv_ids` -> booleans `[..., block_q, block_kv]`."""
    rows = jnp.take(blocks, q_ids // block_sizes[0], axis=-2, mode="clip")
    return jnp.take(rows, kv_ids // block_sizes[1], axis=-1, mode="clip")


def by_function(function: MaskFunction, batch: Array, head: Array, q_ids: Array, kv_ids: Array, operands: tuple[Array, ...]) -> Array:
    """A scalar mask function over a tile -> booleans `[batch, head, block_q, block_kv]`.

    `batch` `[b]`, `head` `[h]`, `q_ids` and `kv_ids` are the indices that the function sees. Operands have a leading axis 1 or
    b; after it `"query"` ones have `block_q`, `"key"` ones `block_kv`, `"head"` ones `h` entries; captured ones are whole.
    """

    def axes(kind: str) -> list[int | None]:
        return [0 if function.kinds[n] == kind else None for n in range(len(operands))]

    shared = [operand.shape[0] == 1 and batch.shape[0] != 1 for operand in operands]
    operands = tuple(operand[0] if one else operand for operand, one in zip(operands, shared, strict=True))
    per_batch = [None if one else 0 for one in shared]
    evaluate = jax.vmap(function, (None, None, None, 0, *axes("key")))
    evaluate = jax.vmap(evaluate, (None, None, 0, None, *axes("query")))
    evaluate = jax.vmap(evaluate, (None, 0, None, None, *axes("head")))
    evaluate = jax.vmap(evaluate, (0, None, None, None, *per_batch))
    return evaluate(batch, head, q_ids, kv_ids, *operands)
