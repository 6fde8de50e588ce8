"""The TPU kernels over several devices and mapped axes: lowered for TPUs, and interpreted on two CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu_support import DEVICE, WHOLE, attention, interpreted

from flash_jax import dispatch, flash_attention

P = PartitionSpec


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("x",))


@pytest.fixture(autouse=True)
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: DEVICE)


def shapes(mesh=None, spec=None):
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return [jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float32, sharding=sharding)] * 3


def gradients(f):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))


def lowered(f, arguments):
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


causal = functools.partial(flash_attention, is_causal=True)


@pytest.mark.parametrize("f", [causal, gradients(causal)], ids=["forward", "gradients"])
def test_a_sharded_call_says_how(f, mesh):
    with pytest.raises(NotImplementedError, match=r"Call flash_attention inside jax\.shard_map.*implementation='xla'"):
        lowered(f, shapes(mesh, P("x")))


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_inside_shard_map_the_kernels_are_lowered(spec, mesh):
    mapped = jax.shard_map(causal, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    module = lowered(gradients(mapped), shapes(mesh, spec))
    assert "flash_forward" in module
    assert "flash_backward" in module


def inputs(*lead):
    return [jax.random.normal(jax.random.key(n), (*lead, 70, 2, 16)) for n in range(3)]


def by_kernels(q, k, v):
    return attention(WHOLE, None)(query=q, key=k, value=v, is_causal=True)[0]


def check(f, expected, arguments):
    with interpreted():
        got = jax.jit(lambda *x: (f(*x), gradients(f)(*x)))(*arguments)
    want = expected(*arguments), gradients(expected)(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


by_xla = functools.partial(flash_attention, is_causal=True, implementation="xla")


def test_shard_map(mesh):
    mapped = jax.shard_map(by_kernels, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=True)
    check(mapped, by_xla, inputs(2))


def test_vmap():
    check(
        jax.vmap(by_kernels, (1, 0, 0), 1),
        jax.vmap(by_xla, (1, 0, 0), 1),
        [x.swapaxes(0, 1) if n == 0 else x for n, x in enumerate(inputs(2, 1))],
    )
