"""Forward and backward in one program against `jax.nn`, where a head's scores fit into a cache.

python benchmarks/short_lengths.py benchmarks/results/cpu_short_lengths.json
"""

import functools
from collections.abc import Callable

import comparison
import jax

from flash_jax import flash_attention
from flash_jax.bench.report import save
from flash_jax.bench.rows import Row
from flash_jax.bench.timing import interleave_for

SIZES = [(1, 128), (1, 256), (1, 512), (8, 32), (8, 128), (32, 128)]  # batch, length
ROWS = [Row(*size, 8, 64, dtype="float32", is_causal=causal) for size in SIZES for causal in (True, False)]
SIDES = {"flash_jax": flash_attention, "jax.nn": jax.nn.dot_product_attention}


def sides(row: Row) -> dict[str, Callable[[], object]]:
    """Compiled calls: the output, and the gradients of query, key and value."""
    arrays = row.draw()
    qkv, dout = (arrays["query"], arrays["key"], arrays["value"]), arrays["dout"]

    def both(attention, qkv, dout):
        out, pullback = jax.vjp(functools.partial(attention, is_causal=row.is_causal), *qkv)
        return out, pullback(dout)

    compiled = {name: jax.jit(functools.partial(both, attention)).lower(qkv, dout).compile() for name, attention in SIDES.items()}
    return {name: functools.partial(run, qkv, dout) for name, run in compiled.items()}


def main() -> None:
    """Run the command."""
    o = comparison.options(__doc__, seconds=60)
    where = comparison.origin(__file__, o.file)
    rows = []
    for row in ROWS:
        samples = interleave_for(sides(row), o.seconds / len(ROWS))
        over = samples.summary("flash_jax", "jax.nn")
        rows.append({"row": row.name, "median": samples.median("flash_jax"), "over": over, "seconds": samples.seconds})
    save({"provenance": where, "rows": rows}, o.file)


if __name__ == "__main__":
    main()
