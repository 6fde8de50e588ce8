"""The TPU kernels, interpreted: numbers, schedule, padding, races, and what is declined."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME, CASES
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from oracle import in_float64, unfused, value_and_gradients
from test_implementations import check
from tolerance import assert_as_exact_as_unfused, close
from tpu_support import DEVICE, SLICED, WHOLE, attention, interpreted, product_in_one_order

from flash_jax import Mask, api, flash_attention, schedule
from flash_jax.backends import functions, tpu
from flash_jax.backends.base import Device
from flash_jax.backends.tpu import edge, kinds, launch, plan, tile
from flash_jax.backends.tpu import visit as loops
from flash_jax.backends.tpu.config import Tiles
from flash_jax.visibility import RowRule

COVERING = (
    "window_left",
    "both_lengths_causal",
    "packed",
    "blocks_by_head",
    "function_with_operands",
    "function_over_captured",
    "bias_rows_gqa",
    "bfloat16_bias",
)


def declined(case):
    return tpu.BACKEND.why_not(api.prepare(**case.build()[0]).problem, DEVICE)


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
SMALL_TILES = [pytest.param(config, marks=pytest.mark.slow, id=name) for name, config in (("whole", WHOLE), ("sliced", SLICED))]


@pytest.mark.parametrize("config", [pytest.param(None, id="default"), *SMALL_TILES])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case(case, config, kernels, monkeypatch):
    if case.name == "large_logits" and config is WHOLE:  # whose tiles are not the same in forward and backward
        monkeypatch.setattr(tile, "dot", product_in_one_order)
    check(case, attention(config, None))


def test_no_case_is_declined():
    assert len(SERVED) == len(CASES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": np.dtype("float64")}, "float64"),
        ({"block_sizes": (64, 128)}, "multiples of 128"),
    ],
    ids=lambda x: str(x),
)
def test_declines(change, words):
    problem = dataclasses.replace(api.prepare(**BY_NAME["full"].build()[0]).problem, **change)
    assert words in tpu.BACKEND.why_not(problem, DEVICE)


EXACT = {"tiles": (11, tpu.Config(Tiles(64, 32, 32), Tiles(64, 32, 64), 2**26)), "whole_rows": (5, None)}


@pytest.mark.parametrize(("seed", "config"), EXACT.values(), ids=EXACT)
def test_float32_gradients_are_as_exact_as_unfused(seed, config, kernels):
    """Not so exact: scores that are not the forward's to the last bit; lse and out of rows that a tile holds whole."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    query, key, value = normal(1, 64, 3, 128), normal(1, 64, 1, 128), normal(1, 64, 1, 128)
    case = {"query": query, "key": key, "value": value, "scale": jnp.float32(0.3)}, normal(1, 64, 3, 128), normal(1, 64, 3)
    got, plain, expected = value_and_gradients(attention(config, None), *case), unfused(*case), in_float64(*case)
    for name in expected:
        assert_as_exact_as_unfused(name, got[name], plain[name], expected[name], np.float32)


MAPS = {
    "float32": ("float32", 2, Tiles(32, 256, 768)),
    "bfloat16": ("bfloat16", 2, Tiles(32, 256, 768)),
    "sliced": ("bfloat16", 3, Tiles(32, 128, 256)),
}


