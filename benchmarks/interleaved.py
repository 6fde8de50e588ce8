"""Timing that compares: all sides in one process, compiled before anything is timed, round after round in shuffled order."""

import dataclasses
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import jax
import numpy as np


@dataclasses.dataclass
class Samples:
    """Seconds a call of each side, one sample a round; sample n of one side was taken next to sample n of another."""

    seconds: dict[str, list[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds[side])

    def ratios(self, side: str, against: str) -> list[float]:
        """How many times faster `side` is, round by round."""
        return [b / a for a, b in zip(self.seconds[side], self.seconds[against], strict=True)]

    def summary(self, side: str, against: str) -> dict:
        low, middle, high = np.percentile(self.ratios(side, against), [10, 50, 90])
        return {"ratio": float(middle), "p10": float(low), "p90": float(high)}


def interleave(sides: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> Samples:
    """Time compiled, argument-free `sides`; a sample is `calls` calls in a row, synchronised at the end."""
    for call in sides.values():
        jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            start = time.perf_counter()
            for _ in range(calls):
                result = sides[name]()
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - start) / calls)
    return Samples(samples)


def provenance() -> dict:
    """What a results file says of where it came from."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        return f"{len(lines)} x {lines[0].split(':')[1].strip()}"
    except (OSError, IndexError):
        return platform.processor()
