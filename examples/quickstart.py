"""Replace `jax.nn.dot_product_attention` by `flash_attention`: the same numbers in linear memory.

python examples/quickstart.py
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp

from flash_jax import explain, flash_attention

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--short", action="store_true", help="a short sequence")
length = 512 if parser.parse_args().short else 4096

# float32 products in float32 on accelerators too, so that the two can be compared
jax.config.update("jax_default_matmul_precision", "highest")

# [batch, length, heads, head_dim]; two query heads share a key head
query, key, value, weight = (jax.random.normal(jax.random.key(n), (1, length, heads, 64)) for n, heads in enumerate((8, 4, 4, 8)))


def with_gradients(attention):
    """Jitted and compiled: output and the gradients of all three inputs."""

    def loss(query, key, value):
        out = attention(query, key, value, is_causal=True)
        return jnp.sum(out * weight), out

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(query, key, value).compile()
    gradients, out = jax.block_until_ready(compiled(query, key, value))
    start = time.perf_counter()
    jax.block_until_ready(compiled(query, key, value))
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    assert memory is not None
    return (out, *gradients), seconds, memory.temp_size_in_bytes


print(f"causal attention forward and backward, {length} positions, 8 heads of 64, {jax.devices()[0].device_kind}\n")
stock, stock_seconds, stock_memory = with_gradients(jax.nn.dot_product_attention)
flash, flash_seconds, flash_memory = with_gradients(flash_attention)
print(f"jax.nn.dot_product_attention  {1e3 * stock_seconds:8.1f} ms {stock_memory / 2**20:9.1f} MiB of temporary memory")
print(f"flash_jax.flash_attention     {1e3 * flash_seconds:8.1f} ms {flash_memory / 2**20:9.1f} MiB of temporary memory\n")
for name, a, b in zip(("out", "dquery", "dkey", "dvalue"), stock, flash, strict=True):
    print(f"{name:<7} largest difference {float(jnp.abs(a - b).max()):.1e}, largest value {float(jnp.abs(a).max()):.1f}")

print("\nWhat runs, and why nothing else does:")
print(explain(query, key, value, is_causal=True))

print("\nMore than jax.nn has, in any combination and with gradients:")
attend = functools.partial(flash_attention, *(x[:, :256] for x in (query, key, value)), is_causal=True)
for options in (
    {"logits_soft_cap": 30.0},
    {"sinks": jnp.zeros(8)},
    {"dropout_rate": 0.1, "dropout_key": jax.random.key(9)},
    {"q_segment_ids": jnp.arange(256) // 100, "kv_segment_ids": jnp.arange(256) // 100},
):
    out = attend(**options)
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(out))
    print(f"  flash_attention(..., {', '.join(options)}) -> {shapes}")
