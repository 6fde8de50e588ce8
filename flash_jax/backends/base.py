"""The seam: what an implementation is. A new one is a folder with a `BACKEND` and one line in `dispatch`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flash_jax.problem import Operands, Problem

Array = jax.Array


class Device(NamedTuple):
    """Where a call will run: `platform` is "cpu", "gpu", "tpu"; `kind` is the hardware's own name, such as "NVIDIA H200"."""

    platform: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of `(q, k, v, ...) -> (out, lse)` and its reverse.

    name: what `implementation=` calls it.
    why_not: `(problem, device) -> sentence | None`. The first reason why it cannot serve this problem, forward **and**
      backward, naming the argument, what came and what would work; None when it can.
    default_config: `(problem, device) -> (config, why)`, a frozen hashable dataclass that holds speed only (tiles, stages), and words
      for `explain` on why it is this one.
    forward: `(problem, config, operands) -> (out, lse)`: out `[batch, q_len, num_heads, v_head_dim]` in the input dtype, lse
      `[batch, q_len, num_heads]` in `problem.compute_dtype`, natural log; a row without a visible key has out 0, lse -inf.
    backward: `(problem, config, operands, out, lse, dout, dlse, wanted) -> gradients`: one entry for each name in `wanted` (a
      subset of `problem.DIFFERENTIABLE`), with the shape and dtype of that operand. The cotangent of lse enters only
      through `delta = sum(out * dout) - dlse`.
    is_partitioned: under a sharded `jit`, `partition` says how to divide it over devices. (For kernels, into which XLA cannot look; not on
      TPU, whose compiler has no way to ask.)
    whole: instead of the two, for an implementation that brings its own derivative rules: `(problem, operands) -> out`.
    """

    name: str
    why_not: Callable[[Problem, Device], str | None]
    default_config: Callable[[Problem, Device], tuple[Any, str]]
    forward: Callable[[Problem, Any, Operands], tuple[Array, Array]] | None = None
    backward: Callable[[Problem, Any, Operands, Array, Array, Array, Array, tuple[str, ...]], dict[str, Array]] | None = None
    is_partitioned: bool = False
    whole: Callable[[Problem, Operands], Array] | None = None


def by_one_rule(config_of: Callable[[Problem, Device], Any]) -> Callable[[Problem, Device], tuple[Any, str]]:
    """`Backend.default_config` of a backend whose tiles one rule explains: it takes those that the caller asks for."""

    def default_config(problem: Problem, device: Device) -> tuple[Any, str]:
        why = "the default" if problem.block_sizes is None else f"block_sizes={problem.block_sizes}"
        return config_of(problem, device), why

    return default_config
