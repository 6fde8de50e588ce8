"""The TPU kernels, interpreted: numbers, schedule, padding, races, and what is declined."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from test_implementations import check
from tpu_support import DEVICE, SLICED, WHOLE, attention, interpreted

from flash_jax import Mask, api, schedule
from flash_jax.backends import tpu
from flash_jax.backends.base import Device
from flash_jax.backends.tpu import launch, plan
from flash_jax.backends.tpu.config import Tiles
from flash_jax.visibility import RowRule

COVERING = ("window_left", "both_lengths_causal", "packed", "blocks_by_head", "function_with_operands", "bias_rows_gqa", "bfloat16_bias")


def declined(case):
    return tpu.BACKEND.why_not(api._prepare(**case.build()[0]).problem, DEVICE)


@pytest.fixture
def kernels(monkeypatch):
    """Interpretation must last until the derivative rules are lowered."""
    with interpreted():
        yield


@pytest.mark.parametrize("name", COVERING)
def test_case(name, kernels):
    check(BY_NAME[name], attention(WHOLE, None))


@pytest.mark.parametrize("name", ["everything_bfloat16"])
def test_case_with_the_keys_in_slices(name, kernels):
    check(BY_NAME[name], attention(SLICED, None))


SERVED = [case for case in CASES if declined(case) is None]
LSE_IN_FLOAT32 = "lse of 60 and more has lost 2^-19 in float32, and the probabilities of the backward with it: twice what is allowed"


@pytest.mark.slow
@pytest.mark.parametrize("config", [WHOLE, SLICED, None], ids=["whole", "sliced", "default"])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case(case, config, kernels, request):
    if case.name == "large_logits" and config is not None:
        request.applymarker(pytest.mark.xfail(reason=LSE_IN_FLOAT32, raises=AssertionError))
    check(case, attention(config, None))


def test_only_captured_arrays_are_declined():
    reasons = {case.name: declined(case) for case in CASES if declined(case)}
    assert list(reasons) == ["function_over_captured"]
    assert "closes over an array" in reasons["function_over_captured"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": np.dtype("float64")}, "float64"),
        ({"block_sizes": (64, 128)}, "multiples of 128"),
    ],
    ids=lambda x: str(x),
)
def test_declines(change, words):
    problem = dataclasses.replace(api._prepare(**BY_NAME["full"].build()[0]).problem, **change)
    assert words in tpu.BACKEND.why_not(problem, DEVICE)


def test_declines_other_devices_and_functions_that_are_no_arithmetic():
    problem = api._prepare(**BY_NAME["full"].build()[0]).problem
    assert "cpu" in tpu.BACKEND.why_not(problem, Device("cpu", "cpu"))
    assert "TPU v3" in tpu.BACKEND.why_not(problem, Device("tpu", "TPU v3"))
    x = jnp.ones((1, 8, 1, 4))
    mask = Mask.from_function(lambda b, h, q, k: jnp.sin(q * 1.0) > 0)
    assert "sin" in tpu.BACKEND.why_not(api._prepare(x, x, x, mask=mask).problem, DEVICE)


RULES = [
    RowRule(300),
    RowRule(300, right=0),
    RowRule(300, offset=-130, right=0),
    RowRule(300, offset=200, right=0),
    RowRule(300, left=40, right=3),
    RowRule(300, right=0, prefix=150),
    RowRule(300, offset=7, right=0, chunk=96),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_arithmetic_in_the_kernel_is_sound_and_visits_what_the_schedule_visits(rule):
    problem = dataclasses.replace(api._prepare(**BY_NAME["full"].build()[0]).problem, q_len=270, kv_len=300)
    problem = dataclasses.replace(problem, mask=problem.mask._replace(rule=rule))
    tiles = Tiles(64, 32, 320)
    got = np.stack(plan.ranges(problem, tiles, jnp.arange(5)), -1)
    lo, hi = (np.asarray(x) for x in rule(jnp.arange(270)))
    for i, (begin, full_begin, full_end, end) in enumerate(got):
        rows = slice(i * 64, min(i * 64 + 64, 270))
        kv = np.arange(320)
        seen = (lo[rows, None] <= kv) & (kv < hi[rows, None])
        by_tile = seen.reshape(seen.shape[0], 10, 32)
        assert not by_tile[:, :begin].any()
        assert not by_tile[:, end:].any()
        assert by_tile[:, full_begin:full_end].all()
    want = np.stack(schedule.interval_ranges(*(jnp.asarray(x) for x in (lo, hi)), 64, 32), -1)
    has_empty_rows = (lo >= hi).any()
    if not has_empty_rows:
        np.testing.assert_array_equal(got[:, [0, 3]], want[:, [0, 3]])


def count_visits(problem, tiles, kinds=None):
    """How often a kernel steps onto each tile, `[q tiles, kv tiles]`: 1 without, 2 with the mask."""
    num_q, num_kv = schedule.num_tiles(problem.q_len, tiles.block_q), tiles.tiles_resident

    def kernel(*refs):
        kinds_ref, out_ref = refs if kinds is not None else (None, *refs)
        out_ref[...] = jnp.zeros_like(out_ref)

        def step(j, masked):
            out_ref[0, pl.ds(j, 1)] += jnp.full((1,), 2 if masked else 1, jnp.int32)

        ids = launch.Ids(0, 0, pl.program_id(0), 0)
        plan.visit(problem, tiles, ids, 0, None if kinds is None else kinds_ref.at[0], step)

    with interpreted():
        return pl.pallas_call(
            kernel,
            grid=(num_q,),
            in_specs=[] if kinds is None else [pl.BlockSpec((1, 1, num_kv), lambda i: (i, 0, 0))],
            out_specs=pl.BlockSpec((1, num_kv), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((num_q, num_kv), jnp.int32),
        )(*([] if kinds is None else [kinds]))


@pytest.mark.parametrize("unroll", [1, 3])
def test_every_visible_tile_is_visited_once_and_no_other(unroll):
    problem = dataclasses.replace(api._prepare(**BY_NAME["full"].build()[0]).problem, q_len=256, kv_len=256)
    problem = dataclasses.replace(problem, mask=problem.mask._replace(rule=RowRule(256, left=100, right=0)))
    tiles = Tiles(32, 16, 256, unroll)
    visits = np.asarray(count_visits(problem, tiles))
    kinds = np.asarray(schedule.interval_kinds(*problem.mask.rule(jnp.arange(256)), 32, 16, 256))
    np.testing.assert_array_equal(visits > 0, kinds != schedule.EMPTY)
    assert (visits[kinds == schedule.PARTIAL] == 2).all()
    assert ((visits == 1) | (visits == 2))[kinds == schedule.FULL].all()
    if unroll == 1:
        assert (visits[kinds == schedule.FULL] == 1).all()


def test_tiles_of_packed_sequences_are_skipped():
    arguments = BY_NAME["packed"].build()[0]
    request = api._prepare(**arguments)
    tiles = Tiles(16, 16, 80)
    kinds = plan.kinds(request.problem, tiles, request.operands)
    assert kinds.shape == (2, 1, 5, 1, 5)
    visits = np.asarray(count_visits(request.problem, tiles, kinds[0, 0]))
    expected = np.array([[2, 0, 0, 0, 0], [2, 2, 0, 0, 0], [0, 2, 2, 0, 0], [0, 2, 2, 2, 0], [0, 0, 0, 0, 2]])
    assert ((visits > 0) <= (np.tri(5) > 0)).all()
    np.testing.assert_array_equal(visits > 0, np.asarray(kinds[0, 0, :, 0]) > 0)
    assert (visits > 0).sum() <= (expected > 0).sum() + 2


@pytest.mark.parametrize("name", ["lengths", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "segments", "function"))])
def test_padding_reaches_nothing(name, kernels):
    from test_padding import ARRAYS, DLSE, DOUT, poisoned
    from test_padding import CASES as PADDED

    options = PADDED[name]

    @jax.jit
    def run(arrays, dout, dlse):
        results, pullback = jax.vjp(lambda arrays: attention(WHOLE, None)(**arrays, **options), arrays)
        return *results, *pullback((dout, dlse))

    expected = run(ARRAYS, DOUT, DLSE)
    for poison in (jnp.nan, jnp.inf):
        jax.tree.map(np.testing.assert_array_equal, run(*poisoned(options, poison)), expected)


def test_lowers_for_tpu_without_one():
    """As `jax.export` does: layouts, block shapes and dtypes that Mosaic refuses fail here."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 900, 2, 64), jnp.bfloat16)

    def loss(q, k, v, bias):
        out, lse = attention(None, None)(query=q, key=k, value=v, bias=bias, is_causal=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    bias = jax.ShapeDtypeStruct((1, 4, 1000, 900), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2, 3))), platforms=["tpu"])(x, kv, kv, bias)
    assert exported.platforms == ("tpu",)
    module = exported.mlir_module()
    for name in ("flash_forward", "flash_backward", "flash_dbias"):
        assert name in module


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


