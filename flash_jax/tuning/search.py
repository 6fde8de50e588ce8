"""Find the fastest configuration of the Hopper forward on the card at hand: `python -m flash_jax.tuning.search [--head-dim 64 128]`.

Every candidate that fits shared memory and registers is compiled, compared with the `xla` implementation, and timed in rounds that
interleave all candidates, because the clock of the card moves. A candidate replaces the present choice only where it is faster
by more than the noise. Spilling and serialised candidates need no special care: they are slow. Interrupting loses nothing that
was finished.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import api
from flash_jax.backends import hopper
from flash_jax.backends.base import Device
from flash_jax.bench import progress
from flash_jax.bench.measure import in_short
from flash_jax.tuning import table

KERNEL = "hopper forward"
NOISE = 1.03  # median times that differ by less are a tie, which the present choice wins
_BLOCKS_KV = (32, 64, 80, 96, 128)  # wider ones spill at every head dim, seen when compiled
_TOKENS, _HIDDEN = 16384, 2048


class Shape(NamedTuple):
    """What candidates are timed on."""

    length: int
    is_causal: bool


SHAPES = (Shape(4096, False), Shape(4096, True))


def candidates(head_dim: int, v_head_dim: int) -> list:
    """Configurations of the Hopper forward that can be compiled for these (padded) head dims."""
    from flash_jax.backends.hopper.forward import SHARED_MEMORY, shared_memory
    from flash_jax.backends.hopper.forward_tile import Config

    found = []
    choices = (True, False) if v_head_dim > 128 else (True,)  # narrower heads have room for out, and softmax to hide behind a turn
    for warpgroups, block_kv, stages, take_turns, separate_out in itertools.product((2, 3), _BLOCKS_KV, (2, 3, 4), choices, choices):
        swizzle = next((s for s in (128, 64, 32) if block_kv % (s // 2) == 0), None)
        if swizzle is None or (not separate_out and head_dim != v_head_dim):
            continue
        config = Config(warpgroups, block_kv, stages, take_turns, separate_out, swizzle)
        accumulators = (block_kv * 3 // 2 + v_head_dim) // 2  # registers of S, P and O
        if shared_memory(config, head_dim, v_head_dim) <= SHARED_MEMORY and accumulators + 32 <= config.registers[0]:
            found.append(config)
    return found


def choose(times: dict, present, noise: float = NOISE):
    """The candidate with the least geometric mean over shapes of its median time; the present one unless it loses by more than noise.

    times: `{candidate: [[seconds of each round] of each shape]}`.
    """
    score = {c: math.fsum(math.log(statistics.median(rounds)) for rounds in shapes) / len(shapes) for c, shapes in times.items()}
    best = min(score, key=score.__getitem__)
    return best if present not in score or score[present] - score[best] > math.log(noise) else present


def bar(items: list, label: str) -> Iterable:
    """The items, with a line of progress."""
    start = time.monotonic()
    for n, item in enumerate(items, 1):
        yield item
        elapsed = time.monotonic() - start
        progress.show(label, n, len(items), elapsed, elapsed / n * (len(items) - n))


def _seconds(run: Callable, calls: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _runs(configs: list, shape: Shape, head_dim: int, v_head_dim: int, label: str) -> dict:
    """Compiled calls of the configurations that compile and are right, by configuration."""
    from flash_jax.backends.hopper import launch

    keys = jax.random.split(jax.random.key(0), 3)
    batch, heads = _TOKENS // shape.length, max(1, _HIDDEN // head_dim)
    make = lambda key, dim: jax.random.normal(key, (batch, shape.length, heads, dim), jnp.bfloat16)
    arrays = [make(key, dim) for key, dim in zip(keys, (head_dim, head_dim, v_head_dim), strict=True)]
    request = api.prepare(*arrays, is_causal=shape.is_causal)
    problem, operands = request.problem, request.operands
    expected = np.asarray(api.flash_attention(*arrays, is_causal=shape.is_causal, implementation="xla").astype(jnp.float32))
    runs = {}
    for config in bar(configs, f"{label} compile"):
        compute = jax.jit(lambda operands, config=config: launch.out_and_lse(problem, config, operands)[0])
        try:
            compiled = compute.lower(operands).compile()
        except Exception as error:  # whatever the compiler refuses is no candidate
            progress.say(f"{config}: {in_short(error)[:120]}")
            continue
        got = np.asarray(compiled(operands).astype(jnp.float32))
        if np.abs(got - expected).max() <= 16 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected).max():
            runs[config] = lambda compiled=compiled: compiled(operands)
        else:
            progress.say(f"{config}: wrong result, left out")
    return runs


def measure(configs: list, head_dim: int, v_head_dim: int, rounds: int) -> dict:
    """`{config: [[seconds of each round] of each shape]}` of the configurations that serve every shape."""
    times: dict = {config: [] for config in configs}
    for shape in SHAPES:
        label = f"head_dim {head_dim}/{v_head_dim}, {shape.length}{' causal' if shape.is_causal else ''}:"
        runs = _runs(list(times), shape, head_dim, v_head_dim, label)
        times = {config: [*times[config], []] for config in runs}
        calls = {config: max(3, int(0.02 / _seconds(run, 3))) for config, run in runs.items()}
        order = np.random.default_rng(0)
        for _ in bar(list(range(rounds)), f"{label} time"):
            for n in order.permutation(len(runs)):
                config = list(runs)[n]
                times[config][-1].append(_seconds(runs[config], calls[config]))
    return times


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m flash_jax.tuning.search", description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256], choices=[64, 128, 192, 256])
    parser.add_argument("--rounds", type=int, default=7, help="timing rounds (default 7)")
    options = parser.parse_args()
    device = jax.devices()[0]
    if not hopper.is_hopper(Device(device.platform, device.device_kind)):
        parser.error(f"needs an NVIDIA Hopper card, this process has {device.device_kind}.")
    from flash_jax.backends.hopper import launch

    for head_dim in options.head_dim:
        arrays = [jnp.zeros((1, 8, 1, head_dim), jnp.bfloat16)] * 3
        problem = api.prepare(*arrays).problem
        dims = launch.head_dims(problem)
        present, _ = launch.default_config(problem, Device(device.platform, device.device_kind))
        configs = list(dict.fromkeys([present, *candidates(*dims)]))
        times = measure(configs, *dims, options.rounds)
        best = choose(times, present)
        where = f"flash_jax.tuning.search on {device.device_kind}, {time.strftime('%Y-%m-%d')}"
        path = table.store(device.device_kind, table.Key(KERNEL, *dims), dataclasses.asdict(best), where)
        progress.say(f"head_dim {head_dim}: {best}{' (as before)' if best == present else f', before {present}'}; kept in {path}")


if __name__ == "__main__":
    main()
