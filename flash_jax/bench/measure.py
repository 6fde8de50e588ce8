"""One row: compile every side, check it, and time what is right."""

import math
from collections.abc import Callable

import jax
import numpy as np

from flash_jax import api
from flash_jax.bench.accuracy import Reference
from flash_jax.bench.rows import Row
from flash_jax.bench.sides import SIDES, Attention
from flash_jax.bench.timing import interleave_for

PHASES = ("forward", "backward")


def products(row: Row) -> float:
    """FLOPs of a forward's two matrix products over the scores that are visible; the backward's five are 2.5 times as many.

    A causal mask counts as half of them, a block-sparse or packed one as its share.
    """
    kv_len = row.kv_len or row.length
    share = (0.5 if row.is_causal else 1.0) * (row.density or 1.0) / (row.segments or 1)
    if row.window is not None:
        share = min(share, (row.window[0] + 1 + (0 if row.is_causal else row.window[1])) / kv_len)
    return 4.0 * row.batch * row.num_heads * row.length * kv_len * row.head_dim * share


def measure(row: Row, names: list[str], seconds: float, sides: dict[str, Callable[[Row], Attention]] = SIDES) -> dict:
    """The record of a row: for each side its errors and, if they are allowed, its samples; else the reason why it has none.

    The forward is timed alone, the backward as the pullback alone, each side next to the others. `memory` is what XLA plans to allocate
    beside inputs and outputs (`memory_analysis`); of the backward, residuals are inputs.
    """
    arrays = row.arrays()
    expected = Reference(row, arrays)
    record: dict = {"row": row.name, "sides": {}}
    calls: dict[str, dict[str, Callable[[], object]]] = {phase: {} for phase in PHASES}
    for name in names:
        side = record["sides"][name] = {}
        try:
            compiled = _compile(sides[name](row), *arrays)
            results = (compiled["forward"][1](), *compiled["backward"][1]())
        except Exception as error:  # what a peer cannot do is a result, whatever it raises
            side["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            continue
        side["errors"], reason = expected.check(results)
        if reason is not None:
            side["refused"] = reason
            continue
        if name.startswith("flash_jax"):
            side["runs"] = _explained(row, name, arrays)
        for phase, (executable, call) in compiled.items():
            analysis = executable.memory_analysis()
            side[phase] = {"memory": None if analysis is None else analysis.temp_size_in_bytes}
            calls[phase][name] = call
    for phase, of_sides in calls.items():
        if not of_sides:
            continue
        samples = interleave_for(of_sides, seconds / len(PHASES))
        flops = products(row) * (1 if phase == "forward" else 2.5)
        for name, taken in samples.seconds.items():
            low, median, high = (float(x) for x in np.percentile(taken, [10, 50, 90]))
            record["sides"][name][phase] |= {
                "median": median,
                "p10": low,
                "p90": high,
                "tflops": flops / median / 1e12,
                "over": {peer: samples.summary(name, peer) for peer in of_sides if peer != name},
                "seconds": taken,
            }
    return record


def _compile(attention: Attention, *arrays) -> dict[str, tuple]:
    """`{phase: (executable, argument-free call)}`."""
    *qkv, dout = arrays
    forward = jax.jit(attention).lower(*qkv).compile()
    _, pullback = jax.jit(lambda *x: jax.vjp(attention, *x))(*qkv)
    backward = jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, dout).compile()
    return {"forward": (forward, lambda: forward(*qkv)), "backward": (backward, lambda: backward(pullback, dout))}


def _explained(row: Row, name: str, arrays) -> str:
    _, _, implementation = name.partition(":")
    explanation = api.explain(*arrays[:3], implementation=implementation or None, **row.options(row.batch))
    return f"{explanation.implementation} with {explanation.config}"


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
