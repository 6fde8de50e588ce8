"""The benchmark: a wrong result has no speed, peers compute the same, results are written and compared."""

import copy
import dataclasses
import functools
import json
import re
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from flash_jax.bench import compiled, kernels, progress, report, timing, turns
from flash_jax.bench import measure as measuring
from flash_jax.bench.__main__ import main
from flash_jax.bench.accuracy import NAMES, Reference
from flash_jax.bench.presets import PRESETS
from flash_jax.bench.rows import BLOCK, DIFFERENTIATED, Row, equal_segments
from flash_jax.bench.sides import SIDES, default_sides

SMALL = Row(1, 256, 2, 32, dtype="float32", is_causal=True)


def results_of(attention, arrays):
    def run(arrays):
        given = {name: x for name, x in arrays.items() if name != "dout"}
        wanted = {name: x for name, x in given.items() if name in DIFFERENTIATED}
        out, pullback = jax.vjp(lambda wanted: attention({**given, **wanted}), wanted)
        return {"out": out, **pullback(arrays["dout"])[0]}

    return jax.jit(run)(arrays)


def reference_of(row, arrays):
    reference = Reference(row)
    reference.expect(arrays)
    return reference


@functools.cache
def checked(dtype):
    row = Row(2, 256, 4, 64, 2, dtype=dtype, is_causal=True, bias=True)
    arrays = row.draw()
    return reference_of(row, arrays), results_of(SIDES["flash_jax"](row), arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_results_are_allowed(dtype):
    reference, results = checked(dtype)
    errors, reason = reference.check(results)
    assert reason is None
    assert set(errors) == {"out", "dq", "dk", "dv", "dbias"}
    assert 0 < max(errors.values()) < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", list(NAMES))
def test_an_error_of_one_percent_is_refused(wrong, dtype):
    reference, results = checked(dtype)
    results = {name: np.asarray(x, np.float32) for name, x in results.items()}
    x, noise = results[wrong], np.random.default_rng(0).standard_normal(results[wrong].shape)
    refused = lambda x: reference.check(results | {wrong: x})[1]
    assert refused(x * np.float32(1.01)).startswith(f"{NAMES[wrong]}: ")
    assert refused(x + 0.02 * x.std() * noise).startswith(f"{NAMES[wrong]}: relative error")
    assert refused(np.where(np.arange(x.shape[-1]) == 3, np.nan, x)).startswith(f"{NAMES[wrong]}: ")


def test_a_refused_side_is_not_timed():
    def wrong(row):
        return lambda arrays: 1.01 * SIDES["jax.nn"](row)(arrays)

    def unable(row):
        def attention(arrays):
            raise NotImplementedError("no such attention")

        return attention

    sides = {"flash_jax": SIDES["jax.nn"], "flash_jax:xla": wrong, "unable": unable, "jax.nn": SIDES["jax.nn"]}
    record = measuring.measure(compiled.start([SMALL], sides)[0], 0.1)
    assert record["sides"]["flash_jax:xla"]["refused"].startswith("out: ")
    assert record["sides"]["unable"] == {"refused": "NotImplementedError: no such attention"}
    assert not {"forward", "backward"} & set(record["sides"]["flash_jax:xla"])
    for name in ("flash_jax", "jax.nn"):
        for phase in ("forward", "backward"):
            side = record["sides"][name][phase]
            assert len(side["seconds"]) >= 5
            assert 0 < side["p10"] <= side["median"] <= side["p90"]
            assert side["memory"] > 0
            assert side["kernels"] is None, "which only a GPU's profile has"
            assert set(side["over"]) == {"flash_jax", "jax.nn"} - {name}
    assert record["sides"]["flash_jax"]["residuals"] >= 3 * 256 * 2 * 32 * 4, "query, key and value at least"
    assert record["sides"]["flash_jax"]["runs"].startswith("xla with Config(")
    assert measuring.refusals({"rows": [record]}) == [f"{SMALL.name}: flash_jax:xla: {record['sides']['flash_jax:xla']['refused']}"]
    text = report.markdown({"preset": "x", "provenance": timing.provenance(), "rows": [record]})
    assert f"| {SMALL.name} | flash_jax:xla | refused: out: " in text


@pytest.mark.parametrize(
    "row",
    [
        Row(2, 100, 4, 16, 2, kv_len=70, dtype="float32", is_causal=True, window=(80, 0)),
        Row(2, 130, 2, 16, dtype="float32", segments=(30, 40, 10, 50)),
        Row(2, 4 * BLOCK, 2, 16, dtype="float32", density=0.5),
        Row(2, 65, 2, 16, dtype="float32", bias=True),
    ],
    ids=lambda row: row.name,
)
def test_peers_are_asked_the_same(row):
    arrays = row.draw()
    ours, theirs = (results_of(SIDES[name](row), arrays) for name in ("flash_jax", "jax.nn"))
    reference = reference_of(row, arrays)
    assert reference.check(ours)[1] is None
    assert reference.check(theirs)[1] is None


def test_dropout_is_checked_with_its_own_bits():
    row = Row(2, 100, 2, 16, dtype="float32", dropout=0.3)
    arrays = row.draw()
    reference = reference_of(row, arrays)
    assert reference.check(results_of(SIDES["flash_jax"](row), arrays))[1] is None
    undropped = results_of(SIDES["flash_jax"](dataclasses.replace(row, dropout=0.0)), arrays)
    assert "relative error" in reference.check(undropped)[1]
    with pytest.raises(NotImplementedError, match="no dropout"):
        SIDES["jax.nn"](row)(arrays)


@pytest.mark.parametrize("is_causal", [False, True])
def test_standard_attention_with_dropout_is_asked_the_same(is_causal):
    row = Row(2, 100, 2, 16, dtype="float32", is_causal=is_causal, dropout=0.3)
    arrays = row.draw()
    assert reference_of(row, arrays).check(results_of(SIDES["standard"](row), arrays))[1] is None
    assert "standard" in default_sides([row])
    plain = dataclasses.replace(row, dropout=0.0)
    assert "standard" not in default_sides([plain])
    with pytest.raises(NotImplementedError, match=r"without dropout it is jax\.nn"):
        SIDES["standard"](plain)


def test_an_error_in_short():
    assert measuring.in_short(ValueError("first\nsecond")) == "ValueError: first"
    assert measuring.in_short(MemoryError()) == "MemoryError: "


def test_decoding_has_no_backward():
    record = measuring.measure(compiled.start([Row(2, 1, 4, 16, 2, kv_len=64, dtype="float32")], {"flash_jax": SIDES["flash_jax"]})[0], 0.1)
    side = record["sides"]["flash_jax"]
    assert "backward" not in side
    assert side["forward"]["median"] > 0
    assert set(side["errors"]) == {"out"}


def test_peers_decline_what_they_lack():
    for name in ("fa3", "fa4"):
        with pytest.raises(NotImplementedError, match="no bias"):
            SIDES[name](Row(1, 64, 2, 16, bias=True))
        with pytest.raises(ModuleNotFoundError):
            SIDES[name](Row(1, 64, 2, 16))(Row(1, 64, 2, 16).draw())


def test_block_patterns_have_their_density():
    for density in (1.0, 0.5, 0.25, 0.125):
        blocks = Row(1, 16 * BLOCK, 1, 8, density=density).blocks
        assert (blocks.sum(1) == 16 * density).all()
        assert blocks.diagonal().all()


def test_products_by_hand():
    """4 N^2 d a head; half of it causal; a window of 4 keys; the sequences' own squares when packed."""
    assert Row(2, 8, 3, 16).products == 4 * 2 * 3 * 64 * 16
    assert Row(2, 8, 3, 16, is_causal=True).products == 2 * 2 * 3 * 64 * 16
    assert Row(1, 8, 1, 16, window=(2, 1)).products == 4 * 8 * 4 * 16
    assert Row(1, 8, 1, 16, segments=(5, 3)).products == 4 * (25 + 9) * 16
    assert Row(1, 1, 1, 16, kv_len=8).products == 4 * 8 * 16


def test_packed_sequences_fill_the_length():
    assert equal_segments(10, 4) == (2, 3, 2, 3)
    for make in PRESETS.values():
        assert all(sum(row.segments) in (0, row.length) for row in make())
    assert list(Row(1, 8, 1, 8, segments=(5, 3)).starts) == [0, 5, 8]


def test_names_tell_rows_apart():
    for make in PRESETS.values():
        names = [row.name for row in make()]
        assert len(set(names)) == len(names) > 1


def test_interleaving():
    calls = []
    sides = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = timing.interleave(sides, rounds=4, calls=3)
    assert calls.count("a") == calls.count("b") == 1 + 4 * 3
    assert all(set(calls[2 + n : 8 + n]) == {"a", "b"} for n in range(0, 24, 6)), "every round has both"
    assert len(samples.seconds["a"]) == 4
    ratios = timing.Samples({"a": [1.0, 2.0, 4.0], "b": [2.0, 4.0, 4.0]})
    assert ratios.ratios("a", "b") == [2.0, 2.0, 1.0]
    assert ratios.summary("a", "b")["ratio"] == 2.0


# -------------------------------------------------------------------------------------------------------- compare
def timed(median, spread):
    return {"median": median, "p10": median - spread, "p90": median + spread}


def results(device="toy", **medians):
    sides = {name: {"errors": {}, "forward": timed(*m), "backward": timed(1.0, 0.5)} for name, m in medians.items()}
    return {"preset": "quick", "provenance": {"date": "today", "device": device}, "rows": [{"row": "r", "sides": sides}]}


def test_compare_claims_only_what_the_spread_allows(tmp_path, capsys):
    old = results(fast=(2e-3, 1e-4), slow=(1e-3, 1e-4), same=(1e-3, 5e-4), refused=(1e-3, 1e-4))
    new = results(fast=(1e-3, 1e-4), slow=(2e-3, 1e-4), same=(1.2e-3, 5e-4), refused=(1e-3, 1e-4), added=(1e-3, 1e-4))
    new["rows"][0]["sides"]["refused"] = {"refused": "out: wrong"}
    old["rows"].append(copy.deepcopy(old["rows"][0]) | {"row": "dropped"})
    for name, data in (("old", old), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "r, fast, forward: 2.000 -> 1.000 ms, 2.00x, faster" in lines
    assert "r, slow, forward: 1.000 -> 2.000 ms, 0.50x, slower" in lines
    assert "r, same, forward: 1.000 -> 1.200 ms, 0.83x, no difference shown" in lines
    assert "r, refused, forward: was timed; is out: wrong" in lines
    assert "r, added: new" in lines
    assert "dropped: gone" in lines
    (tmp_path / "new.json").write_text(json.dumps(results("other")))
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(tmp_path / "old.json"), str(tmp_path / "new.json")])
    assert "the files are from different devices, toy and other" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- command
