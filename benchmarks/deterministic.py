"""What `deterministic_backward=True` costs: the backward with it and without it, in turns.

python benchmarks/deterministic.py benchmarks/results/h200_deterministic.json
"""

import functools
from collections.abc import Callable

import comparison
import jax

from flash_jax import flash_attention
from flash_jax.bench.report import save
from flash_jax.bench.rows import Row
from flash_jax.bench.timing import interleave_for

SIDES = {"default": {}, "deterministic": {"deterministic_backward": True}}
ROWS = [Row(4, 4096, 2048 // head_dim, head_dim, is_causal=causal) for head_dim in (64, 128, 256) for causal in (True, False)]


def sides(row: Row) -> dict[str, Callable[[], object]]:
    """Compiled backwards of the row, without the forward."""
    arrays = row.draw()
    qkv, dout = (arrays["query"], arrays["key"], arrays["value"]), arrays["dout"]

    def compiled(options):
        _, pullback = jax.vjp(functools.partial(flash_attention, is_causal=row.is_causal, **options), *qkv)
        run = jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, dout).compile()
        return functools.partial(run, pullback, dout)

    return {name: compiled(options) for name, options in SIDES.items()}


def main() -> None:
    """Run the command."""
    o = comparison.options(__doc__, seconds=12)
    where = comparison.origin(__file__, o.file)
    rows = []
    for row in ROWS:
        samples = interleave_for(sides(row), o.seconds / len(ROWS))
        cost = samples.summary("default", "deterministic")  # of the time of `default`
        rows.append({"row": row.name, "cost": cost, "median": {name: samples.median(name) for name in SIDES}, "seconds": samples.seconds})
        save({"provenance": where, "rows": rows}, o.file)


if __name__ == "__main__":
    main()
