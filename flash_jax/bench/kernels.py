"""The time that a GPU's kernels take, without what XLA puts between them."""

import pathlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax

CALLS = 5


def kernel_seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds a call that kernels run, from one profile of a few calls; without what the profile cannot tell, and empty without a GPU.

    Launches, gaps between kernels and memory that is set to 0 are not counted; in the wall time they are.

    Args:
      calls: by the name of the jitted function.
    """
    if jax.default_backend() != "gpu":
        return {}
    quiet = jax.profiler.ProfileOptions()
    quiet.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=quiet):
            for call in calls.values():
                jax.block_until_ready([call() for _ in range(CALLS)][-1])
        profile = jax.profiler.ProfileData.from_file(str(next(pathlib.Path(folder).rglob("*.xplane.pb"))))
    by_module = module_seconds(profile.planes)
    return {name: by_module[f"jit_{name}"] / CALLS for name in calls if f"jit_{name}" in by_module}


def module_seconds(planes: Iterable) -> dict[str, float]:
    """Seconds that kernels run, by the module that they belong to."""
    taken: dict[str, float] = defaultdict(float)
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    module = dict(event.stats).get("hlo_module")
                    if module is not None and not event.name.lower().startswith(("memset", "memcpy")):
                        taken[str(module)] += event.duration_ns * 1e-9
    return dict(taken)