def test_the_bar_says_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress.show("rows timed", 1, 4, 61, 183.4)
    progress.say("a row")
    assert capsys.readouterr().err == "\r\033[K[######..................] 1 of 4 rows timed, 1:01, about 3:03 left\r\033[Ka row\n"


def test_a_report_without_peers_claims_nothing():
    text = report.markdown({"preset": "mine", "provenance": {"device": "cpu"}, "rows": []})
    assert text.endswith("## Where we lose\n\nNothing was compared: no peer has a time.\n")


MINE = ["mine", "--shape", "1,128,128,2,2,16", "--dtype", "float32", "--is-causal", "--seconds", "0.1"]


def test_a_side_that_was_asked_for_and_is_not_here_is_no_success(capsys):
    assert main([*MINE, "--sides", "flash_jax", "jax.nn:cudnn"]) == 1
    said = capsys.readouterr()
    assert "jax.nn:cudnn: refused in every row; the table says why\n" in said.err
    assert "Nothing was compared: no peer has a time." in said.out


def test_command_writes_its_report(tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main([*MINE, "--out", str(out.with_suffix(""))]) == 0, ".json is added"
    said = capsys.readouterr()
    assert "## Where we lose" in said.out
    assert re.search(r"^\[#{24}\] 1 of 1 rows compiled, \d:\d\d, about 0:00 left$", said.err, re.MULTILINE)
    assert re.search(r"^\[#{24}\] 1 of 1 rows timed, \d:\d\d, about 0:00 left$", said.err, re.MULTILINE)
    data = json.loads(out.read_text())
    assert data["provenance"]["jax"] == jax.__version__
    assert "numpy 2." in data["provenance"]["libraries"]
    assert set(data["rows"][0]["sides"]) >= {"flash_jax", "jax.nn"}
    assert out.with_suffix(".md").read_text().startswith("# mine on ")
    assert out.with_suffix(".png").stat().st_size > 5000


def test_command_fails_on_a_wrong_result(monkeypatch, capsys):
    planted = lambda row: lambda arrays: SIDES["jax.nn"](row)(arrays) * 1.01
    monkeypatch.setitem(SIDES, "flash_jax", planted)
    assert main([*MINE, "--sides", "flash_jax"]) == 1
    assert "refused: b1_n128x128_h2/2_d16_float32_causal: flash_jax: out: " in capsys.readouterr().err


def test_command_names_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["mine", "--shape", "1,2,3"])
    assert "six positive integers, got '1,2,3'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["quick", "--out", "no/such/folder/x.json"])
    assert "in a folder that exists" in capsys.readouterr().err


