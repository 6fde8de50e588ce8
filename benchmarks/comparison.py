"""The command line of a script that times sides in turns, and what its results file says of where it ran."""

import argparse
import pathlib

from flash_jax.bench.timing import provenance


def options(description: str | None, seconds: float) -> argparse.Namespace:
    """`file` and `seconds`, which is about how long to time."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=seconds, help="about how long to time")
    return parser.parse_args()


def origin(script: str, file: pathlib.Path) -> dict:
    """Where this ran, and the command that repeats it."""
    return provenance() | {"command": f"python benchmarks/{pathlib.Path(script).name} benchmarks/results/{file.name}"}
