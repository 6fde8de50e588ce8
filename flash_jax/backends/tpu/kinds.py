"""Which key tiles a q tile visits where the mask depends on data: a table of kinds, which the kernels read from SMEM."""

import jax
import jax.numpy as jnp
from jax import lax

from flash_jax import schedule, visibility
from flash_jax.backends.tpu import plan
from flash_jax.backends.tpu.config import Tiles
from flash_jax.problem import Operands, Problem

Array = jax.Array


def kinds(problem: Problem, tiles: Tiles, operands: Operands) -> Array | None:
    """int32 `[1 | batch, 1 | heads, q tiles, 1, kv tiles + 2]`, or None when static.

    Padded with EMPTY to whole slices of the keys; the last two are the first visited tile and one past the last.
    """
    if plan.is_static(problem):
        return None
    of_functions = (_function_kinds(problem, tiles, operands, n) for n in range(len(problem.mask.functions)))
    lengths, blocks = (problem.q_len, problem.kv_len), (tiles.block_q, tiles.block_kv)
    joined = visibility.tile_kinds(problem.mask, operands.mask, lengths, blocks, of_functions).astype(jnp.int32)
    missing = -joined.shape[-1] % tiles.tiles_resident
    r, _ = schedule.ranges_of_kinds(joined)
    parts = jnp.pad(joined, [(0, 0)] * 3 + [(0, missing)]), r.begin[..., None], r.end[..., None]
    return jnp.concatenate(parts, -1)[:, :, :, None]


def _function_kinds(problem: Problem, tiles: Tiles, operands: Operands, n: int) -> Array:
    """Kinds of a mask function, tile by tile: O(tiles) memory, O(scores) work."""
    function, arrays, ids = problem.mask.functions[n], operands.mask.functions[n], operands.mask.batch_ids
    head_ids = jnp.arange(problem.num_heads if function.reads_head else 1, dtype=jnp.int32)

    def cut(x, length, block, number):
        padded = jnp.pad(x, [(0, 0), (0, -length % block)])
        return lax.dynamic_slice_in_dim(padded, number * block, block, 1)

    def kind(i, j):
        def read(of_kind, x):
            match of_kind:
                case "query":
                    return cut(x, problem.q_len, tiles.block_q, i)
                case "key":
                    return cut(x, problem.kv_len, tiles.block_kv, j)
                case _:
                    return x

        q_ids = i * tiles.block_q + jnp.arange(tiles.block_q, dtype=jnp.int32)
        kv_ids = j * tiles.block_kv + jnp.arange(tiles.block_kv, dtype=jnp.int32)
        seen = visibility.by_function(function, ids, head_ids, q_ids, kv_ids, tuple(map(read, function.kinds, arrays)))
        inside = (q_ids < problem.q_len)[:, None] & (kv_ids < problem.kv_len)
        return schedule.classify((seen & inside).any((2, 3)), (seen | ~inside).all((2, 3)))

    numbers = lambda length, size: jnp.arange(schedule.num_tiles(length, size), dtype=jnp.int32)
    kv_tiles = numbers(problem.kv_len, tiles.block_kv)
    by_tile = lax.map(lambda i: lax.map(lambda j: kind(i, j), kv_tiles), numbers(problem.q_len, tiles.block_q))
    return by_tile.transpose(2, 3, 0, 1)