OUT_OF_RANGE = [
    (["mine", "--shape", "1,8,8,2,2,8", "--density", "2"], "argument --density: must be above 0 and at most 1, got '2'"),
    (["mine", "--shape", "1,8,8,2,2,8", "--density", "nan"], "argument --density: must be above 0 and at most 1, got 'nan'"),
    (["mine", "--shape", "1,8,8,2,2,8", "--dropout", "1"], "argument --dropout: must be from 0 to below 1, got '1'"),
    (["mine", "--shape", "1,8,8,2,2,8", "--window", "3", "-1"], "argument --window: must be an integer from 0 up, got '-1'"),
    (["mine", "--shape", "1,8,8,2,2,8", "--segments", "0"], "argument --segments: must be an integer from 1 up, got '0'"),
    (["mine", "--shape", "1,8,8,2,2,8", "--segments", "9"], "argument --segments: must be at most q_len"),
    (["mine", "--shape", "1,8,9,2,2,8", "--segments", "2"], "and q_len equal kv_len, got 2 for 8 and 9"),
    (["mine", "--shape", "1,8,8,3,2,8"], "argument --shape: must have num_heads a multiple of num_kv_heads"),
    (["quick", "--seconds", "0"], "argument --seconds: must be above 0 and finite, got '0'"),
    (["quick", "--only", "n7"], "argument --only: must occur in the name of a row, got n7; the rows are b1_n256"),
]


