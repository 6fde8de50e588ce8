"""What JAX does to functions, done to `flash_attention`: values are checked, and no transformation loses the skipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from counting import counted_tiles
from helpers import normal
from jax import export
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding, PartitionSpec
from oracle import differentiable, reference_attention
from tolerance import close

from flash_jax import Mask, dispatch, dropout_mask, flash_attention
from flash_jax.backends.base import Device
from flash_jax.nn.common import rotary

P = PartitionSpec
attention = functools.partial(flash_attention, implementation="xla", block_sizes=(16, 16))


def qkv(length=40, batch=2, heads=2, head_dim=8, seed=0):
    return tuple(normal(seed + n, batch, length, heads, head_dim) for n in range(3))


def gradients(f, *args):
    """Gradients of a loss that weighs every output differently."""
    loss = lambda *a: sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in jax.tree.leaves(f(*a)))
    return jax.grad(loss, tuple(range(len(args))))(*args)


# ------------------------------------------------------------------------------------------------------------- vmap
AXES = {
    "all": (0, 0, 0, 0),
    "query": (0, None, None, None),
    "bias": (None, None, None, 0),
    "key_value_last": (None, -1, 1, None),
    "query_bias": (2, None, None, 0),
}


@pytest.mark.parametrize("name", AXES)
def test_vmap_equals_a_loop(name):
    axes = AXES[name]
    shapes = ((2, 20, 2, 8), (2, 24, 1, 8), (2, 24, 1, 8), (1, 2, 1, 24))
    stack = lambda x, axis, seed: x if axis is None else jnp.stack([x, normal(seed, *x.shape)], axis)
    args = [stack(normal(n, *shape), axis, 10 + n) for n, (shape, axis) in enumerate(zip(shapes, axes, strict=True))]
    f = lambda q, k, v, bias: attention(q, k, v, bias, is_causal=True, return_residual=True)
    value_and_grad = lambda *a: (f(*a), gradients(f, *a))
    pick = lambda n: [x if axis is None else jnp.take(x, n, axis) for x, axis in zip(args, axes, strict=True)]
    loop = jax.tree.map(lambda *x: jnp.stack(x), *[value_and_grad(*pick(n)) for n in range(2)])
    close(jax.jit(jax.vmap(value_and_grad, axes))(*args), loop)


def test_vmap_over_everything_else():
    """Lengths, offset, scale, dropout key, mask arrays and sinks, mapped or not, twice nested; labels and functions closed over."""
    q, k, v = qkv(24)
    lengths = jnp.array([[[24, 3], [7, 20]], [[0, 24], [11, 12]]])
    scale, keys, sinks = jnp.array([0.2, 0.9]), jax.random.split(jax.random.key(1), 2), normal(5, 2, 2)
    random = np.random.default_rng(0)
    labels, dense = jnp.asarray(random.integers(0, 2, (2, 24))), jnp.asarray(random.random((2, 2, 1, 1, 24)) < 0.7)

    def f(lengths, scale, key, dense, sinks):
        mask = Mask.from_function(lambda b, h, i, j: labels[b, i] >= labels[b, j]) & Mask.segments(labels, labels) & Mask.lengths(lengths)
        options = {"q_offset": lengths, "sinks": sinks, "dropout_rate": 0.2, "dropout_key": key, "mask": mask}
        out = attention(q, k, v, key_value_seq_lengths=lengths, scale=scale, is_causal=True, **options)
        return out + attention(q, k, v, mask=dense)

    inner = jax.vmap(f, (0, None, 0, None, None))
    mapped = jax.jit(jax.vmap(inner, (0, 0, None, 1, 0)))(lengths, scale, keys, dense, sinks)
    for a in range(2):
        for b in range(2):
            close(mapped[a, b], f(lengths[a, b], scale[a], keys[b], dense[:, a], sinks[a]))


def test_vmap_over_the_array_of_a_mask_function_with_the_whole_batch_in_one_tile(monkeypatch):
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: Device("gpu", "some GPU"))
    q, k, v = qkv(20, batch=1)
    labels = jnp.asarray(np.random.default_rng(0).integers(0, 3, (4, 20)))

    def f(labels):
        visible = lambda b, h, i, j, label: (labels[i] >= label) & (b == 0)
        return attention(q, k, v, mask=Mask.from_function(visible, labels, per=("key",)))

    close(jax.vmap(f)(labels), jnp.stack([f(x) for x in labels]))


def test_vmap_over_nothing():
    q, k, v = qkv(20)
    none = jnp.zeros((0, *q.shape))
    f = jax.vmap(lambda q, k: attention(q, k, v, return_residual=True), (0, None))
    assert [x.shape for x in f(none, k)] == [none.shape, none.shape[:-1]]
    per_element = jax.vmap(jax.grad(lambda q, k: attention(q, k, v).sum(), (0, 1)), (0, None))
    assert [x.shape for x in per_element(none, k)] == [none.shape, (0, *k.shape)]


LENGTHS = jnp.array([96, 5, 40, 17, 64, 1, 80, 33])


@pytest.mark.parametrize("how", ["batch", "vmap"])
def test_sequences_of_different_length_execute_their_own_tiles(how, monkeypatch):
    """16 x 16 tiles of 8 sequences of at most 96 keys: each visits its causal tiles below its length, and no others."""
    q, k, v = (x[:, :, :1] for x in qkv(96, batch=8))
    per_sequence = [sum(min(i + 1, -(-int(n) // 16)) for i in range(6)) for n in LENGTHS]

    def one(q, k, v, n):
        return attention(q[None], k[None], v[None], is_causal=True, key_value_seq_lengths=n[None])[0]

    with counted_tiles(monkeypatch) as tiles:
        f = jax.vmap(one) if how == "vmap" else lambda q, k, v, n: attention(q, k, v, is_causal=True, key_value_seq_lengths=n)
        jax.block_until_ready(jax.jit(lambda *a: gradients(lambda q, k, v: f(q, k, v, LENGTHS), *a))(q, k, v))
        jax.effects_barrier()
        assert (tiles.forward, tiles.backward) == (sum(per_sequence), sum(per_sequence))


def test_rows_of_padding_are_not_computed(monkeypatch):
    """A q tile that sees no key is no iteration of any loop: its output was 0 and its lse -inf before the first."""
    q, k, v = (x[:, :, :1] for x in qkv(96, batch=8))
    with counted_tiles(monkeypatch) as tiles:
        f = lambda q, k, v: attention(q, k, v, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS, return_residual=True)
        out, lse = jax.block_until_ready(jax.jit(f)(q, k, v))
        jax.effects_barrier()
        assert tiles.rows == sum(-(-int(n) // 16) for n in LENGTHS)
    padding = jnp.arange(96) >= LENGTHS[:, None]
    assert not out[padding].any()
    assert (lse[padding] == -jnp.inf).all()
    assert jnp.isfinite(lse[~padding]).all()


# ------------------------------------------------------------------------------------------------------ checkpoint, scan
SAVED = jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse")


@pytest.mark.parametrize(("policy", "forwards"), [(SAVED, 1), (jax.checkpoint_policies.nothing_saveable, 2)], ids=["names", "nothing"])
def test_saving_the_named_residuals_saves_the_forward(policy, forwards, monkeypatch):
    args = qkv(16)

    def layer(q, k, v):
        return jnp.tanh(attention(jnp.sin(q), k, v, is_causal=True))

    run = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2)))(*args)
    expected = run(layer)
    with counted_tiles(monkeypatch) as tiles:
        got = run(jax.checkpoint(layer, policy=policy))
        jax.block_until_ready(got)
        jax.effects_barrier()
        per_pass = 1  # one tile for both batch entries
        assert (tiles.forward, tiles.backward) == (forwards * per_pass, per_pass)
    close(got, expected)


def test_scan_over_layers_with_masks():
    x, _, _ = qkv(24)
    weights, lengths = 0.3 * normal(9, 3, 8, 8), jnp.array([[24, 24], [9, 20], [3, 1]])
    layer = lambda h, w, mask: h + attention(h @ w, h, h, mask=mask, is_causal=True)

    def unrolled(x, weights):
        for n in range(3):
            x = layer(x, weights[n], Mask.lengths(key=lengths[n]))
        return x

    def scanned(x, weights):
        step = lambda h, layer_inputs: (layer(h, *layer_inputs), None)
        return jax.lax.scan(jax.checkpoint(step), x, (weights, Mask.lengths(key=lengths)))[0]

    close(jax.jit(lambda *a: gradients(scanned, *a))(x, weights), gradients(unrolled, x, weights))


# ------------------------------------------------------------------------------------------------------------ sharding
def _mesh():
    if len(jax.devices()) < 2:
        pytest.fail("these tests need two devices; tests/conftest.py makes two of a CPU")
    return DeviceMesh(np.array(jax.devices()[:2]), ("x",))


def _biased(q, k, v, bias):
    return attention(q, k, v, bias, is_causal=True, key_value_seq_lengths=jnp.array([40] * q.shape[0]))


@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_shard_map_checks_and_sums_the_replicated_bias(axis):
    args = (*qkv(40), normal(7, 1, 1, 40, 40))
    spec = P("x") if axis == "batch" else P(None, None, "x")
    mapped = jax.shard_map(_biased, mesh=_mesh(), in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=True)
    close(jax.jit(mapped)(*args), _biased(*args))
    close(jax.jit(lambda *a: gradients(mapped, *a))(*args), gradients(_biased, *args))


def test_shard_map_jvp():
    args = qkv(40)
    f = lambda q, k, v: attention(q, k, v, is_causal=True)
    mapped = jax.shard_map(f, mesh=_mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=True)
    tangents = qkv(40, seed=5)
    close(jax.jit(lambda *t: jax.jvp(mapped, args, t))(*tangents), jax.jvp(f, args, tangents))


def test_shard_map_second_derivatives():
    args = (*qkv(40), normal(7, 1, 1, 40, 40))
    mapped = jax.shard_map(_biased, mesh=_mesh(), in_specs=(*[P("x")] * 3, P()), out_specs=P("x"), check_vma=True)
    tangents = (*qkv(40, seed=5), normal(8, 1, 1, 40, 40))
    push = lambda f: jax.jit(lambda *t: jax.jvp(lambda *a: gradients(f, *a), args, t)[1])(*tangents)
    close(push(mapped), push(_biased), 1e-4)


def test_shard_map_second_derivatives_under_a_mask_function():
    args, labels = qkv(20), jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 20)))

    def f(q, k, v, labels):
        visible = lambda b, h, i, j, label: jnp.where(h > 0, (label + i - j) % 3 < 2, label > 0) & (jnp.abs(label + j) > 1)
        return attention(q, k, v, mask=Mask.from_function(visible, labels, per=("query",)))

    mapped = jax.shard_map(f, mesh=_mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=True)
    push = lambda f: jax.jit(jax.jvp, static_argnums=0)(jax.grad(lambda q: (f(q, *args[1:], labels) ** 2).sum()), args[:1], args[1:2])[1]
    close(push(mapped), push(f), 1e-4)


def test_shard_map_with_a_mask_function_over_a_captured_array():
    """What the function closes over varies over the mesh; its rows and keys, while it is traced, do not."""
    args, labels = qkv(40), jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 40)))
    f = lambda q, k, v, labels: attention(q, k, v, mask=Mask.from_function(lambda b, h, i, j: labels[b, i] + 1 >= labels[b, j]))
    mapped = jax.shard_map(f, mesh=_mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=True)
    both = lambda f: jax.jit(lambda *a: (f(*a, labels), gradients(lambda *a: f(*a, labels), *a)))(*args)
    close(both(mapped), both(f))
    push = lambda f: jax.jit(jax.jvp, static_argnums=0)(jax.grad(lambda q: (f(q, *args[1:], labels) ** 2).sum()), args[:1], args[1:2])[1]
    close(push(mapped), push(f), 1e-4)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_mesh_with_explicit_axes(spec):
    """Shardings are part of the types: the result is sharded as the query is, and vmap folds its axis beside the sharded one."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = qkv(40)
    stacked = jnp.stack([args[0], 2 * args[0], 3 * args[0]])
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        q, k, v = (put(x, spec) for x in args)
        out = jax.jit(attention)(q, k, v)
        assert out.sharding.spec[: len(spec)] == tuple(spec)
        close(out, attention(*args))
        mapped = jax.jit(jax.vmap(attention, (0, None, None)))(put(stacked, P(None, *spec)), k, v)
        close(mapped, jnp.stack([attention(x, *args[1:]) for x in stacked]))


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
def test_second_derivatives_on_a_mesh_with_explicit_axes(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    put = lambda arrays: [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, (spec, spec, spec, P()), strict=True)]
    args, tangents = (*qkv(20), normal(7, 1, 1, 20, 20)), (*qkv(20, seed=5), normal(8, 1, 1, 20, 20))
    f = lambda *a: (attention(*a, is_causal=True) ** 2).sum()
    push = jax.jit(lambda a, t: jax.jvp(jax.grad(f, (0, 3)), a, t)[1])
    got = push(tuple(put(args)), tuple(put(tangents)))
    assert got[0].sharding.spec[: len(spec)] == tuple(spec)
    close(got, push(args, tangents), 1e-4)


