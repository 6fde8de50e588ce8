"""The Hopper kernels without a Hopper: interpreted with race detection, and lowered. On a card: `pytest --device`."""

import dataclasses
import functools
import itertools
import re
from unittest import mock

import jax
import numpy as np
import pytest
from cases import BY_NAME, Case
from hopper_interpret import gradients_one_by_one, interpreted
from oracle import of_case
from tolerance import assert_as_exact_as_unfused

from flash_jax import Mask, api, reference, schedule
from flash_jax.backends import hopper
from flash_jax.backends.base import Device
from flash_jax.backends.hopper import forward, functions, host, launch, soft_cap, work
from flash_jax.backends.hopper.forward_tile import Config
from flash_jax.problem import DIFFERENTIABLE

H200 = Device("gpu", "NVIDIA H200")
SHORT = ["everything"]  # in every run; the rest with --slow
LONG = [
    "full",
    "window",
    "both_lengths_causal",
    "packed",
    "scattered_labels",
    "dense_heads",
    "bias_keys",
    "gqa",
    "v_head_dim",
    "one_row",
    "dropout",
    "soft_cap",
    "soft_cap_above",
]


@functools.cache
def in_bfloat16(name):
    """The case without sinks, which are not the kernels' business."""
    case = BY_NAME[name]
    options = lambda _, random: {n: x for n, x in case.options(case, random).items() if n != "sinks"}
    return dataclasses.replace(case, dtype="bfloat16", options=options)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_interpreted(name):
    arguments, dout, dlse, unfused, expected = of_case(in_bfloat16(name))
    request = api.prepare(**arguments)
    problem, operands = request.problem, request.operands
    assert hopper.BACKEND.why_not(problem, H200) is None
    wanted = tuple(n for n in DIFFERENTIABLE if getattr(operands, n) is not None)
    config, _ = hopper.BACKEND.default_config(problem, H200)

    with interpreted():
        out, lse = jax.block_until_ready(jax.jit(lambda: hopper.BACKEND.forward(problem, config, operands))())
        residuals = out, lse, dout.reshape(out.shape).astype(out.dtype), dlse.reshape(lse.shape)
        gradients = gradients_one_by_one(functools.partial(hopper.BACKEND.backward, problem, config, operands), residuals, wanted)
    got = {"out": out, "lse": lse} | {f"d{n}": x for n, x in gradients.items()}
    for part, x in got.items():
        x = np.asarray(x.astype(np.float32)).reshape(expected[part].shape)
        assert_as_exact_as_unfused(f"{name}: {part}", x, unfused[part], expected[part], np.float32 if part == "lse" else problem.dtype)


def test_tanh_of_a_soft_cap():
    """What a kernel computes where no score is above the cap, and what it computes elsewhere."""
    below, beyond = (np.linspace(-limit, limit, 20001, dtype=np.float32) for limit in (1, 20))
    largest = lambda tanh, x: np.abs(np.asarray(tanh(jax.numpy.asarray(x)), np.float64) - np.tanh(x.astype(np.float64))).max()
    assert largest(soft_cap._polynomial, below) <= 4e-7
    assert largest(soft_cap.tanh_by_exponential, beyond) <= 3e-7


def test_work_is_dealt_once_and_evenly():
    steps = np.arange(1, 33)
    table = work.deal(steps, batch=2, num_heads=4, bytes_per_head=2**20, num_multiprocessors=7)
    tiles = [tuple(entry) for entry in table.reshape(-1, 3) if entry[0] >= 0]
    assert sorted(tiles) == [(b, h, q) for b in range(2) for h in range(4) for q in range(32)]
    load = [sum(steps[entry[2]] for entry in entries if entry[0] >= 0) for entries in table]
    assert max(load) <= 1.05 * sum(load) / 7


def test_equal_tiles_go_through_few_heads_at_a_time():
    """8 MiB of keys and values; where tiles are unequal, 32."""
    section_of = lambda steps, heads: work.deal(steps, 1, 8, bytes_per_head=4 * 2**20, num_multiprocessors=3)[..., 1] // heads
    assert (np.diff(section_of(np.full(6, 4), 2)) >= 0).all()
    assert (np.diff(section_of(np.arange(1, 7), 2)) < 0).any()


