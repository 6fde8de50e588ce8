"""Derivatives and transformations, once for every implementation.

`attend` is a primitive `(operands) -> (out, lse)` with two companions:

    attend       forward of the chosen backend
    attend_vjp   its reverse: the chosen backend's hand-written backward
    attend_jvp   its tangent map, linear in the tangents: one pass of `xla` over the tiles

Differentiating `attend` yields `attend_jvp`; transposing that yields `attend_vjp`. So `jax.grad` runs exactly one forward and
one backward kernel, and `jax.jvp` runs the kernel's forward and a tangent pass. The derivatives of `attend_vjp` and of
`attend_jvp` themselves are JAX's own, taken through `xla`'s loops: every higher order works, whatever the backend.

vmap folds the mapped axis into the batch before a backend sees it, so that skipped tiles stay skipped. Under `shard_map` all
operands are made to vary alike (whose transpose sums a replicated operand's gradient over the mesh); a backend traces without
those types. `out` and `lse` carry the `checkpoint_name`s `flash_out` and `flash_lse`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from flash_jax import partition
from flash_jax.backends import xla
from flash_jax.backends.base import Backend, Device
from flash_jax.problem import DIFFERENTIABLE, Operands, Problem
from flash_jax.promotion import promoting
from flash_jax.varying import vary_alike

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """The static parameter of the primitives.

    tree: structure of the `Operands`, whose leaves are the primitives' first arguments.
    wanted: for the derivatives, the operands with a tangent or gradient, in the order of `DIFFERENTIABLE`.
    is_local: the problem is what one device has, after `partition` has divided it.
    """

    problem: Problem
    backend: Backend
    config: Any
    device: Device
    tree: Any
    wanted: tuple[str, ...] = ()
    is_local: bool = False

    def operands(self, leaves) -> Operands:
        return jax.tree.unflatten(self.tree, leaves)

    def positions(self) -> dict[str, int]:
        """Leaf number of each differentiable operand that is present."""
        numbered = self.operands(range(self.tree.num_leaves))
        return {name: n for name in DIFFERENTIABLE if (n := getattr(numbered, name)) is not None}

    def xla_config(self) -> xla.Config:
        """Tiles for the passes that only `xla` has, in loops that JAX can differentiate."""
        return dataclasses.replace(xla.default_config(self.problem, self.device), static_loops=True)


def attend(problem: Problem, backend: Backend, config, device: Device, operands: Operands) -> tuple[Array, Array]:
    """`(out, lse)` of the problem, differentiable to any order in `DIFFERENTIABLE` operands; see `backends.base.Backend.forward`."""
    leaves, tree = jax.tree.flatten(operands)
    call = Call(problem, backend, config, device, tree)
    nondifferentiable = set(range(len(leaves))) - set(call.positions().values())
    leaves = [jax.lax.stop_gradient(x) if n in nondifferentiable else x for n, x in enumerate(leaves)]
    out, lse = _attend_p[backend.is_partitioned].bind(*vary_alike(leaves), call=call)
    return out, lse


# --------------------------------------------------------------------------------------------------- what they compute
@promoting
def _attend(*leaves: Array, call: Call) -> tuple[Array, Array]:
    assert call.backend.forward is not None
    return call.backend.forward(call.problem, call.config, call.operands(leaves))


@promoting
def _attend_vjp(*args: Array, call: Call) -> list[Array]:
    """args: leaves, out, lse, dout, dlse. Gradients of `call.wanted`."""
    *leaves, out, lse, dout, dlse = args
    assert call.backend.backward is not None
    gradients = call.backend.backward(call.problem, call.config, call.operands(leaves), out, lse, dout, dlse, call.wanted)
    return [gradients[name] for name in call.wanted]


@promoting
def _attend_jvp(*args: Array, call: Call) -> tuple[Array, Array]:
    """args: leaves, out, lse, tangents of `call.wanted`. Tangents of out and lse."""
    num_leaves = call.tree.num_leaves
    leaves, (out, lse, *tangents) = args[:num_leaves], args[num_leaves:]
    tangents = dict(zip(call.wanted, tangents, strict=True))
    return xla.jvp(call.problem, call.xla_config(), call.operands(leaves), out, lse, tangents)


def _attend_vjp_by_xla(*args: Array, call: Call) -> list[Array]:
    """`_attend_vjp` in loops that JAX can differentiate."""
    return _attend_vjp(*args, call=dataclasses.replace(call, backend=xla.BACKEND, config=call.xla_config()))


# ---------------------------------------------------------------------------------------------------------- abstract
def _like(aval, shape, dtype):
    """An abstract value that lives where the query lives: same mesh axes along batch, length and heads."""
    spec = PartitionSpec(*(*aval.sharding.spec[:3], None)[: len(shape)])
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=aval.sharding.update(spec=spec))


def _abstract_attend(*leaves, call: Call):
    query, problem = call.operands(leaves).query, call.problem
    return [_like(query, problem.out_shape, problem.dtype), _like(query, problem.lse_shape, problem.compute_dtype)]


def _abstract_attend_jvp(*args, call: Call):
    return _abstract_attend(*args[: call.tree.num_leaves], call=call)


def _abstract_attend_vjp(*args, call: Call):
    positions = call.positions()
    return [args[positions[name]].update(weak_type=False) for name in call.wanted]


# ----------------------------------------------------------------------------------------------------- differentiation
def _attend_jvp_rule(leaves, tangents, *, call: Call):
    out, lse = _attend_p[call.backend.is_partitioned].bind(*leaves, call=call)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    dotted = {name: tangents[n] for name, n in call.positions().items() if not isinstance(tangents[n], ad.Zero)}
    if not dotted:
        return [out, lse], [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    call = dataclasses.replace(call, wanted=tuple(dotted))
    return [out, lse], _attend_jvp_p.bind(*leaves, out, lse, *dotted.values(), call=call)


def _attend_jvp_transpose(cotangents, *args, call: Call):
    primals = args[: call.tree.num_leaves + 2]
    out, lse = primals[-2:]
    dout, dlse = (jnp.zeros_like(x) if isinstance(ct, ad.Zero) else ct for ct, x in zip(cotangents, (out, lse), strict=True))
    return [None] * len(primals) + _attend_vjp_p[call.backend.is_partitioned].bind(*primals, dout, dlse, call=call)


def _differentiate(function, abstract):
    """By JAX, through loops of `xla` that know no explicit axes of a mesh: their results go where `abstract` says."""

    def rule(primals, tangents, *, call: Call):
        f = functools.partial(function, call=call)
        avals = [jax.typeof(x) for x in primals]
        explicit = {axis for x in avals for axis in x.sharding.mesh.explicit_axes}
        if explicit:
            shardings = [x.sharding for x in abstract(*avals, call=call)]
            f = jax.sharding.auto_axes(lambda *args: list(function(*args, call=call)), axes=tuple(explicit), out_sharding=shardings)
        return jax.jvp(f, tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents))

    return rule


# ------------------------------------------------------------------------------------------------------------- batching
class _Fold:
    """Folds a mapped axis of `size` into the batch. A leading axis of 1 stays shared where it may.

    batch_first: the batch is sharded over a mesh with explicit axes; only then is the folded axis sharded alike.
    """

    def __init__(self, size: int, batch: int, batch_first: bool):
        self.size, self.batch, self.batch_first = size, batch, batch_first

    def __call__(self, x: Array, axis: int | None, own: bool) -> Array:
        """own: the entry needs its own copy for each mapped element."""
        if axis is None:
            if x.shape[0] == 1 and not own:
                return x
            x = jnp.broadcast_to(x, (self.size, *x.shape))
        else:
            x = jnp.moveaxis(x, axis, 0)
        x = jnp.broadcast_to(x, (self.size, self.batch, *x.shape[2:]))
        x = x.swapaxes(0, 1) if self.batch_first else x
        return x.reshape(self.size * self.batch, *x.shape[2:])

    def undo(self, x: Array, sum_batch: bool = False) -> Array:
        if self.batch_first:
            x = x.reshape(self.batch, self.size, *x.shape[1:]).swapaxes(0, 1)
        else:
            x = x.reshape(self.size, self.batch, *x.shape[1:])
        return x.sum(1, keepdims=True, dtype=x.dtype) if sum_batch else x


def _fold_rule(primitive: Primitive, gives_gradients: bool):
    def rule(args, axes, *, call: Call):
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
        num_leaves, positions = call.tree.num_leaves, call.positions()
        spec, axis = list(jax.typeof(args[positions["query"]]).sharding.spec), axes[positions["query"]]
        fold = _Fold(size, call.problem.batch, batch_first=spec[1 if axis == 0 else 0] is not None)
        own = {positions[name] for name in ("query", "key", "value", *call.wanted)} | set(range(num_leaves, len(args)))
        folded = [fold(x, axis, n in own) for n, (x, axis) in enumerate(zip(args, axes, strict=True))]
        bias = positions.get("bias")
        problem = dataclasses.replace(
            call.problem, batch=size * call.problem.batch, bias_shape=None if bias is None else folded[bias].shape
        )
        bind = functools.partial(primitive.bind, call=dataclasses.replace(call, problem=problem))
        if problem.batch == 0:  # no backend has to know
            results = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(bind, *folded)]
        else:
            results = bind(*folded)
        shared = [False] * len(results)
        if gives_gradients:  # a gradient has its operand's own shape: sum over the batch where that had a leading 1
            operands = [(args[positions[name]], axes[positions[name]]) for name in call.wanted]
            shared = [x.shape[1 if axis == 0 else 0] == 1 for x, axis in operands]
        return [fold.undo(x, s) for x, s in zip(results, shared, strict=True)], [0] * len(results)

    return rule


# --------------------------------------------------------------------------------------------------------- registration
def _by_device(primitive: Primitive, function, axes, gives_gradients: bool):
    """`function`, divided over devices where XLA cannot do that itself; `axes(call)`: of the arguments after the leaves, and of results."""

    def by_device(*args, call: Call):
        if call.is_local:
            return function(*args, call=call)
        more, results = axes(call)
        leaves = call.operands(args[: call.tree.num_leaves])
        local = lambda *args, problem: primitive.bind(*args, call=dataclasses.replace(call, problem=problem, is_local=True))
        return partition.divided(local, call.problem, partition.axes_of(leaves) + more, results, gives_gradients)(*args)

    return by_device


def _lower(function):
    """Lower by tracing `function`, without the types that say how values vary over a mesh: a backend need not know them."""
    lowered = mlir.lower_fun(function, multiple_results=True)

    def rule(ctx, *args, **params):
        plain = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        try:
            return lowered(ctx.replace(avals_in=plain), *args, **params)
        except NotImplementedError as error:
            if "automatically partitioned" not in str(error):  # should Pallas change its words, they say much the same as ours
                raise
            raise NotImplementedError(
                f"implementation={params['call'].backend.name!r}: XLA cannot divide the "
                "kernels over the devices of a sharded jit. Call flash_attention inside "
                "jax.shard_map, with batch and heads sharded as you like, or pass implementation='xla'."
            ) from error

    return rule


def _primitive(name: str, function, abstract, differentiate, gives_gradients: bool, axes=None) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    compiled = jax.jit(lambda *args, call: primitive.bind(*args, call=call), static_argnames="call")

    def run(*args, call: Call):
        with jax.disable_jit(False):  # as JAX's own primitives, which are compiled one by one where jit is disabled
            return compiled(*args, call=call)

    primitive.def_impl(run)
    if axes is not None:
        prim_requires_devices_during_lowering.add(primitive)  # as `custom_partitioning` does, which is met only while lowering
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, _lower(function if axes is None else _by_device(primitive, function, axes, gives_gradients)))
    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = _fold_rule(primitive, gives_gradients)
    return primitive


_OUT_LSE = [partition.axes(name) for name in ("out", "lse")]

# Lowering a partitioned backend needs the devices, which export over a mesh does not have: hence primitives of its own.
_attend_p = {
    False: _primitive("flash_attention", _attend, _abstract_attend, _attend_jvp_rule, False),
    True: _primitive("flash_attention", _attend, _abstract_attend, _attend_jvp_rule, False, lambda call: ([], _OUT_LSE)),
}
_attend_jvp_p = _primitive(
    "flash_attention_jvp", _attend_jvp, _abstract_attend_jvp, _differentiate(_attend_jvp, _abstract_attend_jvp), False
)
_attend_vjp_p = {
    axes is not None: _primitive(
        "flash_attention_vjp", _attend_vjp, _abstract_attend_vjp, _differentiate(_attend_vjp_by_xla, _abstract_attend_vjp), True, axes
    )
    for axes in (None, lambda call: (2 * _OUT_LSE, [partition.axes(name) for name in call.wanted]))
}
ad.primitive_transposes[_attend_jvp_p] = _attend_jvp_transpose