@pytest.mark.parametrize("spec", [P(None, "x"), P("x")], ids=["second", "first"])
def test_two_batch_axes_on_a_mesh_with_explicit_axes(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = (*(normal(n, 2, 4, 20, 2, 8) for n in range(3)), normal(7, 2, 4, 1, 1, 20), 1 + jnp.arange(8).reshape(2, 4))
    f = lambda *a: attention(*a[:4], key_value_seq_lengths=a[4], return_residual=True)
    both = jax.jit(lambda *a: (f(*a), jax.grad(lambda q, bias: jnp.sin(f(q, *a[1:3], bias, a[4])[0]).sum(), (0, 1))(a[0], a[3])))
    got = both(*(jax.device_put(x, NamedSharding(mesh, spec)) for x in args))
    assert all(x.sharding.spec[: len(spec)] == tuple(spec) for x in jax.tree.leaves(got))
    close(got, both(*args))


def test_jit_over_sharded_arrays():
    mesh = _mesh()
    args = (*qkv(40), normal(7, 1, 2, 40, 40))
    put = [jax.device_put(x, NamedSharding(mesh, P("x") if n < 3 else P())) for n, x in enumerate(args)]
    close(jax.jit(_biased)(*put), _biased(*args))
    close(jax.jit(lambda *a: gradients(_biased, *a))(*put), gradients(_biased, *args))


# -------------------------------------------------------------------------------------------------- export, x64, eager
def test_export_round_trip():
    args = qkv(40)
    f = jax.jit(lambda *a: gradients(lambda q, k, v: attention(q, k, v, is_causal=True), *a))
    exported = export.deserialize(export.export(f)(*args).serialize())
    close(exported.call(*args), f(*args), 1e-6)


KERNELS = {
    "hopper": ("cuda", Device("gpu", "NVIDIA H200"), "mosaic_gpu_v2"),
    "tpu": ("tpu", Device("tpu", "TPU v6 lite"), "tpu_custom_call"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_exported_with_every_safety_check(name, monkeypatch):
    platform, device, target = KERNELS[name]
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: device)
    f = lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation=name)
    mapped = jax.shard_map(f, mesh=_mesh(), in_specs=P("x"), out_specs=P("x"))
    x = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16, sharding=NamedSharding(_mesh(), P("x")))
    exported = export.export(jax.jit(lambda *a: gradients(mapped, *a)), platforms=[platform])(x, x, x)
    assert exported.mlir_module().count(f"custom_call @{target}") >= 2


