"""The Hopper kernels compiled to machine code for an H200, without one: no spills but known ones, no products that wait for others."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from helpers import H200

from flash_jax import dispatch, flash_attention
from flash_jax.backends.base import Device

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

JAX = ".".join(jax.__version__.split(".")[:2])


class Kernel(NamedTuple):
    """What the assembler says of a kernel. spilled: bytes that a thread stores and loads because registers do not suffice."""

    name: str
    spilled: int
    serialised: bool


def kernels(compile_function, folder, monkeypatch) -> list[Kernel]:
    """The Mosaic kernels that `compile_function()` compiles, by its dumps in an empty folder."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    jax.clear_caches()
    compile_function()
    found = []
    for path in sorted(folder.glob("*.ptxas")):
        text = path.read_text(errors="replace")
        spills = re.findall(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        assert spills, text
        found.append(Kernel(path.stem, sum(map(int, spills[0])), bool(re.search(r"C75(09|10)", text))))
    return found


def compile_for_h200(function, *shapes):
    """Compile without a GPU, as on one."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin compiles; scripts/check.sh --aot installs it")
    from jax.experimental import topologies

    device = topologies.get_topology_desc("", platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    return jax.jit(function).lower(*shapes).compile()


def shapes_of(head_dim, num_kv_heads=4, batch=4, length=4096, **arrays):
    shape = lambda heads: jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    return {"query": shape(4), "key": shape(num_kv_heads), "value": shape(num_kv_heads)} | arrays


INT = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
BIAS = jax.ShapeDtypeStruct((1, 4, 4096, 4096), jnp.bfloat16)
CASES = {  # arrays, options
    "full": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "gqa": ({"num_kv_heads": 1}, {"is_causal": True}),
    "window": ({}, {"local_window_size": (1023, 0)}),
    "packed": ({"q_segment_ids": INT, "kv_segment_ids": INT}, {"is_causal": True}),
    "bias": ({"bias": BIAS}, {"is_causal": True}),
    "soft_cap": ({}, {"is_causal": True, "logits_soft_cap": 30.0}),
    "dropout": ({}, {"is_causal": True, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)}),
    "deterministic": ({}, {"is_causal": True, "deterministic_backward": True}),
}
KNOWN = {  # (jax, case, head_dim): bytes that its kernels spill at most, stored and loaded, where registers do not suffice
    # In the forward, none of them in a step: numbers that a tile of rows needs once.
    ("0.11", "packed", 256): 128,
    ("0.11", "bias", 64): 32,
    ("0.11", "soft_cap", 256): 20,
    ("0.11", "dropout", 256): 44,
    # In the backward; of soft_cap at 128, 8 bytes are the forward's.
    ("0.11", "soft_cap", 64): 172,
    ("0.11", "soft_cap", 128): 16,
    ("0.11", "dropout", 64): 268,
    ("0.11", "dropout", 128): 92,
    ("0.12", "packed", 64): 16,  # once a block of threads, outside of the loops
    ("0.12", "soft_cap", 64): 224,
    ("0.12", "dropout", 64): 308,
    ("0.12", "dropout", 128): 88,
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_kernels_stay_in_registers(name, head_dim, tmp_path, monkeypatch):
    """Forward and every gradient, in the configuration that a call gets."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: Device("gpu", "NVIDIA H200"))
    arrays, options = CASES[name]
    arrays = shapes_of(head_dim, **arrays)
    differentiable = [n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)]

    def run(arrays, dout):
        attend = lambda some: flash_attention(**arrays | some, **options, implementation="hopper")
        out, pullback = jax.vjp(attend, {n: arrays[n] for n in differentiable})
        return out, pullback(dout)

    found = kernels(lambda: compile_for_h200(run, arrays, arrays["query"]), tmp_path, monkeypatch)
    expected = ("backward", "dbias") if name == "bias" else ("backward",)  # a forward that was compiled before leaves no dump
    assert all(any(kind in kernel.name for kernel in found) for kind in expected), found
    assert not any(kernel.serialised for kernel in found), found
    assert sum(kernel.spilled for kernel in found) <= KNOWN.get((JAX, name, head_dim), 0), found


def test_a_scan_over_layers_runs_each_kernel_once(monkeypatch):
    """XLA of JAX 0.11 moved a copy of the forward kernel into the update that stacks its output for the backward."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: Device("gpu", "NVIDIA H200"))

    def loss(x, weights):
        def layer(x, weight):
            query, key, value = ((x * w).reshape(1, 256, 4, 64) for w in weight)
            out = flash_attention(query, key, value, is_causal=True, implementation="hopper")
            return x + out.reshape(x.shape), None

        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    program = compile_for_h200(jax.grad(loss, argnums=1), shape(1, 256, 256), shape(4, 3, 256)).as_text()
    calls = [line for line in program.splitlines() if "custom-call(" in line and "mosaic_gpu" in line]
    names = [re.search(r"/(flash_attention_\w+)/", line)[1] for line in calls]
    assert sorted(names) == ["flash_attention_backward_d64", "flash_attention_backward_rows_d64", "flash_attention_forward_d64"]