@pytest.mark.parametrize("shared", [(2, 3), (2, 1), (1, 3), (1, 1)], ids=str)
def test_work_is_dealt_by_data_once_and_evenly(shared):
    steps = np.random.default_rng(0).integers(1, 40, (*shared, 17))
    b, head, q_tile, counts = (np.asarray(x) for x in work.deal_by_data(jax.numpy.asarray(steps), 2, 3, 5))
    lists = [list(zip(*(x[n, : counts[n]].tolist() for x in (b, head, q_tile)), strict=True)) for n in range(5)]
    assert sorted(itertools.chain(*lists)) == [(i, j, k) for i in range(2) for j in range(3) for k in range(17)]
    by_tile = np.broadcast_to(steps, (2, 3, 17))
    load = [sum(by_tile[tile] for tile in tiles) for tiles in lists]
    assert max(load) <= 1.1 * by_tile.sum() / 5


def test_a_last_round_that_is_not_whole_goes_to_the_shortest_lists():
    _, _, q_tile, counts = (np.asarray(x) for x in work.deal_by_data(jax.numpy.arange(1, 65)[None, None], 2, 16, 132))
    load = [(q_tile[n, : counts[n]] + 1).sum() for n in range(132)]
    assert max(load) <= 1.002 * sum(load) / 132


@pytest.mark.parametrize("lse", [-np.inf, -2.3e38, -1e30, -1e10, 0, 5, 3.33e9, 1e30])
def test_parts_of_equal_lse_weigh_alike(lse):
    """A finite bias can make an lse of that size on a whole row."""
    out = jax.numpy.arange(4.0)[:, None, None, None, None] * jax.numpy.ones((4, 1, 1, 1, 8))
    merged, together = jax.jit(launch._merge)(out, jax.numpy.full((4, 1, 1, 1), lse, "float32"))
    np.testing.assert_allclose(merged, 0 if lse == -np.inf else 1.5)
    np.testing.assert_allclose(together, lse + np.log(4), rtol=3e-7)


@pytest.mark.parametrize("steps", [1, 2, 5, 64, 1000])
@pytest.mark.parametrize("tiles", [1, 8, 131, 132, 133, 256, 5000])
def test_splits_keep_the_card_busy_and_no_part_empty(tiles, steps):
    parts = work.splits(tiles, steps, 132)
    length = -(-steps // parts)
    assert (parts - 1) * length < steps <= parts * length
    assert -(-tiles * parts // 132) * length <= -(-tiles // 132) * steps
    assert parts == 1 or tiles < 132 * 2


def segments_without_rows():
    """Three keys of each batch entry are seen by no row: labels that no row has, past the length, before every row."""
    ids = jax.numpy.array([[0] * 30 + [2] * 40, [1] * 70])
    unseen = ids.at[:, 33:36].set(1).at[1].set(7)
    return {"q_segment_ids": ids, "kv_segment_ids": unseen, "key_value_seq_lengths": jax.numpy.array([69, 70])}


ONES = jax.numpy.ones((2, 128), int)
POISONED = {
    "lengths": {"is_causal": True, "key_value_seq_lengths": jax.numpy.array([13, 0])},
    "offset": {"is_causal": True, "q_offset": -9},
    "labels": segments_without_rows(),
    "keys": {"mask": jax.numpy.arange(70)[None, None, None] % 5 > 0},
    "a label that only rows past the end have": {"q_segment_ids": ONES[:, :70], "kv_segment_ids": ONES.at[:, 33:36].set(0)},
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "label" in name else pytest.mark.slow) for name in POISONED])
def test_what_stands_in_unseen_keys_reaches_nothing(name):
    random = np.random.default_rng(0)
    kv_len = 128 if "past the end" in name else 70
    arrays = [jax.numpy.asarray(random.standard_normal((2, length, 2, 64)), "bfloat16") for length in (70, kv_len, kv_len)]
    request = api.prepare(*arrays, **POISONED[name])
    seen = np.asarray(reference.visible_scores(request.problem, request.operands)).any((1, 2))
    assert not seen.all()
    config, _ = hopper.BACKEND.default_config(request.problem, H200)

    @jax.jit
    def run(operands):
        return hopper.BACKEND.forward(request.problem, config, operands)

    with interpreted():
        spoil = lambda x: jax.numpy.where(seen[:, :, None, None], x, jax.numpy.nan)
        expected = run(request.operands)
        got = run(request.operands._replace(key=spoil(arrays[1]), value=spoil(arrays[2])))
        jax.tree.map(np.testing.assert_array_equal, got, expected)
        assert all(np.isfinite(x.astype(np.float32)).all() for x in expected[:1])


