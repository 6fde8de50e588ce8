"""Forward and backward on this machine's CPU against `jax.nn.dot_product_attention`: float32, batch 1, 8 heads of 64.

    python benchmarks/cpu.py --out benchmarks/results/cpu.json

Each row is one interleaved run; the ratio is the median over rounds of jax.nn's time over ours.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import interleave, provenance

from flash_jax import explain, flash_attention, segment_ids

HEADS, HEAD_DIM = 8, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def compiled(attention, *arrays):
    def run(*arrays):
        *inputs, dout = arrays
        out, pullback = jax.vjp(attention, *inputs)
        return out, pullback(dout)

    executable = jax.jit(run).lower(*arrays).compile()
    return lambda: executable(*arrays)


def rows():
    """(name, length, options of ours, options of jax.nn)."""
    for length in LENGTHS:
        yield f"causal_{length}", length, {"is_causal": True}, {"is_causal": True}
        yield f"full_{length}", length, {}, {}
    length = 4096
    ids = segment_ids(jnp.arange(9) * (length // 8), length)[None]
    ours = {"q_segment_ids": ids, "kv_segment_ids": ids, "is_causal": True}
    yield "packed_8_segments_4096", length, ours, {"mask": (ids[:, :, None] == ids[:, None, :])[:, None], "is_causal": True}


def measure(name, length, ours, theirs, seconds):
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal((1, length, HEADS, HEAD_DIM), np.float32)) for _ in range(4)]
    sides = {
        "flash_jax": compiled(lambda *qkv: flash_attention(*qkv, **ours), *arrays),
        "jax.nn": compiled(lambda *qkv: jax.nn.dot_product_attention(*qkv, **theirs), *arrays),
    }
    for a, b in zip(jax.tree.leaves(sides["flash_jax"]()), jax.tree.leaves(sides["jax.nn"]()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))  # a wrong result has no speed
    once = interleave(sides, rounds=1)
    rounds = max(3, min(60, int(seconds / sum(once.median(side) for side in sides))))
    samples = interleave(sides, rounds)
    config = str(explain(*arrays[:3], **ours).config)
    return {"row": name, "config": config, **samples.summary("flash_jax", "jax.nn"), "seconds": samples.seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file to write (JSON)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--seconds", type=float, default=12, help="about how long to time each row")
    args = parser.parse_args()
    results = []
    for row in rows():
        if args.only not in row[0]:
            continue
        results.append(measure(*row, seconds=args.seconds))
        print("{row:24} {ratio:6.2f}x  (p10 {p10:.2f}, p90 {p90:.2f})  {config}".format(**results[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps({**provenance(), "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
