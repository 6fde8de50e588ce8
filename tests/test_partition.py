"""Kernels divided over devices under plain `jit`: the same values, nothing gathered that need not be, shared gradients summed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import H200, normal
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding, PartitionSpec
from tolerance import close

from flash_jax import Mask, dispatch, flash_attention
from flash_jax.backends import xla
from flash_jax.backends.base import Device

P = PartitionSpec
REPLICATED, BATCH, HEADS = P(), P("x"), P(None, None, "x")


@pytest.fixture
def partitioned(monkeypatch):
    """In the place of `hopper`, loops that XLA must not divide by itself."""
    kernel = dataclasses.replace(xla.BACKEND, name="hopper", is_partitioned=True)
    monkeypatch.setattr(dispatch, "BACKENDS", (kernel, *dispatch.BACKENDS[1:]))


def value_and_grads(implementation, arrays, **options):
    def loss(arrays):
        out, lse = flash_attention(**arrays, **options, return_residual=True, implementation=implementation)
        return (jnp.sin(out) + lse[..., None]).sum()

    return jax.value_and_grad(loss)(arrays)


def arrays(bias_shape=None, batch=4):
    result = {"query": normal(0, batch, 24, 4, 8), "key": normal(1, batch, 24, 2, 8), "value": normal(2, batch, 24, 2, 8)}
    result["scale"] = jnp.float32(0.4)
    return result if bias_shape is None else result | {"bias": normal(3, *bias_shape)}


def compiled(arrays, specs, **options):
    """As one executable over two devices, with its arguments."""
    mesh = DeviceMesh(np.array(jax.devices()[:2]), ("x",))
    put = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, REPLICATED))) for name, x in arrays.items()}
    return jax.jit(functools.partial(value_and_grads, "hopper", **options)).lower(put).compile(), put


DROPOUT = {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}
FUNCTION = Mask.from_function(lambda b, h, i, j: (i + j + h + b) % 3 > 0)


@pytest.mark.parametrize("spec", [BATCH, HEADS], ids=["batch", "heads"])
@pytest.mark.parametrize("bias_shape", [(1, 1, 24, 24), (4, 1, 1, 24), (1, 4, 24, 1), (4, 4, 24, 24)], ids=str)
def test_each_device_attends_to_its_own(partitioned, spec, bias_shape):
    operands = arrays(bias_shape)
    options = {"is_causal": True, "key_value_seq_lengths": jnp.array([24, 3, 17, 9]), **DROPOUT}
    specs = dict.fromkeys(("query", "key", "value"), spec)
    own = {BATCH: P("x") if bias_shape[0] > 1 else P(), HEADS: P(None, "x") if bias_shape[1] > 1 else P()}
    specs["bias"] = own[spec]
    run, put = compiled(operands, specs, **options)
    result = run(put)
    close(result, value_and_grads("xla", operands, **options))
    assert result[1]["query"].sharding.spec[: len(spec)] == tuple(spec)
    assert "all-gather(" not in run.as_text()


def test_heads_stay_whole_where_a_mask_function_reads_them(partitioned):
    operands = arrays()
    run, put = compiled(operands, dict.fromkeys(("query", "key", "value"), HEADS), mask=FUNCTION)
    close(run(put), value_and_grads("xla", operands, mask=FUNCTION))


def test_batch_ids_are_those_of_the_whole_batch(partitioned):
    operands = arrays()
    mask = Mask.from_function(lambda b, h, i, j: (i + j + b) % 3 > 0)
    run, put = compiled(operands, dict.fromkeys(("query", "key", "value"), BATCH), mask=mask)
    close(run(put), value_and_grads("xla", operands, mask=mask))


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, None, "x")], ids=["lengths", "head_dim"])
def test_other_axes_are_not_divided(partitioned, spec):
    operands = arrays()
    run, put = compiled(operands, dict.fromkeys(("query", "key", "value"), spec), is_causal=True)
    close(run(put), value_and_grads("xla", operands, is_causal=True))


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["one_query_head_a_key_head", "one_key_head"])
def test_groups_of_one_and_one_group(partitioned, heads):
    operands = {name: normal(n, 2, 24, h, 8) for n, (name, h) in enumerate(zip(("query", "key", "value"), (*heads, heads[1]), strict=True))}
    run, put = compiled(operands, dict.fromkeys(operands, BATCH))
    close(run(put), value_and_grads("xla", operands))
    assert "all-gather(" not in run.as_text()


def test_one_head_and_one_batch_entry(partitioned):
    operands = {name: normal(n, 1, 24, 1, 8) for n, name in enumerate(("query", "key", "value"))}
    run, put = compiled(operands, {"query": P(None, "x")})
    close(run(put), value_and_grads("xla", operands))


def test_second_derivatives_and_eager_calls(partitioned):
    operands = arrays()
    f = lambda implementation: lambda q: jnp.sin(flash_attention(**(operands | {"query": q}), implementation=implementation)).sum()
    second = lambda f: jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2))(operands["query"])
    close(second(f("hopper")), second(f("xla")))


@pytest.mark.aot
@pytest.mark.timeout(600)
def test_eight_cards_gather_nothing(monkeypatch):
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("", platform="cuda", target_config=H200, topology="1x1x8").devices
    mesh = DeviceMesh(np.array(devices).reshape(4, 2), ("data", "model"))
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: Device("gpu", "NVIDIA H200"))
    of = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
    by_both = ("data", None, "model")
    operands = {name: of((8, 256, heads, 128), *by_both) for name, heads in (("query", 8), ("key", 4), ("value", 4))}
    operands["bias"] = of((1, 8, 256, 256), None, "model")
    specs = dict.fromkeys(("query", "key", "value"), P(*by_both)) | {"bias": P(None, "model")}
    outputs = NamedSharding(mesh, P()), {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    run = jax.jit(functools.partial(value_and_grads, "hopper", is_causal=True), out_shardings=outputs).lower(operands).compile()
    text = run.as_text()
    assert "all-gather" not in text
    assert "bf16[2,256,4,128]" in text
    assert "bf16[8,256" not in text
    reduced = [line for line in text.splitlines() if "all-reduce-start(" in line]
    assert any("[1,4,256,256]" in line for line in reduced), "the gradient of the replicated bias"
