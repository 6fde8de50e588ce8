"""Seconds before a first call can run: trace, lower and compile, each alone, in a process of its own with nothing cached.

    python benchmarks/first_call.py benchmarks/results/h200_first_call.json

Backends are started before, and JAX and flash_jax imported; what a call imports when it comes first is counted. Bytecode is cached, as
after any import in an installed environment: a call of each side goes before, uncounted.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import jax

from flash_jax.bench.report import save
from flash_jax.bench.rows import DIFFERENTIATED, Row
from flash_jax.bench.sides import SIDES, default_sides
from flash_jax.bench.timing import provenance

ROWS = {row.name: row for row in (Row(4, 4096, 2048 // head_dim, head_dim, is_causal=True) for head_dim in (64, 128, 256))}
PHASES = ("forward", "forward and backward")


def first_call(side: str, row: Row, phase: str) -> dict[str, float]:
    """Of one call that is ready to run; call it once a process."""
    attention = SIDES[side](row)
    arrays = jax.eval_shape(row.draw)
    dout = arrays.pop("dout")

    def both(inputs, dout):
        given = {name: x for name, x in inputs.items() if name not in DIFFERENTIATED}
        out, pullback = jax.vjp(lambda wanted: attention({**given, **wanted}), {n: inputs[n] for n in DIFFERENTIATED if n in inputs})
        return out, pullback(dout)[0]

    function, arguments = (jax.jit(attention), (arrays,)) if phase == "forward" else (jax.jit(both), (arrays, dout))
    start = time.perf_counter()
    lowered = function.trace(*arguments).lower()
    middle = time.perf_counter()
    lowered.compile()
    return {"trace": middle - start, "compile": time.perf_counter() - middle}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=default_sides())
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "ROW", "PHASE"), help="print that one's seconds and stop")
    o = parser.parse_args()
    if o.one:
        jax.devices()
        side, row, phase = o.one
        sys.stdout.write(json.dumps(first_call(side, ROWS[row], phase)))
        return

    environment = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def measured(row: str, phase: str, side: str) -> dict:
        command = [sys.executable, __file__, str(o.file), "--one", side, row, phase]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
        outcome = json.loads(run.stdout) if run.returncode == 0 else {"refused": run.stderr.strip().splitlines()[-1]}
        sys.stderr.write(f"{row} {phase} {side}: {outcome}\n")
        return {"row": row, "phase": phase, "side": side, **outcome}

    for side in o.sides:
        measured(next(iter(ROWS)), PHASES[0], side)
    rows = [measured(*which) for which in itertools.product(ROWS, PHASES, o.sides)]
    command = f"python benchmarks/first_call.py benchmarks/results/{o.file.name} --sides {' '.join(o.sides)}"
    save({"provenance": provenance() | {"command": command}, "rows": rows}, o.file)


if __name__ == "__main__":
    main()