@pytest.mark.parametrize(("dtype", "size", "tiles"), MAPS.values(), ids=MAPS)
def test_a_map_of_more_blocks_than_a_register_has_lanes(dtype, size, tiles, kernels):
    """Tiles begin within a block, in rows and keys, and so do slices of the keys."""
    random = jax.random.split(jax.random.key(0), 5)
    query, key, value, dout = (jax.random.normal(r, (1, n, 2, 16), dtype) for r, n in zip(random[:4], (70, 600, 600, 70), strict=True))
    visible = jax.random.bernoulli(random[4], 0.3, (1, 2, 24, 600 // size)).at[:, :, 5].set(False)
    arguments = {"query": query, "key": key, "value": value, "mask": Mask.from_blocks(visible, 3, size)}
    xla = functools.partial(flash_attention, implementation="xla", return_residual=True)
    dlse = jnp.ones((1, 70, 2))
    got, want = (value_and_gradients(f, arguments, dout, dlse) for f in (attention(tpu.Config(tiles, tiles, 2**26), None), xla))
    close(got, want, 2e-5 if dtype == "float32" else 2e-2)
    request = api.prepare(**arguments)
    (part,) = launch.block_maps(request.problem, tiles, request.operands)
    slices = 768 // tiles.resident
    assert part.shape == (1, 2, 3, slices, 32, 384 // slices)  # of 300 columns, or of 86 and 87 a slice


def test_what_is_in_scalar_memory_is_one_batch_entry_s():
    """All batch entries at once had no room there from 2048 on."""
    x = jnp.ones((2048, 8, 2, 4))
    visible = lambda b, h, q, k, head, scalar: ((q - k) % 3 == b % 2) & (head > scalar)
    mask = Mask.from_function(visible, jnp.ones((2048, 2)), jnp.zeros(2048), per=("head", "scalar"))
    request, tiles = api.prepare(x, x, x, mask=mask, scale=jnp.float32(1)), Tiles(32, 128, 128)
    assert tpu.BACKEND.why_not(request.problem, DEVICE) is None
    grid = launch.Grid((2048, 2, 1, 1), launch.Ids, parallel=3)
    arrays = jax.eval_shape(lambda operands: launch.arrange(request.problem, tiles, operands), request.operands)
    scalars = (arrays.scale, arrays.batch_ids, *arrays.functions[0])
    assert [x.shape for x in scalars] == [(1, 1, 1), (2048, 1, 1), (2048, 1, 2), (2048, 1, 1)]
    for x in scalars:
        spec = launch.block("b::", x.shape, request.problem, tiles, grid)
        assert spec.block_shape == (None, *x.shape[1:])
        assert spec.memory_space == pltpu.SMEM
        assert spec.index_map(7, 1, 0, 0) == (0 if x.shape[0] == 1 else 7, 0, 0)


def test_a_scale_below_the_smallest_normal_number(kernels):
    x = jnp.ones((1, 4, 1, 4))
    out = attention(None, None)(query=x, key=x, value=x, scale=8e-39, is_causal=True)
    close(jax.tree.leaves(out)[0], jnp.ones_like(x))


def test_declines_other_devices_and_functions_that_are_no_arithmetic():
    problem = api.prepare(**BY_NAME["full"].build()[0]).problem
    assert "cpu" in tpu.BACKEND.why_not(problem, Device("cpu", "cpu"))
    assert "TPU v3" in tpu.BACKEND.why_not(problem, Device("tpu", "TPU v3"))
    x, table = jnp.ones((1, 8, 1, 4)), jnp.ones((8, 8), bool)

    def reason(function):
        return tpu.BACKEND.why_not(api.prepare(x, x, x, mask=Mask.from_function(function)).problem, DEVICE)

    assert "uses sin" in reason(lambda b, h, q, k: jnp.sin(q * k * 1.0) > 0)
    assert "uses scan" in reason(lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, c: c + q - k, 0) > 0)
    assert "by row and key together" in reason(lambda b, h, q, k: table[q, k])
    assert "uses rem of float32" in reason(lambda b, h, q, k: (q - k) * 1.0 % 3 < 1)
    assert "uses convert_element_type of bool" in reason(lambda b, h, q, k: (q - k).astype(bool))
    assert "uses max of bool" in reason(lambda b, h, q, k: jnp.maximum(q < k, k < 5))
    assert "uses integer_pow of float32" in reason(lambda b, h, q, k: (q - k + 0.5) ** -2 > 1)
    assert "uses select_n of int32" in reason(lambda b, h, q, k: jax.lax.select_n(jnp.clip(q - k, 0, 2), q, k, b) > 3)
    assert reason(lambda b, h, q, k: (q - k) % 3 != jnp.maximum(q, 2) * (q - k + 0.5) ** 2) is None
    assert "got int8 on row and key together" in reason(lambda b, h, q, k: (q - k).astype(jnp.int8) > 0)
    with jax.enable_x64(True):
        assert "got float64 on row and key together" in reason(lambda b, h, q, k: (q - k) * 0.5 < 3)
    assert reason(lambda b, h, q, k: (q - k) * 0.5 < 3) is None
    assert reason(lambda b, h, q, k: jnp.sin(q * 1.0) > k) is None
    assert reason(lambda b, h, q, k: table[q, 0] & table[0, k] & table[h, h]) is None


def test_what_a_function_reads_by_row_key_or_head_alone_becomes_an_operand():
    rows, keys, heads, limit = jnp.arange(8), jnp.arange(8) * 2, jnp.arange(3.0), jnp.int32(5)
    visible = lambda b, h, q, k: (rows[q] + keys[k] < limit) & (heads[h] > q - k) & (k >= 0)
    x = jnp.ones((1, 8, 1, 4))
    (function,) = api.prepare(x, x, x, mask=Mask.from_function(visible)).problem.mask.functions
    assert sorted(functions.split(function).kinds) == ["head", "key", "key", "query", "scalar"]
    assert functions.split(functions.split(function).kernel).outside == ()


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
    problem = dataclasses.replace(api.prepare(**BY_NAME["full"].build()[0]).problem, q_len=270, kv_len=300)
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


def visits(problem, tiles, table=None):
    """What a kernel's steps do with each score, `[q_len, kv_len]`, padded: 1 a step, 10 more for the lower bound, 100 the upper."""
    num_q, kv_len = schedule.num_tiles(problem.q_len, tiles.block_q), tiles.resident

    def kernel(*refs):
        kinds_ref, out_ref = refs if table is not None else (None, *refs)
        out_ref[...] = jnp.zeros_like(out_ref)

        def step(start, rows, what):
            for band in what.bands:
                of_band = slice(rows.start + band.rows.start, rows.start + band.rows.stop)
                for begin, end, lower, upper, _ in band.cuts:
                    out_ref[of_band, pl.ds(start + begin, end - begin)] += 1 + 10 * lower + 100 * upper

        ids, nothing = launch.Ids(0, 0, pl.program_id(0), 0), lambda *_: None
        work = loops.Work(nothing, step, lambda start, rows, what, first: lambda: step(start, rows, what), nothing)
        loops.visit(problem, tiles, ids, 0, None if table is None else kinds_ref.at[0], work)

    with interpreted():
        return np.asarray(
            pl.pallas_call(
                kernel,
                grid=(num_q,),
                in_specs=[] if table is None else [pl.BlockSpec((1, 1, tiles.tiles_resident + 2), lambda i: (i, 0, 0))],
                out_specs=pl.BlockSpec((tiles.block_q, kv_len), lambda i: (i, 0)),
                out_shape=jax.ShapeDtypeStruct((num_q * tiles.block_q, kv_len), jnp.int32),
            )(*([] if table is None else [table]))
        )


def problem_of(rule, q_len):
    problem = dataclasses.replace(api.prepare(**BY_NAME["full"].build()[0]).problem, q_len=q_len, kv_len=rule.kv_len)
    return dataclasses.replace(problem, mask=problem.mask._replace(rule=rule))


TILES = {
    "loops": Tiles(64, 32, 320, pieces=0),
    "unrolled": Tiles(32, 32, 320, unroll=3, pieces=0),
    "one_piece": Tiles(64, 32, 320),
    "pieces": Tiles(64, 32, 320, unroll=2, pieces=4),
    "wide": Tiles(32, 160, 320, pieces=2),
    "bands": Tiles(64, 32, 320, pieces=2, band=8),
}


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("rule", [*RULES, RowRule(300, left=40, right=0), RowRule(300, left=150, right=0)], ids=str)
def test_every_visible_score_is_visited_once_and_no_hidden_one_without_the_mask(rule, tiles):
    got = visits(problem_of(rule, 270), tiles)[:270]
    lo, hi = (np.asarray(x)[:, None] for x in rule(jnp.arange(270)))
    kv = np.arange(320)
    seen = (lo <= kv) & (kv < hi)
    visited, lower, upper = got % 10, got // 10 % 10, got // 100
    assert (visited[seen] == 1).all()
    assert (visited <= 1).all()
    hidden = (visited == 0) | ((kv < lo) & (lower == 1)) | ((kv >= hi) & (upper == 1))
    assert hidden[~seen].all()


def test_an_edge_visits_fewer_scores_than_whole_tiles():
    """Row n of 256 sees n + 1 keys: pieces of 16 rows visit 4 of 4, 3 of 4 ... 1 of 4 parts of the square that a tile of 64 visits."""
    problem = problem_of(RowRule(256, right=0), 256)
    whole, pieces = (visits(problem, Tiles(64, 64, 256, pieces=n)) for n in (0, 4))
    assert (whole > 0).sum() == 10 * 64 * 64
    seen = lambda end: (edge.Cut(0, end, lower=False, upper=False, others=False),) if end else ()
    cut = lambda begin: (edge.Cut(begin, begin + 16, lower=False, upper=True, others=False),)
    steps = tuple(edge.Step(n + 16, (edge.Band(slice(0, 16), seen(n) + cut(n)),)) for n in (0, 16, 32, 48))
    assert edge.edge(problem.mask.rule, 256, Tiles(64, 16, 256, pieces=4)) == edge.Edge(steps, alone=False)
    bands = tuple(edge.Band(slice(n, n + 16), seen(n) + cut(n)) for n in (0, 16, 32, 48))
    in_bands = Tiles(64, 16, 256, pieces=1, band=16)
    assert edge.edge(problem.mask.rule, 256, in_bands) == edge.Edge((edge.Step(64, bands),), alone=False)
    np.testing.assert_array_equal(visits(problem, in_bands), visits(problem, Tiles(64, 16, 256, pieces=4)))
    assert (visits(problem, Tiles(64, 16, 256, pieces=4)) > 0).sum() == 6 * 64 * 64 + 4 * 10 * 16 * 16
    assert (pieces > 0).sum() == 10 * 64 * 64  # 64 keys are the least that a step of this tiling takes


def test_a_narrow_band_is_one_step_a_piece():
    rule = RowRule(256, left=31, right=0)
    tiles = Tiles(64, 32, 256, pieces=2)
    at_edge = edge.edge(rule, 256, tiles)
    left, right = edge.Cut(0, 32, lower=True, upper=False, others=False), edge.Cut(32, 64, lower=False, upper=True, others=False)
    step = edge.Step(64, (edge.Band(slice(0, 32), (left, right)),))
    assert at_edge.alone
    assert at_edge.steps == (step, step)
    got = visits(problem_of(rule, 256), tiles)
    assert (got > 0).sum() == 256 * 64 - 32 * 32  # the first rows have fewer keys before them
    assert (got == 11).sum() == (256 - 32) * 32
    assert edge.edge(rule, 256, dataclasses.replace(tiles, resident=128)) is None
    only_the_first = edge.edge(RowRule(512, left=127, right=0), 512, Tiles(128, 64, 512, pieces=4))  # rows 128 and on see key 1 and on
    assert (only_the_first.alone, only_the_first.turn) == (True, 1)


def test_tiles_of_packed_sequences_are_skipped():
    request = api.prepare(**BY_NAME["packed"].build()[0])
    tiles = Tiles(16, 16, 80)
    table = kinds.kinds(request.problem, tiles, request.operands)
    assert table.shape == (2, 1, 5, 1, 7)
    by_tile = visits(request.problem, tiles, table[0, 0]).reshape(5, 16, 5, 16).max((1, 3))
    starts = np.searchsorted([0, 20, 21, 50, 64], np.arange(80), side="right")  # sequences of the first batch entry, and its padding
    visible = (starts[:, None] == starts) & np.tri(80, dtype=bool)
    visible[70:], visible[:, 70:] = False, False
    np.testing.assert_array_equal(by_tile > 0, visible.reshape(5, 16, 5, 16).any((1, 3)))


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


def test_rows_past_the_end_pass_nothing_on(kernels):
    """By the causal rule they see the last keys, which no row does, in tiles of whole rows, whose probabilities are made anew."""
    random = np.random.default_rng(0)
    query, key, value, dout = (jnp.asarray(random.standard_normal((1, n, 1, 16)), jnp.float32) for n in (70, 100, 100, 70))
    bias = jnp.asarray(random.standard_normal((1, 1, 1, 100)), jnp.float32)

    def gradients(poison):
        k, v = (x.at[:, 70:].set(poison) for x in (key, value))
        attend = lambda k, v, bias: attention(None, None)(query=query, key=k, value=v, bias=bias, is_causal=True)[0]
        return jax.jit(lambda k, v, bias: jax.vjp(attend, k, v, bias)[1](dout))(k, v, bias)

    expected = gradients(0)
    assert all(jnp.isfinite(x).all() for x in expected)
    jax.tree.map(np.testing.assert_array_equal, gradients(jnp.nan), expected)


def test_a_value_that_is_seen_and_not_finite_reaches_the_rows_that_see_it(kernels):
    """Their out is infinite, or NaN of both infinities, and their gradients are NaN; lse, and all other rows, are what they were."""
    arguments, dout, _ = BY_NAME["packed"].build()
    value = arguments["value"]  # of the second sequence, rows 20 to 49, with the causal mask
    infinite = value.at[0, 25, 0].set(jnp.inf).at[0, 30, 0].set(-jnp.inf).at[0, 26, 1, 2].set(-jnp.inf).at[0, 27, 1, 3].set(jnp.nan)

    @jax.jit
    def run(value):
        attend = lambda q: attention(WHOLE, None)(**(arguments | {"query": q, "value": value}))
        out, pullback, lse = jax.vjp(attend, arguments["query"], has_aux=True)
        return out, lse, pullback(dout)[0]

    (out, lse, dq), expected = run(infinite), run(value)
    want = np.array(expected[0])
    want[0, 25:50, 0] = np.inf
    want[0, 30:50, 0] = np.nan
    want[0, 26:50, 1, 2] = -np.inf
    want[0, 27:50, 1, 3] = np.nan
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, expected[1])
    finite = np.isfinite(want).all(-1)
    np.testing.assert_array_equal(np.isfinite(dq).all(-1), finite)
    np.testing.assert_array_equal(dq[finite], expected[2][finite])


def test_steps_without_a_table_look_at_labels_and_the_gradient_of_a_bias_at_the_table(kernels):
    random = jax.random.split(jax.random.key(0), 6)
    query, key, value, dout = (jax.random.normal(r, (1, 128, 1, 16)) for r in random[:4])
    bias, labels = jax.random.normal(random[4], (1, 1, 128, 128)), jnp.sort(jax.random.randint(random[5], (1, 128), 0, 4))
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "local_window_size": (31, 0)}
    arguments |= {"q_segment_ids": labels, "kv_segment_ids": labels}
    tiles = Tiles(64, 32, 128, pieces=2, band=16)
    at_edge = edge.edge_of(api.prepare(**arguments).problem, tiles)
    assert (at_edge.alone, at_edge.turn) == (True, 1)
    dlse = jnp.ones((1, 128, 1))
    got = value_and_gradients(attention(tpu.Config(tiles, tiles, 2**26), None), arguments, dout, dlse)
    xla = functools.partial(flash_attention, implementation="xla", return_residual=True)
    close(got, value_and_gradients(xla, arguments, dout, dlse))


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


