"""Timing that compares: all sides in one process, compiled before anything is timed, round after round in shuffled order."""

import dataclasses
import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import jax
import numpy as np

LIBRARIES = (
    "numpy",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu12",
    "libtpu",
    "tokamax",
    "dew-flash-attn",
    "fa4-jax",
)
LEAST = 0.005  # seconds a sample should take, so that neither the clock nor the launch is what is measured


@dataclasses.dataclass
class Samples:
    """Seconds a call of each side, one sample a round; sample n of one side was taken next to sample n of another."""

    seconds: dict[str, list[float]]

    def median(self, side: str) -> float:
        """The middle sample."""
        return statistics.median(self.seconds[side])

    def ratios(self, side: str, against: str) -> list[float]:
        """How many times faster `side` is, round by round."""
        return [b / a for a, b in zip(self.seconds[side], self.seconds[against], strict=True)]

    def summary(self, side: str, against: str) -> dict:
        """Median, p10 and p90 of the ratios."""
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
            result = None
            for _ in range(calls):
                result = sides[name]()
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - start) / calls)
    return Samples(samples)


def interleave_for(sides: dict[str, Callable[[], object]], seconds: float) -> Samples:
    """As many rounds as fit into about `seconds`, from 5 to 100."""
    once = interleave(sides, rounds=1)
    each = [once.median(side) for side in sides]
    calls = max(1, min(100, round(LEAST / min(each))))
    return interleave(sides, max(5, min(100, int(seconds / (calls * sum(each))))), calls)


def provenance() -> dict:
    """What a results file says of where it came from."""
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m flash_jax.bench", *_without_out(sys.argv[1:])]),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "gpu": gpu(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name))),
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_out(arguments: list[str]) -> list[str]:
    """Where a file goes says nothing of what is in it."""
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        return f"{len(lines)} x {lines[0].split(':')[1].strip()}"
    except (OSError, IndexError):
        return platform.processor()


def gpu() -> str | None:
    """Driver, clocks and power limit of the first NVIDIA GPU that this process may see, at this moment; None without one."""
    fields = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit"
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={first}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        return ", ".join(f"{name} {value.strip()}" for name, value in zip(fields.split(","), shown.split(","), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