@pytest.mark.parametrize(("arguments", "text"), OUT_OF_RANGE, ids=lambda x: x[-2][2:] + x[-1] if isinstance(x, list) else "")
def test_command_names_an_option_out_of_range(arguments, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert text in capsys.readouterr().err


def test_rows_are_chosen_by_name_from_several_presets(tmp_path, monkeypatch):
    small = {"quick": lambda: [SMALL], "cpu": lambda: [SMALL, Row(1, 64, 1, 8, dtype="float32"), Row(1, 65, 1, 8, dtype="float32")]}
    for name, make in small.items():
        monkeypatch.setitem(PRESETS, name, make)
    out = tmp_path / "x.json"
    arguments = ["quick", "--also", "cpu", "--only", "n256", "n64", "--sides", "flash_jax", "--seconds", "0.01", "--out", str(out)]
    assert main(arguments) == 0
    assert [record["row"] for record in json.loads(out.read_text())["rows"]] == [SMALL.name, "b1_n64_h1_d8_float32"]


def test_kernel_time_is_that_of_a_profile():
    """Of a profile written by hand: two streams of a GPU, memory that is set, and a host's line."""
    event = lambda module, seconds, name="k": SimpleNamespace(name=name, duration_ns=seconds * 1e9, stats=[("hlo_module", module)])
    line = lambda name, *events: SimpleNamespace(name=name, events=events)
    gpu = [
        line("Stream #1", event("a", 1), event("a", 8, "Memset"), event("a", 2)),
        line("Stream #2", event("b", 4)),
        line("Ops", event("a", 16)),
    ]
    planes = [
        SimpleNamespace(name="/device:GPU:0", lines=gpu),
        SimpleNamespace(name="/host:CPU", lines=[line("Stream #9", event("a", 32))]),
    ]
    assert kernels.module_seconds(planes) == {"a": 3.0, "b": 4.0}


def test_processes_are_let_go_one_after_the_other():
    program = "import sys, time; print('a library that talks'); print('ready', flush=True); sys.stdin.read()"
    program += "; begin = time.time(); time.sleep(0.1); print(begin, time.time())"
    spoken = []
    lines = turns.in_turn([[sys.executable, "-c", program]] * 2, lambda: spoken.append(time.time()))
    (begin, end), (next_begin, _) = ([float(x) for x in line.split()] for line in lines)
    assert len(spoken) == 1
    assert spoken[0] <= begin < end <= next_begin


def test_rows_from_processes_come_in_order_and_none_is_lost_in_silence(tmp_path, monkeypatch, capsys):
    chosen = [Row(1, 2**n, 1, 8) for n in range(7, 10)]
    monkeypatch.setitem(PRESETS, "quick", lambda: chosen)
    record = lambda row: json.dumps({"row": row.name, "sides": {}}) + "\n"
    commands = []

    def in_turn(given, when_ready):
        commands.extend(given)
        return iter([record(chosen[1]), "a library that talks\n", record(chosen[0])])

    monkeypatch.setattr(turns, "in_turn", in_turn)
    out = tmp_path / "results.json"
    assert main(["quick", "--processes", "2", "--out", str(out)]) == 1
    assert [r["row"] for r in json.loads(out.read_text())["rows"]] == [chosen[0].name, chosen[1].name]
    assert f"{chosen[2].name}: the process" in capsys.readouterr().err
    assert [command[-2:] for command in commands] == [["--part", "0"], ["--part", "1"]]


def test_an_interrupted_save_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    report.save({"rows": [1]}, path)

    def interrupted(part, text):
        part.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.save({"rows": [1, 2]}, path)
    assert json.loads(path.read_text()) == {"rows": [1]}