@pytest.mark.parametrize("name", ["full", "window_past_the_keys", "both_lengths_causal", "packed", "scattered_labels", "causal_fewer_rows"])
@pytest.mark.parametrize("block_kv", [8, 64])
def test_tiles_that_are_not_marked_hold_seen_keys_only(name, block_kv):
    request = api.prepare(**BY_NAME[name].build()[0])
    problem = request.problem
    seen = np.asarray(reference.visible_scores(problem, request.operands)).any((1, 2))
    marked = host.unseen_tiles(problem, request.operands, block_kv)
    tiles = np.pad(~seen, [(0, 0), (0, -problem.kv_len % block_kv)]).reshape(len(seen), -1, block_kv).any(-1)
    marked = np.zeros_like(tiles) if marked is None else np.broadcast_to(np.asarray(marked) != 0, tiles.shape)
    assert not (tiles & ~marked).any()
    if name != "scattered_labels":
        np.testing.assert_array_equal(marked, tiles)


SIDES = {  # options of 700 rows and keys; which bounds the first step, those after it, and those after full ones ask for, in tiles of 64
    "causal": ({"is_causal": True}, ((False, True), None, None)),
    "window": ({"is_causal": True, "local_window_size": (199, 0)}, ((False, True), None, (True, False))),
    "narrow": ({"local_window_size": (20, 20)}, ((True, True), None, (True, True))),
    "wide": ({"local_window_size": (200, 200)}, ((False, True), (False, True), (True, False))),
    "chunks": ({"mask": Mask.chunked(130)}, ((True, True), (False, True), (True, True))),
    "past the keys": ({"is_causal": True, "local_window_size": (100, 0), "q_offset": 500}, ((True, True), None, (True, True))),
}


@pytest.mark.parametrize("name", SIDES)
def test_steps_ask_for_the_bounds_that_may_hide_something(name):
    options, expected = SIDES[name]
    ones = jax.numpy.ones((1, 700, 1, 16), "bfloat16")
    lo, hi = host.static_bounds(api.prepare(ones, ones, ones, **options).problem)
    ranges = schedule.interval_ranges(lo, hi, 64, 64)
    masked = launch._masked_steps(ranges, parts=1, clears=False)
    assert masked[:3] == expected
    for q_tile, (begin, full_begin, full_end, end) in enumerate(np.stack(ranges, -1)[0]):
        rows = slice(64 * q_tile, 64 * q_tile + 64)
        for kv_tile in range(begin, end):
            if full_begin <= kv_tile < full_end and kv_tile != end - 1:
                continue
            asked = masked.first if kv_tile == end - 1 else masked.before if kv_tile >= full_end else masked.after
            assert asked.lo or (lo[0, rows] <= 64 * kv_tile).all()
            assert asked.hi or (hi[0, rows] >= 64 * kv_tile + 64).all()


@pytest.mark.parametrize("name", ["packed", "scattered_labels"])
def test_what_is_not_noted_hides_nothing(name):
    request = api.prepare(**BY_NAME[name].build()[0])
    problem, mask = request.problem, request.operands.mask
    lo, hi = host.static_bounds(problem)
    keys = np.arange(problem.kv_len)
    by_bounds = (lo[..., None] <= keys) & (keys < hi[..., None])
    alike = np.asarray(mask.q_labels)[..., None] == np.asarray(mask.kv_labels)[:, None]
    noted = np.asarray(host.notes(problem, request.operands, 8, 8))
    for bit, x in ((host.BOUNDS, by_bounds), (host.LABELS, alike)):
        x = np.pad(x, [(0, 0), (0, -problem.q_len % 8), (0, 0)], constant_values=True)
        x = np.pad(x, [(0, 0), (0, 0), (0, -problem.kv_len % 8)], constant_values=bit == host.LABELS)  # bounds hide keys past the end
        hides = ~x.reshape(len(x), noted.shape[1], 8, noted.shape[2], 8).all((2, 4))
        assert not (hides & (noted & bit == 0)).any()
        assert (noted & bit == 0).any() or (name, bit) == ("scattered_labels", host.LABELS)


