"""How a kernel divides over devices under `jit`: XLA cannot look inside it, and without a rule gathers everything on every device.

Batch entries and heads are independent: each device attends to its own, a key head with all the query heads of its group. The
gradient of an operand that batch entries or heads share is summed over the devices that divide them. Lengths and head_dim are
not divided. Where a mask function reads the head, heads are not divided either: a device would count its own from 0.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from flash_jax.problem import Problem

Array = jax.Array

# What the axes of an operand are: b batch, h query heads, g key heads, anything else is not divided. An axis of 1 is shared.
_AXES = {
    "query": "b.h.",
    "key": "b.g.",
    "value": "b.g.",
    "bias": "bh..",
    "dense": "bh..",
    "blocks": "bh..",
    "dropout_row_keys": "bh.",
    "out": "b.h.",
    "lse": "b.h",
}


def axes(name: str, rank: int = 1) -> str:
    """Of an operand or its gradient, of out and of lse."""
    return _AXES.get(name, "b" + "." * (rank - 1))


def axes_of(tree: Any) -> list[str]:
    """Of each leaf of `Operands`, arrays or their types."""
    name = lambda path: [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
    return [axes(name(path), len(x.shape)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _reads_head(problem: Problem) -> bool:
    return any(function.reads_head for function in problem.mask.functions)


@dataclasses.dataclass(frozen=True)
class Division:
    """The mesh axes that divide the batch and the key heads."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @classmethod
    def of(cls, problem: Problem, sharding: NamedSharding) -> "Division":
        """As a query of this sharding is divided, as far as sizes allow."""
        shape, spec = sharding.mesh.shape, (*sharding.spec, None, None, None)

        def fitting(entry, size: int) -> tuple[str, ...]:
            names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
            return names if size % math.prod(shape[name] for name in names) == 0 else ()

        return cls(fitting(spec[0], problem.batch), () if _reads_head(problem) else fitting(spec[2], problem.num_kv_heads))

    def spec(self, axes: str, shape: Sequence[int]) -> PartitionSpec:
        """Of an array with these axes."""
        names = {"b": self.batch, "h": self.heads, "g": self.heads}
        return PartitionSpec(*(names.get(axis) or None if size > 1 else None for axis, size in zip(axes, shape, strict=True)))

    def summed(self, axes: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Mesh axes over which a gradient with these axes is a partial sum."""
        owned = {axis for axis, size in zip(axes.replace("h", "g"), shape, strict=True) if size > 1}
        return (() if "b" in owned else self.batch) + (() if "g" in owned else self.heads)

    def local(self, problem: Problem, mesh) -> Problem:
        """What one device has."""
        pieces = lambda names: math.prod(mesh.shape[name] for name in names)
        batch, heads = pieces(self.batch), pieces(self.heads)
        bias_shape = problem.bias_shape
        if bias_shape is not None:
            divided = [n // k if n > 1 else n for n, k in zip(bias_shape[:2], (batch, heads), strict=True)]
            bias_shape = (*divided, *bias_shape[2:])
        return dataclasses.replace(
            problem,
            batch=problem.batch // batch,
            num_heads=problem.num_heads // heads,
            num_kv_heads=problem.num_kv_heads // heads,
            bias_shape=bias_shape,
        )


def _rule(problem: Problem, axes: Sequence[str], result_axes: Sequence[str]) -> Callable:
    """Factors `b` and `g` may be divided; `r`, the heads of a group, and all others are replicated."""

    def rule(mesh, operand_types, result_types):
        del mesh
        names = (f"x{n}" for n in itertools.count())
        compound = problem.group > 1 and problem.num_kv_heads > 1  # no factor of it may be 1
        heads = CompoundFactor("g", "r") if compound else "g" if problem.group == 1 else "r"

        def mapping(axes: str, type_) -> ArrayMapping:
            factors = []
            for axis, size in zip(axes, type_.shape, strict=True):
                if axis == "h" and size > 1:
                    factors.append(heads)
                elif axis == "g" or (axis == "b" and size == problem.batch):
                    factors.append(axis)
                else:
                    factors.append(next(names))
            return ArrayMapping(*factors)

        operands = tuple(map(mapping, axes, operand_types))
        results = tuple(map(mapping, result_axes, result_types))
        dimensions = itertools.chain(*operands, *results)
        factors = dict.fromkeys(f for dim in dimensions for f in ((dim,) if isinstance(dim, str) else dim))  # in order, as they must be
        divisible = {"b"} if _reads_head(problem) else {"b", "g"}
        sizes: Any = {"r": problem.group} if compound and "r" in factors else {}
        return SdyShardingRule(operands, results, need_replication_factors=tuple(f for f in factors if f not in divisible), **sizes)

    return rule


def divided(function: Callable, problem: Problem, axes: Sequence[str], result_axes: Sequence[str], gradients: bool) -> Callable:
    """`function(*arrays, problem)` on each device's part of the arrays.

    axes, result_axes: of each array and of each result. gradients: that is what the results are, see `Division.summed`.
    """

    def partition(mesh, arrays, results):
        query = next(x.sharding for x, a in zip(arrays, axes, strict=True) if a == _AXES["query"])
        division = Division.of(problem, query)
        sharding = lambda a, x: NamedSharding(mesh, division.spec(a, x.shape))

        def on_device(*arrays):
            outputs = function(*arrays, problem=division.local(problem, mesh))
            if not gradients:
                return tuple(outputs)
            totals = [division.summed(a, x.shape) for a, x in zip(result_axes, results, strict=True)]
            return tuple(jax.lax.psum(x, names) if names else x for x, names in zip(outputs, totals, strict=True))

        return mesh, on_device, tuple(map(sharding, result_axes, results)), tuple(map(sharding, axes, arrays))

    whole = custom_partitioning(lambda *arrays: tuple(function(*arrays, problem=problem)))
    whole.def_partition(partition, sharding_rule=_rule(problem, axes, result_axes))
    return whole
