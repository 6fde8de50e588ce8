"""Any machine: loops over tiles in plain `jnp`, linear memory, every feature.

The score matrix is cut into tiles; a schedule lists the tiles that hold a visible score, and only those are visited, so the
work of a masked problem is that of its tiles. A tile is `[batch_inner, head_inner, block_kv, group, block_q]`: as many batch
entries and heads as share one schedule. Those that do not are slots, visited one after another (see `layout.Split`). Keys lie
before rows: then every product is a plain row-major one and the softmax reduces over a leading axis; on a CPU a product with
a transposed left side runs at less than half the speed (measured: benchmarks/cpu_products.py).
"""

from flash_jax import schedule
from flash_jax.backends.base import Backend, Device, by_one_rule
from flash_jax.backends.xla.layout import Config
from flash_jax.backends.xla.passes import backward, forward, jvp
from flash_jax.problem import Problem

__all__ = ["BACKEND", "Config", "default_config", "jvp"]


_SMALL = 2**20  # scores, 4 MiB: a CPU's cache holds them, and one pass costs less than starting one for each batch entry


def default_config(problem: Problem, device: Device) -> Config:
    """256 x 256, or rows in one piece where a short full row needs no online softmax; as equal as possible for the lengths.

    On a CPU one batch entry at a time, so that each skips its own tiles, unless all together are a small tile of scores.

    measured: python -m flash_jax.bench cpu; python benchmarks/short_lengths.py FILE
    """
    short = problem.mask.hides_nothing and 256 < problem.kv_len <= 512
    block_q, block_kv = problem.block_sizes or ((128, 512) if short else (256, 256))

    def even(length, block):
        return -(-length // max(schedule.num_tiles(length, block), 1))

    block_q, block_kv = even(problem.q_len, block_q), even(problem.kv_len, block_kv)
    small = (
        (problem.q_len, problem.kv_len) == (block_q, block_kv)
        and max(block_q, block_kv) <= 128
        and problem.dtype.itemsize >= 4  # XLA has no 16-bit products over two batch axes for every CPU (JAX 0.11)
        and isinstance(problem.batch, int)  # not symbolic
        and problem.batch * problem.num_heads * block_q * block_kv <= _SMALL
    )
    return Config(block_q, block_kv, split_batch=device.platform == "cpu" and not small)


def why_not(problem: Problem, device: Device) -> str | None:
    """Nothing is declined."""
    del problem, device


BACKEND = Backend("xla", why_not, by_one_rule(default_config), forward, backward)