FORWARD_ONLY = ["function_over_captured", "function_with_operands", "two_segmentations", "blocks", "blocks_by_head"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [FORWARD_ONLY[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FORWARD_ONLY[1:])])
def test_forward_interpreted(name):
    arguments, _, _, unfused, expected = of_case(in_bfloat16(name))
    request = api.prepare(**arguments)
    problem = request.problem
    assert launch.declines(problem) is None
    config, _ = hopper.BACKEND.default_config(problem, H200)
    with interpreted():
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(problem, config, request.operands))()
    for part, x, dtype in (("out", out, problem.dtype), ("lse", lse, np.float32)):
        x = np.asarray(x.astype(np.float32)).reshape(expected[part].shape)
        assert_as_exact_as_unfused(part, x, unfused[part], expected[part], dtype)


@pytest.mark.parametrize("name", FORWARD_ONLY)
@pytest.mark.parametrize("tile", [(16, 8), (64, 64)], ids=str)
def test_kinds_of_tiles(name, tile):
    request = api.prepare(**BY_NAME[name].build()[0])
    problem, operands = functions.hoist(request.problem, request.operands)
    visible = np.asarray(reference.visible_scores(request.problem, request.operands))
    pad = lambda fill: np.pad(visible, [(0, 0), (0, 0), (0, -70 % tile[0]), (0, -70 % tile[1])], constant_values=fill)
    by_tile = lambda x: x.reshape(*x.shape[:2], x.shape[2] // tile[0], tile[0], x.shape[3] // tile[1], tile[1])
    some, every = by_tile(pad(False)).any((3, 5)), by_tile(pad(True)).all((3, 5))
    every[..., -1] = False  # a tile that reaches past the last key is partial
    kinds = np.broadcast_to(host.tile_kinds(problem, operands, *tile), some.shape)
    assert not ((kinds == schedule.EMPTY) & some).any()
    assert not ((kinds == schedule.FULL) & ~every).any()
    if name.startswith("blocks"):
        np.testing.assert_array_equal(kinds, np.where(some, np.where(every, schedule.FULL, schedule.PARTIAL), schedule.EMPTY))


def test_a_function_is_evaluated_on_a_tile():
    row, key = np.arange(-8, 8, dtype=np.int32)[:, None] * np.ones(5, np.int32), np.ones((16, 1), np.int32) * np.arange(5, dtype=np.int32)
    visible = lambda b, h, q, k, x: (jax.numpy.floor(q / 3) + jax.numpy.ceil(k / -2) < x) ^ (abs(q) // 2 % 3 == jax.numpy.clip(k, h, 3))
    ones = jax.numpy.ones((1, 70, 2, 16), "bfloat16")
    operand = jax.numpy.ones((1,))
    problem = api.prepare(ones, ones, ones, mask=Mask.from_function(visible, operand, per=("scalar",))).problem
    got = functions.evaluate(problem.mask.functions[0], row.shape, 0, 1, row, key, np.float32(0.5))
    np.testing.assert_array_equal(got, visible(0, 1, row, key, np.float32(0.5)))


def bias_with_extremes(dtype):
    """A row whose logits are all the lowest finite number, which weighs its keys alike, and one that sees nothing."""

    def options(case, random):
        bias = jax.numpy.asarray(random.standard_normal((1, case.num_heads, case.q_len, case.kv_len)), dtype)
        return {"bias": bias.at[:, :, 3].set(jax.numpy.finfo(dtype).min).at[:, :, 4].set(-np.inf)}

    return options


@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_tiles_of_a_bias(dtype):
    """Through shared memory, which the wider dtype shares with what leaves."""
    sizes = {"q_len": 70, "kv_len": 270, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    arguments, _, _, unfused, expected = of_case(Case("bias", bias_with_extremes(dtype), batch=(1,), **sizes))
    request = api.prepare(**arguments)
    config = Config(2, 128)
    with interpreted(), mock.patch.object(forward, "_with_room_for_bias", wraps=forward._with_room_for_bias) as room:
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(request.problem, config, request.operands))()
        roomy = forward._with_room_for_bias(*room.call_args.args)
    assert roomy == dataclasses.replace(config, separate_out=dtype == "bfloat16")
    lse = np.asarray(lse)
    assert (lse[:, 4] == -np.inf).all()
    assert np.isfinite(lse[:, 3]).all()
    assert_as_exact_as_unfused("out", np.asarray(out.astype(np.float32)), unfused["out"], expected["out"], request.problem.dtype)
    in_range = lambda x: np.delete(x, 3, axis=1)  # in base 2 the lse of row 3 is beyond float32, and cut off there
    assert_as_exact_as_unfused("lse", in_range(lse), in_range(unfused["lse"]), in_range(expected["lse"]), np.float32)


DECODING = {"q_len": 1, "kv_len": 1100, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
SHORT_QUERIES = {
    "one row, keys split": Case("decode", lambda *_: {"is_causal": True, "q_offset": 1090}, **DECODING),
    "lengths, one of them 0": Case("decode", lambda *_: {"key_value_seq_lengths": jax.numpy.array([540, 0])}, **DECODING),
    "rows of a group": Case(
        "rows",
        lambda _, r: {
            "bias": jax.numpy.asarray(r.standard_normal((1, 8, 1, 1100), np.float32)),
            "mask": jax.numpy.asarray(r.random((2, 1, 5, 1100)) < 0.7),
            "local_window_size": (200, None),
            "q_offset": jax.numpy.array([1050, 1097]),
            "dropout_rate": 0.2,
            "dropout_key": jax.random.key(1),
        },
        **DECODING | {"q_len": 5},
    ),
    "one row, one mask of dropout for all heads": Case(
        "dropout", lambda *_: {"dropout_rate": 0.5, "dropout_key": jax.random.key(1), "broadcast_dropout": True}, **DECODING
    ),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in list(SHORT_QUERIES)[:2]), *list(SHORT_QUERIES)[2:]]
)
def test_short_queries(name):
    arguments, _, _, unfused, expected = of_case(SHORT_QUERIES[name])
    request = api.prepare(**arguments)
    config, _ = hopper.BACKEND.default_config(request.problem, H200)
    assert config.warpgroups == 1
    with interpreted(multiprocessors=16), mock.patch.object(work, "splits", wraps=work.splits) as splits:
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(request.problem, config, request.operands))()
    assert splits.call_args.args[0] == 4, "a batch entry and key head is one tile"
    assert work.splits(*splits.call_args.args) > 1
    for part, x, dtype in (("out", out, request.problem.dtype), ("lse", lse, np.float32)):
        assert_as_exact_as_unfused(part, np.asarray(x.astype(np.float32)), unfused[part], expected[part], dtype)