def run_with_race_detection():
    """Forward and backward of a grouped problem on two cores, memory that nobody wrote being NaN."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    arguments, dout, dlse = BY_NAME["gqa"].build()
    first = {n: arguments[n][:1, :, :heads] for n, heads in (("query", 3), ("key", 1), ("value", 1))}
    request = api._prepare(**first, is_causal=True)

    @jax.jit
    def run(operands, dout, dlse):
        out, lse = tpu.BACKEND.forward(request.problem, WHOLE, operands)
        names = ("query", "key", "value")
        return out, lse, tpu.BACKEND.backward(request.problem, WHOLE, operands, out, lse, dout, dlse, names)

    with interpreted(params):
        got = jax.block_until_ready(run(request.operands, dout[:1, :, :3], dlse[:1, :, :3]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_no_races():
    run_with_race_detection()
    assert not races_found()


def test_a_planted_race_is_found(monkeypatch):
    """The loops over the rows of a group called parallel: two cores then add to the same dk and dv."""
    module = importlib.import_module("flash_jax.backends.tpu.backward")  # the package's own `backward` is the function
    monkeypatch.setattr(module, "Grid", lambda sizes, ids, parallel: launch.Grid(sizes, ids, parallel=len(sizes)))
    try:
        run_with_race_detection()
        found = races_found()
    except Exception as error:
        found = "race" in str(error).lower()
        pltpu.reset_tpu_interpret_mode_state()
    assert found
