"""Teaches Mosaic GPU's interpreter (jax 0.11.2 to 0.12) what the Hopper kernels use and it lacks. Reaches into private modules.

* wgmma with its left operand in registers;
* `copy_smem_to_gmem(reduction_op="add")`, which leaves out what lies outside the array, as the copy engine does;
* the inline pieces of `backends.hopper.pipeline`, as plain Pallas: `interpreted_pieces`.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret, shared_memory
from jax._src.state import types as state_types

from flash_jax.backends.hopper import pipeline

_Interpreter = next(c for _, c in vars(jaxpr_interpret).items() if inspect.isclass(c) and hasattr(c, "_interpret_wgmma_ref_p"))
_ADDING = threading.Lock()


def races_found() -> bool:
    """By the last kernel that ran with the race detector on."""
    return interpret_pallas_call.get_races().races_found


def keep_interval(x, lo, hi):
    """`pipeline.keep_interval` in words that the interpreter knows."""
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    for bound, inside in ((lo, lambda b: b <= columns), (hi, lambda b: columns < b)):
        if bound is not None:
            x = jnp.where(inside(bound[:, None]), x, -jnp.inf)
    return x


def interpreted_pieces():
    """Context in which kernels are traced with plain Pallas instead of inline instructions."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(pipeline, "keep_interval", keep_interval))
    return stack


def _memory(thread, mesh_location, source_info):
    memory = gpu_callbacks._get_shared_memory()
    return memory, shared_memory.GPULoggingInfo(mesh_location, thread, source_info)


def _read(memory, key, access, thread, info):
    content, shape, _ = memory.get_buffer_content(key, access, thread, logging_info=info)
    return content, shape


@gpu_callbacks.fail_on_exception
def _multiply_registers(*, token, mesh_location, thread, accumulator, a, b, b_transforms, source_info=None):
    memory, info = _memory(thread, mesh_location, source_info)
    accumulator, b = (gpu_callbacks.HostAllocationKey.from_array(x) for x in (accumulator, b))
    b_transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(b_transforms))
    b, _ = _read(memory, b, memory.access(b, b_transforms), thread, info)
    access = memory.access(accumulator, ())
    old, _ = _read(memory, accumulator, access, thread, info)
    new = old + np.asarray(a).astype(old.dtype) @ np.asarray(b).astype(old.dtype)
    memory.store_buffer_content(accumulator, access, new, thread, logging_info=info)
    return token


_of_references = _Interpreter._interpret_wgmma_ref_p


def _wgmma(self, eqn, token, get_values):
    if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
        return _of_references(self, eqn, token, get_values)
    accumulator, a, b, *leaves = get_values()
    names = ("acc_transforms_tree", "a_transforms_tree", "b_transforms_tree")
    trees = tuple(eqn.params[n] or jax.tree.structure([]) for n in names)
    accumulator_transforms, _, b_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    accumulator, accumulator_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, accumulator, accumulator_transforms)
    b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
    assert not accumulator_transforms
    run = functools.partial(_multiply_registers, source_info=eqn.source_info)
    where = {"mesh_location": self.mesh_location, "thread": self.thread}
    operands = {"accumulator": accumulator, "a": a, "b": b, "b_transforms": b_transforms}
    return callback.io_callback(run, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, **where, **operands), []


_Interpreter._interpret_wgmma_ref_p = _wgmma


@gpu_callbacks.fail_on_exception
def _add(
    *,
    token,
    mesh_location,
    thread,
    src_allocation_key_as_array,
    src_transforms,
    dst_allocation_key_as_array,
    dst_transforms,
    source_info,
):
    memory, info = _memory(thread, mesh_location, source_info)
    plain = lambda transforms: jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    src, dst = map(gpu_callbacks.HostAllocationKey.from_array, (src_allocation_key_as_array, dst_allocation_key_as_array))
    x, _ = _read(memory, src, memory.access(src, plain(src_transforms)), thread, info)
    with _ADDING:
        access = memory.access(dst, plain(dst_transforms))
        _, shape = _read(memory, dst, access, thread, info)
        clip = lambda r, n: slice(min(r.start, n), min(r.stop, n), r.step) if isinstance(r, slice) else r
        access = dataclasses.replace(access, range=tuple(map(clip, access.range, shape.shape)))
        if any(isinstance(r, slice) and r.start == r.stop for r in access.range):
            return token
        old, _ = _read(memory, dst, access, thread, info)
        memory.store_buffer_content(dst, access, old + x[tuple(map(slice, old.shape))], thread, logging_info=info)
    return token


_plain_copy = gpu_callbacks.copy_smem_to_gmem


def _copy_smem_to_gmem(**options):
    operation = options.get("reduction_op")
    if operation is None:
        return _plain_copy(**options)
    assert operation == "add"
    predicate = options.get("predicate")
    assert predicate is None or bool(predicate)
    names = ("token", "mesh_location", "thread", "src_allocation_key_as_array", "src_transforms")
    names += ("dst_allocation_key_as_array", "dst_transforms")
    return _add(**{n: options[n] for n in names}, source_info=options.get("source_info"))


gpu_callbacks.copy_smem_to_gmem = _copy_smem_to_gmem

if jax.__version_info__[:2] == (0, 11):  # there every waiter must have seen every completion when a barrier goes

    def _deallocate(self):
        with self.cv:
            self.ref_count -= 1
            if self.ref_count == 0 and self.arrivals_count != 0:
                raise ValueError(f"Barrier deallocated with {self.arrivals_count} arrivals pending.")

    shared_memory.Barrier.deallocate = _deallocate