BEYOND_LIMITS = {
    "heads past a grid axis": ((3000, 64, 32, 64), 1),
    "more than 2^31 elements": ((8, 65536, 64, 128), 0),
}


@pytest.mark.parametrize("name", BEYOND_LIMITS)
def test_large_shapes_lower_without_being_allocated(name):
    """The forward has one block of threads a multiprocessor, whatever the shape; the table has every tile once."""
    shape, causal = BEYOND_LIMITS[name]
    x = jax.ShapeDtypeStruct(shape, "bfloat16")
    tables = []

    def run(q, k, v):
        request = api.prepare(q, k, v, is_causal=bool(causal))
        config, _ = hopper.BACKEND.default_config(request.problem, H200)
        tables.append((request.problem, config))
        return launch.out_and_lse(request.problem, config, request.operands)

    with mock.patch.object(work, "deal", wraps=work.deal) as deal:
        text = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 1
    (problem, config), (steps, *sizes) = tables[0], deal.call_args.args
    assert problem.batch * problem.num_heads > 65535 or x.size > 2**31
    entries = work.deal(steps, *sizes)
    assert len(entries) == launch.MULTIPROCESSORS
    assert (entries[..., 0] >= 0).sum() == problem.batch * problem.num_heads * -(-problem.q_len // config.block_q)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
def test_lowers_for_a_gpu(head_dim, x64):
    with jax.enable_x64(x64):
        lower_for_a_gpu(head_dim)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 128), (64, 256), (96, 256), (128, 4096)])
def test_one_tile_of_queries_lowers_for_a_gpu(q_len, kv_len, head_dim):
    """The backward fills its second slot only if there is a second step; the place of that step's rows is not in the arrays."""
    lower_for_a_gpu(head_dim, q_len, kv_len, is_causal=False)