def test_export_with_a_symbolic_batch():
    """Of lengths and heads the sizes must be known: tests/test_errors.py."""
    b = export.symbolic_shape("b, 40, 2, 8")
    f = jax.jit(lambda *a: gradients(lambda q, k, v: attention(q, k, v, is_causal=True), *a))
    exported = export.export(f)(*[jax.ShapeDtypeStruct(b, jnp.float32)] * 3)
    for batch in (1, 3):
        args = qkv(40, batch)
        close(exported.call(*args), f(*args), 1e-6)
    scope = export.SymbolicScope()
    shapes = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.float32) for s in ("b, 40, 2, 8", "b, 2, 40, 40")]
    g = jax.jit(lambda x, bias: gradients(lambda x, bias: attention(x, x, x, bias), x, bias))
    with_bias = qkv(40, 3)[0], normal(4, 3, 2, 40, 40)
    close(export.export(g)(*shapes).call(*with_bias), g(*with_bias), 1e-6)


def test_export_over_a_mesh():
    args, sharding = qkv(40), NamedSharding(_mesh(), P("x"))
    f = lambda *a: attention(*a, is_causal=True)
    exported = export.export(jax.jit(f, in_shardings=sharding, out_shardings=sharding))(*args)
    assert exported.nr_devices == 2
    close(jax.jit(exported.call)(*(jax.device_put(x, sharding) for x in args)), f(*args), 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64_mode_changes_nothing(dtype):
    arguments, _, _ = BY_NAME["everything"].build()
    arguments = {n: x.astype(dtype) if n in ("query", "key", "value") else x for n, x in arguments.items()}
    names = differentiable(arguments)

    def run(arrays):
        f = lambda a: flash_attention(**(arguments | a), return_residual=True, block_sizes=(32, 32))
        values, pullback = jax.vjp(f, arrays)
        return values, pullback(jax.tree.map(jnp.ones_like, values))

    arrays = {n: arguments[n] for n in names}
    narrow = run(arrays)
    with jax.enable_x64(True):
        wide = run(arrays)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), wide, narrow)
    close(
        jax.tree.map(lambda x: x.astype(jnp.float32), wide),
        jax.tree.map(lambda x: x.astype(jnp.float32), narrow),
        1e-2 if dtype == "bfloat16" else 2e-5,
    )


