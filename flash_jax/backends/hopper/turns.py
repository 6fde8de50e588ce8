"""Adding to dq in a fixed order, so that gradients repeat bit by bit: blocks of threads take turns at each query tile.

Key tiles add from the last to the first. Blocks start in that order too, so one that waits for its turn waits for blocks that
run already (cards start blocks by their number; CUDA does not promise it). Where early queries see few keys, which is where most
masks make tiles unequal, a later key tile is ahead by itself, and nobody waits.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils


def table(ranges: jax.Array | None, lists: jax.Array | None, num_kv_tiles: int, num_q_tiles: int) -> jax.Array:
    """How many later key tiles visit the q tile, int32 `[1 | batch, 1 | num_kv_heads, num_kv_tiles, num_q_tiles]`.

    ranges, lists: what is visited, as `backward_tile.Inputs` has it; everything where both are None.
    """
    tiles = jnp.arange(num_q_tiles, dtype=jnp.int32)
    if lists is not None:
        visits = jnp.argsort(lists[..., 2:], axis=-1) < lists[..., 1:2]  # where a tile stands in a list, and the end of the list
    elif ranges is not None:
        visits = ((ranges[..., :1] <= tiles) & (tiles < ranges[..., 3:]))[:, None]
    else:
        visits = jnp.ones((1, 1, num_kv_tiles, num_q_tiles), bool)
    visits = visits.astype(jnp.int32)
    return jnp.cumsum(visits[..., ::-1, :], axis=-2)[..., ::-1, :] - visits


class Adds:
    """The adds of one warpgroup, in any order, or in turns where there is a count of those that are done.

    walk: what a step visits. turns: reference to a row of `table`, `[num_q_tiles]`.
    done: reference to int32 `[batch, num_heads, num_q_tiles, warpgroups]`, zero at first. Both None: in any order.
    """

    def __init__(self, walk, turns, done, wg: int):
        self.walk, self.turns, self.done, self.wg = walk, turns, done, wg

    def _count(self, i):
        head, tile = self.walk(i)
        return self.done.at[self.walk.b, head, tile, pl.ds(self.wg, 1)]

    def begin(self, i) -> None:
        """Call before adding in step i, once what is added lies in shared memory."""
        if self.done is not None:
            _, tile = self.walk(i)
            await_count(self._count(i), self.turns[tile])

    def reuse(self, i) -> None:
        """Call in step i before shared memory is written that the step before has added from."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=self.done is None)
        if self.done is not None:
            pl.when(i > 0)(lambda: increment(self._count(i - 1)))

    def end(self) -> None:
        """Call after the last step."""
        plgpu.wait_smem_to_gmem(0)
        if self.done is not None:
            pl.when(self.walk.steps > 0)(lambda: increment(self._count(self.walk.steps - 1)))


def await_count(ref, count) -> None:
    """Wait until `ref`, int32 `[1]` in global memory, holds at least `count`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def wait(_, ref, count):
        semaphore = mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(ref))
        semaphore.wait(count.registers[()], decrement=False, memory_scope="gpu")

    wait(ref, count)


def increment(ref) -> None:
    """Add 1 to `ref`, int32 `[1]` in global memory, after everything this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, ref):
        mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    signal(ref)