@pytest.mark.parametrize(
    ("head_dim", "options"), [(192, {}), (128, {"q_segment_ids": np.zeros((1, 128), np.int32)})], ids=["192", "labels"]
)
def test_rows_whose_keys_could_be_divided_fit_in_shared_memory(head_dim, options):
    """Parts are float32: twice the room that out takes."""
    options = options | {n.replace("q_", "kv_"): np.zeros((1, 4096), np.int32) for n in options}
    request = api.prepare(*(np.zeros((1, n, 1, head_dim), np.float16) for n in (128, 4096, 4096)), **options)
    config, _ = hopper.BACKEND.default_config(request.problem, H200)
    run = functools.partial(hopper.BACKEND.forward, request.problem, config)
    jax.jit(run).trace(request.operands).lower(lowering_platforms=("cuda",))


def lower_for_a_gpu(head_dim, q_len=300, kv_len=300, is_causal=True):
    x, kv = (jax.ShapeDtypeStruct((1, n, 4, head_dim), "bfloat16") for n in (q_len, kv_len))
    problem = api.prepare(*(np.zeros(y.shape, y.dtype) for y in (x, kv, kv)), is_causal=is_causal).problem
    config, _ = hopper.BACKEND.default_config(problem, H200)

    def run(q, k, v):
        operands = api.prepare(q, k, v, is_causal=is_causal).operands
        out, lse = hopper.BACKEND.forward(problem, config, operands)
        return hopper.BACKEND.backward(problem, config, operands, out, lse, out, lse, ("query", "key", "value"))

    compiled_apart = []  # what is known before tracing is NumPy's: each operation of jax.numpy would be compiled, one after the other
    listener = lambda event, _, **__: compiled_apart.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        text = jax.jit(run).trace(x, kv, kv).lower(lowering_platforms=("cuda",)).as_text()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert text.count("mosaic_gpu") >= 2
    assert not compiled_apart


@pytest.mark.parametrize(("head_dim", "bias_dtype"), [(64, "bfloat16"), (64, "float32"), (128, "float32"), (256, "float32")])
def test_all_features_together_fit_in_shared_memory(head_dim, bias_dtype):
    """Mosaic counts the bytes when it lowers."""
    case = dataclasses.replace(in_bfloat16("everything"), head_dim=head_dim)
    arguments = case.build()[0]
    request = api.prepare(**arguments | {"bias": arguments["bias"].astype(bias_dtype)})
    problem = request.problem
    assert 1 not in problem.bias_shape[2:]
    assert problem.mask.has_labels
    config, _ = hopper.BACKEND.default_config(problem, H200)

    def run(operands, out, lse):
        forward = hopper.BACKEND.forward(problem, config, operands)
        return forward, hopper.BACKEND.backward(problem, config, operands, out, lse, out, lse, ("query", "bias"))

    out = jax.ShapeDtypeStruct(problem.out_shape, problem.dtype)
    lse = jax.ShapeDtypeStruct(problem.lse_shape, np.float32)
    jax.jit(run).trace(request.operands, out, lse).lower(lowering_platforms=("cuda",))


def test_a_float64_bias_has_a_float64_gradient():
    with jax.enable_x64(True):
        q = np.zeros((1, 130, 2, 64), np.float16)
        request = api.prepare(q, q, q, bias=np.zeros((1, 2, 130, 130)))
        config, _ = hopper.BACKEND.default_config(request.problem, H200)
        lse = jax.ShapeDtypeStruct((1, 130, 2), np.float32)
        run = lambda operands, out, lse: hopper.BACKEND.backward(request.problem, config, operands, out, lse, out, lse, ("bias",))
        lowered = jax.jit(run).trace(request.operands, q, lse).lower(lowering_platforms=("cuda",))
        gradient = lowered.out_info["bias"]
        assert (gradient.shape, gradient.dtype) == ((1, 2, 130, 130), np.float64)
        assert not re.search(r"stablehlo\.(case|if|while)", lowered.as_text()), "the host would wait for the card"


def test_declines_name_what_came():
    def case(dtype=np.float16, **options):
        return api.prepare(*(np.zeros((1, 8, 1, 64), dtype) for _ in range(3)), **options).problem

    reasons = {
        "must be bfloat16 or float16, got float32": case(dtype=np.float32),
        "got (8, 8)": case(block_sizes=(8, 8)),
    }
    for text, problem in reasons.items():
        assert text in hopper.BACKEND.why_not(problem, H200)
    assert "got cpu" in hopper.BACKEND.why_not(case(), Device("cpu", "cpu"))