def test_one_compilation_for_all_lengths():
    q, k, v = qkv(24)
    count = 0

    @jax.jit
    def f(n, labels):
        nonlocal count
        count += 1
        return attention(q, k, v, key_value_seq_lengths=n, q_segment_ids=labels, kv_segment_ids=labels)

    for n in range(3):
        f(jnp.array([n, 24 - n]), jnp.full((2, 24), n))
    assert count == 1


def test_without_jit():
    args = qkv(24)
    f = lambda q, k, v: attention(q, k, v, is_causal=True)
    expected = f(*args), gradients(f, *args)
    with jax.disable_jit():
        close((f(*args), gradients(f, *args)), expected)


RANKS = {
    "lengths": {"is_causal": True, "query_seq_lengths": jnp.array([40, 7]), "key_value_seq_lengths": jnp.array([40, 7])},
    "bias, dropout and sinks": {"bias": jnp.zeros((1, 40)), "dropout_rate": 0.1, "dropout_key": jax.random.key(0), "sinks": jnp.zeros(2)},
    "function and blocks": {"mask": Mask.from_function(lambda b, h, q, k: k <= q + h) & Mask.from_blocks(jnp.eye(5, dtype=bool), 8, 8)},
}


@pytest.mark.parametrize("name", RANKS)
def test_a_caller_that_forbids_rank_promotion(name):
    """It says how the caller's own arrays may meet; gradients of gradients are traced inside its reach too."""
    q, k, v = qkv()
    with jax.numpy_rank_promotion("raise"):
        f = lambda q, k, v: jnp.sum(attention(q, k, v, **RANKS[name]) ** 2)
        jax.jit(jax.grad(lambda *qkv: jnp.sum(jax.grad(f)(*qkv) ** 2), (0, 1, 2))).lower(q, k, v)


