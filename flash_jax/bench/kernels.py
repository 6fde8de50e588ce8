"""The time that a GPU's kernels take, without what XLA puts between them."""

import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax

CALLS = 5


def kernel_seconds(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds a call that kernels run, by side, from a profile of a few calls; empty where there is no GPU.

    Launches, gaps between kernels and memory that is set to 0 are not counted; in the wall time they are.
    """
    if jax.default_backend() != "gpu":
        return {}
    taken = {}
    for name, call in sides.items():
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready([call() for _ in range(CALLS)][-1])
            profile = jax.profiler.ProfileData.from_file(str(next(pathlib.Path(folder).rglob("*.xplane.pb"))))
            taken[name] = sum(by_kernel(profile.planes).values()) / CALLS
    return taken


def by_kernel(planes: Iterable) -> dict[str, float]:
    """Seconds by kernel in the planes of a profile."""
    taken: dict[str, float] = defaultdict(float)
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    if not event.name.lower().startswith(("memset", "memcpy")):
                        taken[event.name] += event.duration_ns * 1e-9
    return dict(taken)
