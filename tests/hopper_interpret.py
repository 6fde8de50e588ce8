"""Runs the Hopper kernels on a CPU: Pallas's interpreter with race detection, taught what it lacks of what the kernels use.

The interpreter of jax 0.11 and 0.12 knows copies, barriers, warp specialisation and products of shared memory. Added here: products
whose left side is in registers, stores to an accumulator, copies that add. The kernels' inline pieces (`pipeline`, `soft_cap`, `blocks`,
`clean`, `turns`) are replaced by the same in plain Pallas, for a tile where the card answers for a warp; the order of turns is left open,
which allows more schedules than the hardware's barriers do. Products are synchronous here, so a missing wait for one is not found.
"""

import contextlib
import dataclasses
import functools
import inspect
import textwrap
import threading
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret, race_detection_state, shared_memory
from jax._src.state.types import AbstractRef
from jax.experimental import pallas as pl

from flash_jax.backends.hopper import blocks, clean, launch, pipeline, soft_cap, turns

(_Interpreter,) = (c for c in vars(jaxpr_interpret).values() if inspect.isclass(c) and hasattr(c, "_interpret_wgmma_ref_p"))
_adding = threading.Lock()
_TURNS = "turns_of_blocks"


def _on_host(function):
    """A callback that gets at the buffers by key: `function(read, write, **arguments)`."""

    @gpu_callbacks.fail_on_exception
    def run(*, token, mesh_location, thread, source_info, **arguments):
        memory = gpu_callbacks._get_shared_memory()
        info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
        key = gpu_callbacks.HostAllocationKey.from_array

        def access(array, transforms):
            transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
            return memory.access(key(array), transforms)

        def read(array, at):
            return memory.get_buffer_content(key(array), at, thread, logging_info=info)

        def write(array, at, value):
            memory.store_buffer_content(key(array), at, np.asarray(value), thread, logging_info=info)

        function(access, read, write, **arguments)
        return token

    return run


@_on_host
def _add_product(access, read, write, *, acc, a, b, b_transforms):
    at = access(acc, ())
    old = read(acc, at)[0]
    b = np.asarray(read(b, access(b, b_transforms))[0])
    with np.errstate(invalid="ignore", over="ignore"):  # of a row that is lost
        write(acc, at, old + np.matmul(np.asarray(a).astype(old.dtype), b.astype(old.dtype)))


@_on_host
def _store(access, read, write, *, acc, value):
    write(acc, access(acc, ()), value)


@_on_host
def _copy_and_add(access, read, write, *, source, source_transforms, target, target_transforms):
    part = np.asarray(read(source, access(source, source_transforms))[0])
    at = access(target, target_transforms)
    with _adding:
        shape = read(target, at)[1].shape  # what lies past the end is left out, as by the hardware
        clip = lambda r, n: slice(r.start, min(r.stop, n), r.step) if isinstance(r, slice) else r
        at = dataclasses.replace(at, range=tuple(map(clip, at.range, shape)))
        if any(isinstance(r, slice) and r.start >= r.stop for r in at.range):
            return
        old = read(target, at)[0]
        write(target, at, old + part[tuple(slice(0, n) for n in old.shape)])


def _call(self, function, token, eqn, **arguments):
    run = functools.partial(function, source_info=eqn.source_info)
    where = {"mesh_location": self.mesh_location, "thread": self.thread}
    return callback.io_callback(run, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, **where, **arguments)


def _interpret_wgmma(self, eqn, token, get_invals, original=_Interpreter._interpret_wgmma_ref_p):
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return original(self, eqn, token, get_invals)
    acc, a, b, *leaves = get_invals()
    empty = jax.tree.structure([])
    trees = tuple(eqn.params[f"{name}_transforms_tree"] or empty for name in ("acc", "a", "b"))
    acc_transforms, _, b_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    acc, acc_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, acc_transforms)
    b, b_transforms = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, b_transforms)
    assert not acc_transforms
    return _call(self, _add_product, token, eqn, acc=acc, a=a, b=b, b_transforms=b_transforms), []


def _interpret_store(self, eqn, token, get_invals):
    acc, value = get_invals()
    acc, _ = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, ())
    return _call(self, _store, token, eqn, acc=acc, value=value), value


def _copy_smem_to_gmem(original=gpu_callbacks.copy_smem_to_gmem, **arguments):
    if arguments.get("reduction_op") is None:
        return original(**arguments)
    assert arguments["reduction_op"] == "add"
    if arguments.get("predicate") is not None and not bool(arguments["predicate"]):
        return arguments["token"]
    names = {"source": "src_allocation_key_as_array", "source_transforms": "src_transforms"}
    names |= {"target": "dst_allocation_key_as_array", "target_transforms": "dst_transforms"}
    common = {name: arguments[name] for name in ("token", "mesh_location", "thread", "source_info")}
    return _copy_and_add(**common, **{name: arguments[theirs] for name, theirs in names.items()})


def _interpret_with_stores():
    """The interpreter's dispatch on primitives is one match statement; this adds a case to it."""
    source = textwrap.dedent(inspect.getsource(_Interpreter.interpret))
    at = source.index("case _:")
    indent = source[source.rfind("\n", 0, at) + 1 : at]
    case = f"case gpu_primitives.wgmma_accumulator_store_p:\n{indent}  "
    case += f"token, out = self._interpret_store(eqn, token, deferred_invals)\n{indent}"
    names = dict(vars(jaxpr_interpret))
    exec(compile(source[:at] + case + source[at:], jaxpr_interpret.__file__, "exec"), names)
    return names["interpret"]