def test_a_caller_that_forbids_rank_promotion_may_ask_for_masks_and_positions():
    with jax.numpy_rank_promotion("raise"):
        assert dropout_mask(jax.random.key(0), 0.5, (2, 3, 4, 5)).shape == (2, 3, 4, 5)
        assert rotary(jnp.ones((2, 4, 3, 8)), jnp.arange(4), 1e4).shape == (2, 4, 3, 8)


def test_no_tracer_outlives_its_trace():
    """Nor do arrays that a mask function closes over live on in what JAX keeps of a call."""
    q, k, v = qkv(24)
    f = jax.jit(lambda labels: attention(q, k, v, mask=Mask.from_function(lambda b, h, i, j: labels[i] == labels[j])))
    with jax.checking_leaks():
        f(jnp.arange(24) // 5)


def test_repeats_bitwise():
    args = qkv(100, heads=4)
    f = jax.jit(lambda *a: gradients(lambda q, k, v: attention(q, k, v, is_causal=True), *a))
    first = f(*args)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, f(*args), first)


# ----------------------------------------------------------------------------------------------- other derivatives
HARD = ["everything", "function_over_captured", "blocks_by_head", "bias_rows_gqa", "sinks_empty_rows"]


def _problem(name):
    """A case as functions of its differentiable arrays, ours and the reference's, without infinities."""
    arguments, _, _ = BY_NAME[name].build()
    names = differentiable(arguments)
    fixed = {n: x for n, x in arguments.items() if n not in names}
    finite = lambda pair: (pair[0], jnp.where(jnp.isfinite(pair[1]), pair[1], 0))
    ours = lambda a: finite(flash_attention(**fixed, **a, return_residual=True, implementation="xla", block_sizes=(32, 48)))
    dense = lambda a: finite(reference_attention(**fixed, **a))
    arrays = {n: arguments[n] for n in names}
    tangents = {n: normal(m, *x.shape).astype(x.dtype) for m, (n, x) in enumerate(arrays.items())}
    return ours, dense, arrays, tangents


