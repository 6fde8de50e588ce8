"""Everything compiled before anything is timed: a compiler at work beside a measurement is measured with it."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from flash_jax import api
from flash_jax.bench.accuracy import Reference
from flash_jax.bench.rows import DIFFERENTIATED, Arrays, Row
from flash_jax.bench.sides import Attention


@dataclasses.dataclass(frozen=True)
class Side:
    """One implementation of a row: the forward, the forward that also gives its pullback, and the pullback alone.

    runs: what `explain` says of ours.
    """

    forward: jax.stages.Compiled
    to_pull: jax.stages.Compiled | None
    backward: jax.stages.Compiled | None
    runs: str | None

    def calls(self, arrays: Arrays) -> dict[str, Callable[[], Any]]:
        """Argument-free calls, by phase."""
        inputs = {name: x for name, x in arrays.items() if name != "dout"}
        calls: dict[str, Callable[[], Any]] = {"forward": lambda: self.forward(inputs)}
        if self.to_pull is not None and (backward := self.backward) is not None:
            _, pullback = self.to_pull(inputs)
            calls["backward"] = lambda: backward(pullback, arrays["dout"])
        return calls

    @staticmethod
    def results(calls: dict[str, Callable[[], Any]]) -> Arrays:
        """`out`, and the gradients by the names of the inputs."""
        return {"out": calls["forward"]()} | (calls["backward"]() if "backward" in calls else {})

    def memory(self, phase: str) -> int | None:
        """Bytes that XLA plans to allocate beside inputs and outputs (`memory_analysis`); of the backward, residuals are inputs."""
        analysis = getattr(self, phase).memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes

    @property
    def residuals(self) -> int | None:
        """Bytes that the forward keeps for the backward, the inputs of attention among them."""
        if self.to_pull is None:
            return None
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.to_pull.out_info[1]))


def compile_side(row: Row, name: str, attention: Attention) -> Side:
    """Without arrays."""
    arrays = jax.eval_shape(row.draw)
    dout = arrays.pop("dout")

    def to_pull(inputs):
        given = {name: x for name, x in inputs.items() if name not in DIFFERENTIATED}
        return jax.vjp(lambda wanted: attention({**given, **wanted}), {name: inputs[name] for name in DIFFERENTIATED if name in inputs})

    forward = _jit(name, "forward", attention).lower(arrays).compile()
    runs = _explained(row, name, arrays) if name.startswith("flash_jax") else None
    if "backward" not in row.phases:
        return Side(forward, None, None, runs)
    lowered = _jit(name, "to_pull", to_pull).lower(arrays)
    backward = _jit(name, "backward", lambda pullback, dout: pullback(dout)[0]).lower(lowered.out_info[1], dout).compile()
    return Side(forward, lowered.compile(), backward, runs)


def label(name: str, phase: str) -> str:
    """What the function of a side and phase is called, in a profile too."""
    return f"{name}_{phase}".replace(":", "_").replace(".", "_")


def _jit(name: str, phase: str, function: Callable):
    def named(*arguments):
        return function(*arguments)

    named.__name__ = label(name, phase)
    return jax.jit(named)


def _explained(row: Row, name: str, arrays) -> str:
    _, _, implementation = name.partition(":")
    explanation = api.explain(**row.words(arrays), implementation=implementation or None)
    return f"{explanation.implementation} with {explanation.config}"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A row, being compiled: its arrays, its reference and its sides."""

    row: Row
    draw: Future[jax.stages.Compiled]
    reference: Future[Reference]
    sides: dict[str, Future[Side]]

    def wait(self) -> None:
        """Until all is compiled, or has failed."""
        for future in (self.draw, self.reference, *self.sides.values()):
            future.exception()


def start(rows: Iterable[Row], sides: dict[str, Callable[[Row], Attention]]) -> list[Compiled]:
    """Begin to compile every side of every row, in as many threads as there are processors."""
    pool = ThreadPoolExecutor(os.cpu_count())
    started = [
        Compiled(
            row,
            pool.submit(lambda row: jax.jit(row.draw).lower().compile(), row),
            pool.submit(Reference, row),
            {
                name: pool.submit(lambda row, name, make: compile_side(row, name, make(row)), row, name, make)
                for name, make in sides.items()
            },
        )
        for row in rows
    ]
    pool.shutdown(wait=False)
    return started
