"""Mask functions in a kernel, which has arithmetic on tiles and no indexing.

What depends on the row alone, on the key alone, on the head alone or on none of them is computed outside, once a row, key or head,
and becomes an operand of what is left: `ids[b, q] == ids[b, k]` is a comparison of a number a row with a number a key.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage] (a name that its module does not list)

from flash_jax import visibility
from flash_jax.problem import Operands, Problem
from flash_jax.visibility import MaskFunction

# What Mosaic computes elementwise on a tile; the inner functions of `jit` are looked into.
_ELEMENTWISE = frozenset(
    """add sub mul neg abs sign max min eq ne lt le gt ge and or xor not select_n convert_element_type clamp rem div shift_left
    shift_right_logical shift_right_arithmetic integer_pow exp log tanh sqrt floor ceil round""".split()  # noqa: SIM905
)
_WORDS = ("int32", "uint32", "float32", "bool")
_KIND_OF = {frozenset(): "scalar", frozenset("q"): "query", frozenset("k"): "key", frozenset("h"): "head"}
_READS = {"query": frozenset("q"), "key": frozenset("k"), "head": frozenset("h"), "scalar": frozenset(), "captured": frozenset()}


class Split(NamedTuple):
    """`kernel` is the function with further operands, the values of `outside` (each of the original's arguments)."""

    kernel: MaskFunction
    outside: tuple[MaskFunction, ...]
    kinds: tuple[str, ...]  # of the values of `outside`


@functools.cache
def split(function: MaskFunction) -> Split:
    """The function itself where a kernel can compute it as it is."""
    if _why_not(function) is None:
        return Split(function, (), ())
    jaxpr = function.jaxpr
    kinds = tuple(kind for kind in function.kinds if kind != "captured")
    arguments = jaxpr.invars[: 4 + len(kinds)]
    reads = dict(zip(jaxpr.invars[:4], (frozenset(), frozenset("h"), frozenset("q"), frozenset("k")), strict=True))
    reads |= {v: _READS[kind] for v, kind in zip(jaxpr.invars[4:], function.kinds, strict=True)}
    inside, outside = [], []
    for equation in jaxpr.eqns:
        of_equation = frozenset().union(*(reads[v] for v in equation.invars if not isinstance(v, Literal)))
        reads |= dict.fromkeys(equation.outvars, of_equation)
        (outside if of_equation in _KIND_OF else inside).append(equation)
    given = {*arguments, *(v for equation in inside for v in equation.outvars)}
    needed = [v for equation in inside for v in equation.invars if not isinstance(v, Literal)] + [
        v for v in jaxpr.outvars if not isinstance(v, Literal)
    ]
    missing = tuple(dict.fromkeys(v for v in needed if v not in given))
    new_kinds = tuple(_KIND_OF[reads[v]] for v in missing)
    kernel = jaxpr.replace(invars=[*arguments, *missing], eqns=inside)
    computing = lambda v: MaskFunction(jaxpr.replace(outvars=[v], eqns=outside), function.kinds)
    return Split(MaskFunction(kernel, kinds + new_kinds), tuple(map(computing, missing)), new_kinds)


def why_not(function: MaskFunction) -> str | None:
    """Why a kernel cannot compute what is left of the function."""
    return _why_not(split(function).kernel)


def _why_not(function: MaskFunction) -> str | None:
    jaxpr = function.jaxpr
    if "captured" in function.kinds or any(v.aval.shape for v in jaxpr.invars):
        return "mask: the function indexes an array by row and key together, which a kernel cannot; index by one of them at a time."
    for variable in jaxpr.invars[4:]:
        if str(variable.aval.dtype) not in _WORDS:
            return f"mask: operands of the function must be {', '.join(_WORDS)} here, got {variable.aval.dtype}."
    equations = list(_equations(jaxpr))
    names = {_name(equation) for equation in equations if not _is_arithmetic(equation)}
    if names:
        return f"mask: the function uses {', '.join(sorted(names))} on row and key together, which is no elementwise arithmetic of kernels."
    dtypes = {str(v.aval.dtype) for equation in equations for v in equation.outvars} - set(_WORDS)
    if dtypes:
        return (
            f"mask: a kernel computes in {', '.join(_WORDS)}, got {', '.join(sorted(dtypes))} on row and key together; cast to one of them."
        )
    return None


def _name(equation) -> str:
    return " of ".join([equation.primitive.name, *(str(v.aval.dtype) for v in equation.outvars[:1])])


def _is_arithmetic(equation) -> bool:
    """Whether the kernels of every backend compute it."""
    match equation.primitive.name:
        case "rem":
            return not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
        case "max" | "min" | "convert_element_type":
            return equation.outvars[0].aval.dtype != jnp.bool_
        case "integer_pow":
            return equation.params["y"] >= -1
        case "select_n":
            return len(equation.invars) == 3
        case name:
            return name in _ELEMENTWISE


def _equations(jaxpr):
    """Those of inner functions in the place of their calls."""
    for equation in jaxpr.eqns:
        inner = visibility.called(equation)
        yield from [equation] if inner is None else _equations(inner.jaxpr)


def hoist(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """The problem with functions that a kernel can compute."""
    spec, mask = problem.mask, operands.mask
    parts = [split(function) for function in spec.functions]
    if not any(part.outside for part in parts):
        return problem, operands
    arrays = []
    for function, part, given in zip(spec.functions, parts, mask.functions, strict=True):
        kept = tuple(x for x, kind in zip(given, function.kinds, strict=True) if kind != "captured")
        values = (_value(problem, mask.batch_ids, f, kind, given) for f, kind in zip(part.outside, part.kinds, strict=True))
        arrays.append((*kept, *values) if part.outside else given)
    spec = spec._replace(functions=tuple(part.kernel for part in parts))
    return dataclasses.replace(problem, mask=spec), operands._replace(mask=mask._replace(functions=tuple(arrays)))


def _value(problem: Problem, batch_ids, function: MaskFunction, kind: str, arrays: tuple):
    """`[1 | batch, len]` of a function that reads only what its kind says, at all rows, keys or heads, and 0 of the others."""
    sizes = {"head": problem.num_heads, "query": problem.q_len, "key": problem.kv_len}
    head_ids, q_ids, kv_ids = (jnp.arange(n if name == kind else 1, dtype=jnp.int32) for name, n in sizes.items())
    cut = tuple(x[:, :1] if of in sizes and of != kind else x for x, of in zip(arrays, function.kinds, strict=True))
    values = visibility.by_function(function, batch_ids, head_ids, q_ids, kv_ids, cut)
    return values.reshape(values.shape[0], -1)[:, 0] if kind == "scalar" else values.reshape(values.shape[0], -1)
