"""Packs sequences of different lengths into one row, so that no position is padding.

python examples/packed_sequences.py
"""

import argparse
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import Mask, flash_attention, segment_ids

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--short", action="store_true", help="short sequences")
scale = 1 if parser.parse_args().short else 8

lengths = np.array([120, 30, 200, 15, 90, 57]) * scale
total, longest = int(lengths.sum()), int(lengths.max())
starts = np.concatenate([[0], np.cumsum(lengths)])
ids = segment_ids(starts, total)[None]
query, key, value, weight = jax.random.normal(jax.random.key(0), (4, 1, total, 4, 64))


def unpack(x):
    """`[1, total, ...]` to `[sequences, longest, ...]`, with NaN as padding: what is hidden must not matter."""
    rows = [jnp.pad(x[0, a:b], ((0, longest - (b - a)), (0, 0), (0, 0)), constant_values=jnp.nan) for a, b in itertools.pairwise(starts)]
    return jnp.stack(rows)


def packed(query, key, value):
    return flash_attention(query, key, value, is_causal=True, q_segment_ids=ids, kv_segment_ids=ids)


def padded(query, key, value):
    return flash_attention(query, key, value, mask=Mask.causal() & Mask.lengths(lengths, lengths))


def mixed_up(query, key, value):
    return flash_attention(query, key, value, is_causal=True)


def run(attention, *inputs):
    """Output, gradients, and the seconds of the fastest of three runs."""
    *inputs, weight = inputs
    loss = lambda *inputs: (jnp.sum(jnp.where(jnp.isnan(weight), 0, (out := attention(*inputs)) * weight)), out)
    function = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    gradients, out = jax.block_until_ready(function(*inputs))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        seconds.append(time.perf_counter() - start)
    return (out, *gradients), min(seconds)


print(f"{len(lengths)} sequences of {', '.join(map(str, lengths))} positions; {jax.devices()[0].device_kind}\n")
in_one_row, packed_seconds = run(packed, query, key, value, weight)
in_a_batch, padded_seconds = run(padded, *map(unpack, (query, key, value, weight)))
without_ids, mixed_seconds = run(mixed_up, query, key, value, weight)

print("causal attention forward and backward")
print(f"  packed, segment ids    {total:6d} positions  {1e3 * packed_seconds:8.1f} ms")
print(f"  padded, lengths        {len(lengths) * longest:6d} positions  {1e3 * padded_seconds:8.1f} ms")
print(f"  packed, no ids (wrong) {total:6d} positions  {1e3 * mixed_seconds:8.1f} ms\n")
mine = jnp.concatenate([jnp.full(n, m) for m, n in enumerate(lengths)])
column = jnp.arange(total) - starts[mine]
for name, a, b in zip(("out", "dquery", "dkey", "dvalue"), in_one_row, in_a_batch, strict=True):
    difference = float(jnp.abs(a[0] - b[mine, column]).max())
    print(f"{name:<7} largest difference between packed and padded {difference:.1e}, largest value {float(jnp.abs(a).max()):.1f}")
wrong = float(jnp.abs(in_one_row[0] - without_ids[0]).max())
print(f"without ids sequences see each other: out differs by up to {wrong:.1f}")
