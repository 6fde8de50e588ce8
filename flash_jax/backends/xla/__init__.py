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
from flash_jax.backends.xla.passes import backward, forward, jvp, row_states
from flash_jax.problem import Problem

__all__ = ["BACKEND", "Config", "default_config", "jvp", "row_states"]


def default_config(problem: Problem, device: Device) -> Config:
    """256 x 256, or rows in one piece where a short full row needs no online softmax; as equal as possible for the lengths.

    measured: python -m flash_jax.bench cpu
    """
    short = problem.mask.hides_nothing and 256 < problem.kv_len <= 512
    block_q, block_kv = problem.block_sizes or ((128, 512) if short else (256, 256))

    def even(length, block):
        return -(-length // max(schedule.num_tiles(length, block), 1))

    return Config(even(problem.q_len, block_q), even(problem.kv_len, block_kv), split_batch=device.platform == "cpu")


def why_not(problem: Problem, device: Device) -> str | None:
    """Nothing is declined."""
    del problem, device


BACKEND = Backend("xla", why_not, by_one_rule(default_config), forward, backward)