@pytest.mark.parametrize("name", HARD)
def test_forward_mode(name):
    ours, dense, arrays, tangents = _problem(name)
    push = lambda f: jax.jit(lambda a, t: jax.jvp(f, (a,), (t,)))(arrays, tangents)
    close(push(ours), push(dense))


def _loss(f):
    return lambda a: sum((x**2).sum() for x in f(a))


@pytest.mark.parametrize("order", ["reverse_over_reverse", "forward_over_reverse", "reverse_over_forward"])
@pytest.mark.parametrize("name", ["everything", "causal_more_rows"])
def test_hessian_vector_products(name, order):
    ours, dense, arrays, tangents = _problem(name)
    inner = lambda a, b: sum(jax.tree.leaves(jax.tree.map(lambda x, y: (x * y).sum(), a, b)))

    def product(f):
        match order:
            case "reverse_over_reverse":
                return jax.grad(lambda a: inner(jax.grad(_loss(f))(a), tangents))(arrays)
            case "forward_over_reverse":
                return jax.jvp(jax.grad(_loss(f)), (arrays,), (tangents,))[1]
            case _:
                return jax.grad(lambda a: jax.jvp(_loss(f), (a,), (tangents,))[1])(arrays)

    close(jax.jit(product, static_argnums=0)(ours), jax.jit(product, static_argnums=0)(dense), 2e-4)


def test_hessian():
    q, k, v = (x[:1, :5, :1, :3] for x in qkv(5))
    f = lambda attend: jax.jit(jax.hessian(lambda q: (attend(query=q, key=k, value=v, is_causal=True) ** 2).sum()))(q)
    close(f(lambda **a: flash_attention(**a, block_sizes=(2, 2))), f(lambda **a: reference_attention(**a)[0]), 1e-4)


def test_third_derivative():
    q, k, v = (x[:1, :6, :1, :4] for x in qkv(6))

    def third(attend):
        f = lambda t: (attend(query=q * t, key=k, value=v) ** 2).sum()
        return jax.grad(jax.grad(jax.grad(f)))(jnp.float32(0.7))

    close(third(lambda **a: flash_attention(**a, block_sizes=(2, 3))), third(lambda **a: reference_attention(**a)[0]), 1e-3)
