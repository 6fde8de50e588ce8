"""Eight causal sequences of different lengths, batched and under vmap, against a call for each: what is hidden should cost nothing.

python benchmarks/batched_lengths.py benchmarks/results/cpu_batched_lengths.json
"""

from collections.abc import Callable

import comparison
import jax
import jax.numpy as jnp

from flash_jax import flash_attention
from flash_jax.bench.report import save
from flash_jax.bench.timing import interleave_for

LENGTHS = ((2048, 1902, 1755, 1609, 1463, 1317, 1170, 1024), (2048, 1536, 1024, 768, 512, 384, 256, 128))
HEADS, HEAD_DIM = 4, 64


def attention(q, k, v, lengths):
    return flash_attention(q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def alone(q, k, v, length):
    return attention(q[None], k[None], v[None], length[None])[0]


def with_gradients(function: Callable) -> Callable:
    """Of query, key and value, for the query as the cotangent of the output."""

    def gradients(q, k, v, *lengths):
        out, pullback = jax.vjp(lambda *qkv: function(*qkv, *lengths), q, k, v)
        return out, pullback(q)

    return gradients


def sides(lengths: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Compiled calls, forward and backward: of all sequences padded to the longest, of each one so padded, and cut to its own length."""
    number = jnp.asarray(lengths, jnp.int32)
    padded = tuple(jax.random.normal(jax.random.key(0), (3, len(lengths), max(lengths), HEADS, HEAD_DIM)))
    separate = []
    for n, length in enumerate(lengths):
        qkv = tuple(x[n, None, :length] for x in padded)
        run = jax.jit(with_gradients(lambda q, k, v: flash_attention(q, k, v, is_causal=True))).lower(*qkv).compile()
        separate.append((run, qkv))
    result: dict[str, Callable[[], object]] = {"separate": lambda: [run(*qkv) for run, qkv in separate]}
    one = jax.jit(with_gradients(attention)).lower(*(x[:1] for x in padded), number[:1]).compile()
    each = [(*(x[n, None] for x in padded), number[n, None]) for n in range(len(lengths))]
    result["separate, padded"] = lambda: [one(*arguments) for arguments in each]
    for name, function in (("batched", attention), ("vmap", jax.vmap(alone))):
        run = jax.jit(with_gradients(function)).lower(*padded, number).compile()
        result[name] = lambda run=run: run(*padded, number)
    return result


def main() -> None:
    """Run the command."""
    o = comparison.options(__doc__, seconds=60)
    where = comparison.origin(__file__, o.file)
    rows = []
    for lengths in LENGTHS:
        samples = interleave_for(sides(lengths), o.seconds / len(LENGTHS))
        rows += [
            {
                "lengths": lengths,
                "side": side,
                "median": samples.median(side),
                "of_separate": samples.summary("separate", side),
                "seconds": all_of,
            }
            for side, all_of in samples.seconds.items()
        ]
    what = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    save({"provenance": where, **what, "rows": rows}, o.file)


if __name__ == "__main__":
    main()
