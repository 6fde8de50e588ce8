"""One compiled row: check every side, and time what is right."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flash_jax.bench.compiled import Compiled, label
from flash_jax.bench.kernels import kernel_seconds
from flash_jax.bench.timing import interleave_for

PHASES = ("forward", "backward")


def measure(compiled: Compiled, seconds: float) -> dict:
    """The record of a row: for each side its errors and, if they are allowed, its samples; else the reason why it has none.

    The forward is timed alone, the backward as the pullback alone, each side next to the others.
    """
    row = compiled.row
    arrays = compiled.draw.result()()
    reference = compiled.reference.result()
    reference.expect(arrays)
    record: dict = {"row": row.name, "sides": {}}
    calls: dict[str, dict[str, Callable[[], Any]]] = {phase: {} for phase in row.phases}
    for name, future in compiled.sides.items():
        side: dict = {}
        record["sides"][name] = side
        try:
            executables = future.result()
            of_phases = executables.calls(arrays)
            side["errors"], reason = reference.check(executables.results(of_phases))
        except Exception as error:  # what a peer cannot do is a result, whatever it raises
            side["refused"] = in_short(error)
            continue
        if reason is not None:
            side["refused"] = reason
            continue
        side.update(runs=executables.runs, residuals=executables.residuals)
        for phase, call in of_phases.items():
            side[phase] = {"memory": executables.memory(phase)}
            calls[phase][name] = call
    kernels = kernel_seconds({label(name, phase): call for phase, of_sides in calls.items() for name, call in of_sides.items()})
    for phase, of_sides in calls.items():
        if not of_sides:
            continue
        samples = interleave_for(of_sides, seconds / len(calls))
        flops = row.products * (1 if phase == "forward" else 2.5)
        for name, taken in samples.seconds.items():
            low, median, high = (float(x) for x in np.percentile(taken, [10, 50, 90]))
            record["sides"][name][phase] |= {
                "median": median,
                "p10": low,
                "p90": high,
                "kernels": kernels.get(label(name, phase)),
                "tflops": flops / median / 1e12,
                "over": {peer: samples.summary(name, peer) for peer in of_sides if peer != name},
                "seconds": taken,
            }
    return record


def in_short(error: Exception) -> str:
    """What a results file says of an error: its type and its first line."""
    return f"{type(error).__name__}: {str(error).partition('\n')[0]}"[:300]


def best_peer(record: dict, name: str, phase: str) -> tuple[str, dict] | None:
    """The fastest side of another library, and how many times faster `name` is."""
    over = record["sides"][name].get(phase, {}).get("over", {})
    peers = {peer: ratio for peer, ratio in over.items() if not peer.startswith("flash_jax")}
    return min(peers.items(), key=lambda item: item[1]["ratio"], default=None)


def refusals(results: dict) -> list[str]:
    """Our own sides that were refused, a sentence each."""
    return [
        f"{record['row']}: {name}: {side['refused']}"
        for record in results["rows"]
        for name, side in record["sides"].items()
        if "refused" in side and name.startswith("flash_jax")
    ]


def geometric_mean(values: list[float]) -> float:
    """Of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))