def test_grids_let_two_cores_work(monkeypatch):
    """Each core of a chip with two has its share of the parallel axes: batch, heads and q tiles; in the backward batch and kv heads."""
    seen = {}
    original = pltpu.CompilerParams

    def recorded(**params):
        seen[len(seen)] = params["dimension_semantics"]
        return original(**params)

    monkeypatch.setattr(pltpu, "CompilerParams", recorded)
    x, kv = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    loss = lambda q, k, v: attention(None, None)(query=q, key=k, value=v, is_causal=True)[0].astype(jnp.float32).sum()
    jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, kv, kv).lower(lowering_platforms=("tpu",))
    forward, backward = ("parallel",) * 3 + ("arbitrary",), ("parallel",) * 2 + ("arbitrary",) * 2
    assert set(seen.values()) == {forward, backward}


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


def run_with_race_detection(*wanted):
    """Forward and backward of a grouped problem, its heads sharing a bias if any, on two cores; memory that nobody wrote is NaN."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    arguments, dout, dlse = BY_NAME["gqa"].build()
    first = {n: arguments[n][:1, :, :heads] for n, heads in (("query", 3), ("key", 1), ("value", 1))}
    bias = {"bias": jnp.zeros((1, 1, 70, 70))} if "bias" in wanted else {}
    request = api.prepare(**first, **bias, is_causal=True)

    @jax.jit
    def run(operands, dout, dlse):
        out, lse = tpu.BACKEND.forward(request.problem, WHOLE, operands)
        return out, lse, tpu.BACKEND.backward(request.problem, WHOLE, operands, out, lse, dout, dlse, wanted)

    with interpreted(params):
        got = jax.block_until_ready(run(request.operands, dout[:1, :, :3], dlse[:1, :, :3]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def test_no_races():
    run_with_race_detection("query", "key", "value", "bias")
    assert not races_found()


@pytest.mark.parametrize(("kernel", "wanted"), [("backward", ("query", "key", "value")), ("dbias", ("bias",))])
def test_a_planted_race_is_found(kernel, wanted, monkeypatch):
    """The loops over the rows of a group called parallel: two cores then add to the same dk and dv. The heads', of a bias: to dbias."""
    module = importlib.import_module(f"flash_jax.backends.tpu.{kernel}")  # the package's own `backward` is the function
    monkeypatch.setattr(module, "Grid", lambda sizes, ids, parallel: launch.Grid(sizes, ids, parallel=len(sizes)))
    try:
        run_with_race_detection(*wanted)
        found = races_found()
    except Exception as error:
        found = "race" in str(error).lower()
        pltpu.reset_tpu_interpret_mode_state()
    assert found