def _release_barrier(self):
    """0.11 demands that every waiter has seen every completion, which hardware does not."""
    with self.cv:
        self.ref_count -= 1
        if self.ref_count == 0 and self.arrivals_count != 0:
            raise ValueError(f"Barrier deallocated with {self.arrivals_count} arrivals pending.")


def _keep_interval(x, lo, hi):
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    seen = jnp.ones(x.shape, bool)
    seen = seen if lo is None else seen & (lo[:, None] <= columns)
    return jnp.where(seen if hi is None else seen & (columns < hi[:, None]), x, -jnp.inf)


def _start_product(a_ref, b_ref):
    def product(acc_ref):
        plgpu.wgmma(acc_ref, a_ref, b_ref.transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    return pl.run_scoped(product, plgpu.ACC((a_ref.shape[-2], b_ref.shape[-2]), jnp.float32))


def _raise_flag(flag, rows):
    @pl.when(rows.any())
    def _():
        flag[...] = jnp.int32(1)


@jax.named_scope(_TURNS)
def _await_count(ref, count, seen):
    """Blocks run one after the other here: a turn that has not come never would, and reads out of bounds, which is an error."""
    ref[jnp.where(ref[0] >= count, 0, 9)]


@jax.named_scope(_TURNS)
def _increment(ref):
    ref[0] += 1


def _except_turns(check):
    """Blocks meet at their counts, which the race detector takes for a race."""

    def run(self, thread, clock, key, access, source_info=None):
        if _TURNS not in str(getattr(source_info, "name_stack", "")):
            check(self, thread, clock, key, access, source_info)

    return run


def _mark_columns(p, marks):
    used = (p != 0).any(0).reshape(-1, 4, 2)  # group of eight columns, lane mod 4, element
    bits = jnp.int32(1) << (2 * jnp.arange(used.shape[0])[:, None] + jnp.arange(2))
    words = jnp.where(used, bits[:, None, :], 0).sum((0, 2), dtype=jnp.int32)
    marks[: clean.MARKS] = jnp.zeros((clean.MARKS,), jnp.int32).at[:4].set(words)


def _clear_rows(marks, v, swizzle, share, shares):
    words = lax.reduce_or(marks[:, : clean.MARKS].reshape(-1, 4), (0,))
    row = jnp.arange(v.shape[0])
    used = (words[row % 8 // 2] >> (2 * (row // 8) + row % 2)) & 1
    piece = swizzle // v.dtype.itemsize
    for n in range(v.shape[1] // piece):
        part = v.at[:, pl.ds(n * piece, piece)]

        @pl.when(share == n % shares)
        def _(part=part):
            part[...] = jnp.where(used[:, None] != 0, part[...], 0)


def _keep_blocks(x, words, row, first_word):
    columns = jnp.arange(x.shape[1])
    mine = jnp.take(words[...], row, axis=0)
    bits = jnp.take(mine, first_word + columns // 32, axis=1) >> (columns % 32)
    return jnp.where(bits & 1 != 0, x, -jnp.inf)


@contextlib.contextmanager
def interpreted(multiprocessors: int = 3):
    """Kernels called inside run in the interpreter; at the end, fails if there was a race."""
    replacements = [
        (_Interpreter, "_interpret_wgmma_ref_p", _interpret_wgmma),
        (_Interpreter, "interpret", _interpret_with_stores()),
        (gpu_callbacks, "copy_smem_to_gmem", _copy_smem_to_gmem),
        (pipeline, "keep_interval", _keep_interval),
        (pipeline, "raise_flag", _raise_flag),
        (pipeline, "store_tile", lambda ref, x: ref.__setitem__(..., x)),
        (soft_cap, "any_above_one", lambda x: (jnp.abs(x) > 1).any().astype(jnp.int32)),
        (blocks, "keep_blocks", _keep_blocks),
        (clean, "mark_columns", _mark_columns),
        (clean, "clear_rows", _clear_rows),
        (pipeline, "start_product", _start_product),
        (pipeline, "finish_product", lambda product, in_flight: product),
        (pipeline, "await_turn", lambda warpgroup: None),
        (pipeline, "pass_turn", lambda warpgroup: None),
        (turns, "look", lambda ref: None),
        (turns, "await_count", _await_count),
        (turns, "increment", _increment),
        (launch, "MULTIPROCESSORS", multiprocessors),
    ]
    races = race_detection_state.GPURaceDetectionState
    replacements += [(races, name, _except_turns(getattr(races, name))) for name in ("check_read", "check_write")]
    if jax.__version_info__[:2] == (0, 11):
        replacements.append((shared_memory.Barrier, "deallocate", _release_barrier))
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch.object(_Interpreter, "_interpret_store", _interpret_store, create=True))
        jax.clear_caches()
        try:
            with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
                yield
            races = interpret_pallas_call.get_races()
            assert races is None or not races.races_found
        finally:
            interpret_pallas_call.reset_gpu_interpret_mode_state()
            jax.clear_caches()


def gradients_one_by_one(backward, residuals, wanted) -> dict:
    """`backward(*residuals, wanted)`, inside `interpreted`, one kernel after the other: that of the bias depends on no other.

    XLA would run the two at once, on the one state that the interpreter has for all.
    """
    result = {}
    for names in (tuple(n for n in wanted if n != "bias"), tuple(n for n in wanted if n == "bias")):
        if names:
            result |= jax.block_until_ready(jax.jit(lambda *x, names=names: backward(*x, names))(*residuals))
    return result
