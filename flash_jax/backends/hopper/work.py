"""Which block of threads does which tiles: a list for each multiprocessor, made before the kernel runs.

The grid is persistent: one block a multiprocessor, which walks its list. Lists are dealt out longest first, each tile to the
multiprocessor that is free first, inside sections of heads, so that the L2 cache keeps their keys and values. Where the tiles of rows are
too few for the multiprocessors, the keys of a tile are split among several, whose results are merged.
"""

import heapq

import jax
import jax.numpy as jnp
import numpy as np

_SECTION_BYTES = 8 * 2**20  # of keys and values, which the cache keeps; of 32 MiB it does not (measured: docs/io.md)
_UNEVEN_SECTION_BYTES = 32 * 2**20  # where tiles visit unlike numbers of keys: a small section has too few short ones to end with
_TILE_COST = 1.5  # prologue and epilogue of a tile, in steps
_MERGE_COST = 4.0  # of a launch that merges splits, in steps


def deal(steps: np.ndarray, batch: int, num_heads: int, bytes_per_head: int, num_multiprocessors: int) -> np.ndarray:
    """Lists of `(b, head, tile)`, int32 `[num_multiprocessors, longest, 3]`; -1 after the end of a list.

    steps: int `[tiles of a head]`, (an estimate of) the key tiles that each visits.
    """
    limit = _SECTION_BYTES if steps.min() == steps.max() else _UNEVEN_SECTION_BYTES
    section = 1 << max(0, int(np.log2(max(1, limit // max(bytes_per_head, 1)))))
    heads = batch * num_heads
    longest_first = np.argsort(-steps, kind="stable")
    free = [(0.0, n) for n in range(num_multiprocessors)]
    lists: list[list[tuple[int, int, int]]] = [[] for _ in range(num_multiprocessors)]
    for first in range(0, heads, section):
        for tile in longest_first:
            for head in range(first, min(first + section, heads)):
                busy, n = heapq.heappop(free)
                lists[n].append((head // num_heads, head % num_heads, int(tile)))
                heapq.heappush(free, (busy + float(steps[tile]) + _TILE_COST, n))
    table = np.full((num_multiprocessors, max(map(len, lists)), 3), -1, np.int32)
    for n, tiles in enumerate(lists):
        table[n, : len(tiles)] = np.array(tiles, np.int32).reshape(-1, 3)
    return table


def deal_by_data(
    cost: jax.Array, batch: int, num_heads: int, num_multiprocessors: int
) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray]:
    """`b, head, tile`, int32 `[num_multiprocessors, longest]`, and the length of each list, where the work depends on data.

    cost: int `[1 | batch, 1 | num_heads, tiles of a head]`, in any unit. Longest first, round after round, every other round in reverse.
    Only what differs is sorted. Of heads that share costs each list takes one after the other, so that all lists are at about the same
    head's keys.
    """
    own_batch, own_heads, tiles = cost.shape
    copies = batch * num_heads // (own_batch * own_heads)
    count = batch * num_heads * tiles
    rounds = -(-count // num_multiprocessors)
    place = np.arange(rounds * num_multiprocessors).reshape(rounds, num_multiprocessors)
    place[1::2] = place[1::2, ::-1]
    place = place.T
    first_round = place // copies * copies // num_multiprocessors  # of the places that share their cost
    copy = (place - first_round * num_multiprocessors + first_round) % copies
    by_copy = np.argsort(np.where(place < count, copy, copies), axis=1, kind="stable")
    place, copy = (np.take_along_axis(x, by_copy, axis=1) for x in (place, copy))
    shortest_first = jnp.argsort(cost.transpose(0, 2, 1).ravel()).astype(jnp.int32)  # of -cost, XLA would have a kernel more
    entry = shortest_first[cost.size - 1 - np.minimum(place, count - 1) // copies]
    head = entry % own_heads if own_heads > 1 else jnp.asarray(copy % num_heads, jnp.int32)
    b = entry // (own_heads * tiles) if own_batch > 1 else jnp.asarray(copy // (num_heads // own_heads), jnp.int32)
    return b, head, entry // own_heads % tiles, (place < count).sum(1).astype(np.int32)


def splits(tiles: int, steps: int, num_multiprocessors: int) -> int:
    """Into how many parts to split the keys of each tile of rows, that visits `steps` key tiles: what ends first; no part is empty."""

    def cost(parts: int) -> float:
        rounds = -(-tiles * parts // num_multiprocessors)
        return rounds * (-(-steps // parts) + _TILE_COST) + (_MERGE_COST if parts > 1 else 0)

    parts = min(range(1, min(steps, num_multiprocessors) + 1), key=cost)
    return -(-steps // -(-steps // parts))
