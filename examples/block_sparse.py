"""Block-sparse attention: choose which blocks of keys each block of queries sees; the others cost nothing.

python examples/block_sparse.py
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import Mask, flash_attention

# float32 products in float32 on accelerators too, so that the two can be compared
jax.config.update("jax_default_matmul_precision", "highest")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--short", action="store_true", help="a short sequence")
length, block = (512, 64) if parser.parse_args().short else (4096, 128)
num_heads, count = 4, length // block

# A layout a head, causal over blocks: the neighbourhood, the first block, and every eighth block behind.
i, j = np.arange(count)[:, None], np.arange(count)
local, first = (i - j >= 0) & (i - j <= 2), (j == 0) & (i >= 0)
strided = (i >= j) & (j % 8 == 7)
layout = np.stack([local, local | first, local | strided, local | first | strided])  # [heads, q blocks, kv blocks]
query, key, value, weight = jax.random.normal(jax.random.key(0), (4, 1, length, num_heads, 64))


def sparse(query, key, value, blocks):
    return flash_attention(query, key, value, mask=Mask.causal() & Mask.from_blocks(blocks, block, block))


def dense(query, key, value, blocks):
    """The same by a mask of length x length."""
    seen = jnp.repeat(jnp.repeat(blocks, block, axis=-2), block, axis=-1) & jnp.tri(length, dtype=bool)
    return jax.nn.dot_product_attention(query, key, value, mask=seen)


def run(attention, blocks):
    """Output, gradients, and the seconds of the fastest of three runs. The layout is an argument: another one does not compile again."""
    loss = lambda query, key, value, blocks: (jnp.sum((out := attention(query, key, value, blocks)) * weight), out)
    function = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradients, out = jax.block_until_ready(function(query, key, value, blocks))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(query, key, value, blocks))
        seconds.append(time.perf_counter() - start)
    return (out, *gradients), min(seconds)


print(f"{length} positions in blocks of {block}, {num_heads} heads with a layout each; {jax.devices()[0].device_kind}")
print("blocks that head 3 sees (#), the first 16 x 32:")
for row in layout[3][:16, :32]:
    print("  " + "".join("#" if seen else "." for seen in row))

full = np.tril(np.ones((1, count, count), bool))
causal, causal_seconds = run(sparse, full)
got, sparse_seconds = run(sparse, layout)
want, dense_seconds = run(dense, layout)
share = layout.sum() / (num_heads * full.sum())
print(f"\nforward and backward with {share:.0%} of the causal blocks:")
print(f"  flash_attention, all causal blocks  {1e3 * causal_seconds:8.1f} ms")
print(f"  flash_attention, these blocks       {1e3 * sparse_seconds:8.1f} ms, {causal_seconds / sparse_seconds:.1f} times as fast")
print(f"  jax.nn with a dense mask            {1e3 * dense_seconds:8.1f} ms\n")
for name, a, b in zip(("out", "dquery", "dkey", "dvalue"), want, got, strict=True):
    print(
        f"{name:<7} largest difference from the dense mask {float(jnp.abs(a - b).max()):.1e}, largest value {float(jnp.abs(a).max()):.1f}"
    )
