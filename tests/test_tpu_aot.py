"""The TPU kernels without a TPU: lowered by Pallas, and compiled by libtpu for each generation.

Lowering refuses dtypes, block shapes and operations that Mosaic lacks; compiling, what does not fit into VMEM and layouts that do
not exist. Memory is linear.
"""

import dataclasses
import math
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from tpu_support import attention

from flash_jax import Mask
from flash_jax.backends.base import Device

GENERATIONS = {
    "v4": ("v4:2x2x1", "TPU v4"),
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v5p": ("v5p:2x2x1", "TPU v5"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "7x": ("tpu7x:2x2x1", "TPU7x"),
}
ENVIRONMENT = {  # for libtpu, which otherwise looks for a TPU and the network
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes; shapes and dtypes of traced arguments; and what makes the arguments of `flash_attention` out of them."""

    q_len: int = 2048
    kv_len: int = 2048
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int | None = None
    batch: int = 2
    dtype: str = "bfloat16"
    traced: tuple[tuple[tuple[int, ...], str], ...] = ()
    options: Callable[..., dict] = lambda: {"is_causal": True}

    def arguments(self):
        shape = jax.ShapeDtypeStruct
        q = shape((self.batch, self.q_len, self.num_heads, self.head_dim), self.dtype)
        k = shape((self.batch, self.kv_len, self.num_kv_heads, self.head_dim), self.dtype)
        v = shape((*k.shape[:3], self.v_head_dim or self.head_dim), self.dtype)
        return q, k, v, tuple(shape(*x) for x in self.traced)


INT, FLOAT, BOOL, BF16 = "int32", "float32", "bool", "bfloat16"
CASES = {
    "full": Case(options=dict),
    "causal": Case(),
    "odd_lengths": Case(q_len=1000, kv_len=777),
    "float32": Case(dtype="float32"),
    "float16": Case(dtype="float16"),
    "gqa": Case(num_heads=8),
    "long": Case(q_len=65536, kv_len=65536, num_heads=1, num_kv_heads=1, batch=1),
    "window": Case(q_len=8192, kv_len=8192, options=lambda: {"local_window_size": (1023, 0)}),
    "chunked": Case(options=lambda: {"mask": Mask.chunked(640) & Mask.causal()}),
    "lengths": Case(traced=(((2,), INT),), options=lambda n: {"is_causal": True, "key_value_seq_lengths": n, "query_seq_lengths": n}),
    "offset": Case(q_len=256, traced=(((2,), INT),), options=lambda n: {"is_causal": True, "q_offset": n}),
    "packed": Case(traced=(((2, 2048), INT),), options=lambda x: {"is_causal": True, "q_segment_ids": x, "kv_segment_ids": x}),
    "dense": Case(traced=(((2, 1, 2048, 2048), BOOL),), options=lambda x: {"mask": x}),
    "dense_keys": Case(traced=(((2, 1, 1, 2048), BOOL),), options=lambda x: {"mask": x}),
    "dense_rows": Case(traced=(((2, 2, 2048, 1), BOOL),), options=lambda x: {"mask": x}),
    "bias": Case(traced=(((1, 2, 2048, 2048), FLOAT),), options=lambda x: {"is_causal": True, "bias": x}),
    "bias_bfloat16": Case(traced=(((2, 2, 2048, 2048), BF16),), options=lambda x: {"bias": x}),
    "bias_keys": Case(traced=(((2, 1, 1, 2048), FLOAT),), options=lambda x: {"bias": x}),
    "bias_rows": Case(traced=(((1, 2, 2048, 1), FLOAT),), options=lambda x: {"bias": x}),
    "bias_heads": Case(traced=(((2, 1, 1), FLOAT),), options=lambda x: {"bias": x}),
    "soft_cap": Case(options=lambda: {"is_causal": True, "logits_soft_cap": 30.0}),
    "scale": Case(traced=(((), FLOAT),), options=lambda x: {"is_causal": True, "scale": x}),
    "dropout": Case(options=lambda: {"is_causal": True, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)}),
    "blocks": Case(traced=(((1, 2, 16, 16), BOOL),), options=lambda x: {"mask": Mask.from_blocks(x, 128, 128)}),
    "blocks_of_odd_size": Case(traced=(((1, 2, 21, 30), BOOL),), options=lambda x: {"mask": Mask.from_blocks(x, 100, 70)}),
    "blocks_large_map": Case(
        q_len=16384, kv_len=16384, num_heads=1, num_kv_heads=1, batch=1,
        traced=(((1, 1, 4096, 4096), BOOL),), options=lambda x: {"is_causal": True, "mask": Mask.from_blocks(x, 4, 4)},
    ),
    "blocks_of_one_score": Case(
        q_len=2048, kv_len=2048, num_heads=1, num_kv_heads=1, batch=1,
        traced=(((1, 1, 2048, 2048), BOOL),), options=lambda x: {"mask": Mask.from_blocks(x, 1, 1)},
    ),
    "function_many_batch_entries": Case(
        q_len=128, kv_len=128, num_heads=1, num_kv_heads=1, batch=2048, head_dim=64,
        traced=(((2048, 1), FLOAT), ((2048,), FLOAT)),
        options=lambda *x: {
            "mask": Mask.from_function(
                lambda b, h, q, k, head, scalar: ((q - k) % 3 != b % 2) & (head > scalar), *x, per=("head", "scalar")
            )
        },
    ),
    "function": Case(options=lambda: {"mask": Mask.from_function(lambda b, h, q, k: (q - k) % 3 == 0) & Mask.causal()}),
    "function_with_operands": Case(
        traced=(((2, 2048), INT), ((2048,), INT), ((2,), INT), ((2,), FLOAT)),
        options=lambda *x: {
            "mask": Mask.from_function(
                lambda b, h, q, k, row, key, head, scalar: (k + head <= q + row + key) & (scalar > 0),
                *x,
                per=("query", "key", "head", "scalar"),
            )
        },
    ),
    "one_row": Case(q_len=1, kv_len=4096, num_heads=8, options=lambda: {"is_causal": True, "q_offset": 4095}),
    "short": Case(q_len=40, kv_len=50),
    "float32_whole_rows": Case(dtype=FLOAT, q_len=300, kv_len=200),  # whose last rows are past the end
    "float32_head_dim_256": Case(dtype="float32", head_dim=256),
    "float32_head_dim_512_long": Case(
        q_len=16384, kv_len=16384, head_dim=512, dtype="float32", num_heads=1, num_kv_heads=1, batch=1
    ),
    **{f"head_dim_{d}": Case(head_dim=d) for d in (1, 5, 64, 72, 80, 96, 256, 512)},
    "head_dim_40_24": Case(head_dim=40, v_head_dim=24),
    "head_dim_192_128": Case(head_dim=192, v_head_dim=128),
}  # fmt: skip


def program(case: Case, device: Device):
    """Forward, and the gradients of everything that has one, with their arguments."""
    call = attention(None, None, device)

    def run(query, key, value, traced, dout, dlse):
        options = case.options(*traced)
        arrays = {"query": query, "key": key, "value": value} | {n: options.pop(n) for n in ("bias", "scale") if n in options}
        results, pullback = jax.vjp(lambda arrays: call(**arrays, **options), arrays)
        return results, pullback((dout, dlse))

    q, k, v, traced = case.arguments()
    dout = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype)
    return run, (q, k, v, traced, dout, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))


@pytest.mark.parametrize("name", CASES)
def test_lowers(name):
    run, arguments = program(CASES[name], Device("tpu", "TPU v6 lite"))
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert "flash_forward" in text
    assert "flash_backward" in text
    assert ("flash_dbias" in text) == name.startswith("bias")


def compile_for(generation: str, case: Case):
    pytest.importorskip("libtpu", reason="libtpu compiles; scripts/check.sh --aot installs it")
    topology, kind = GENERATIONS[generation]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    run, arguments = program(case, Device("tpu", kind))
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(jax.sharding.Mesh(np.array([device]), ("one",)).abstract_mesh):
        return jax.jit(run).lower(*arguments).compile()


@pytest.mark.aot
@pytest.mark.timeout(900)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", CASES)
def test_compiles(generation, name):
    compiled = compile_for(generation, CASES[name])
    text = compiled.as_text()
    for kernel in ("flash_forward", "flash_backward"):
        assert kernel in text
    memory = compiled.memory_analysis()
    in_and_out = memory.argument_size_in_bytes + memory.output_size_in_bytes
    if name.startswith("blocks"):  # of a map, sums over its rows and columns, in three words a block
        in_and_out += 4 * sum(math.prod(shape) for shape, _ in CASES[name].traced)
    # Copies in the kernels' layout: head_dim is padded to 128 lanes, float16 is widened; 32 MiB are for what is small.
    padding = max(128 / CASES[name].head_dim, 1) * (2 if CASES[name].dtype == "float16" else 1)
    assert memory.temp_size_in_bytes <= 3 * padding * in_and_out + 2**25
