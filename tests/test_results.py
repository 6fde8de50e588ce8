"""What benchmarks/ makes of its measurements: the pages are what the results files say, counters are added up as described."""

import importlib
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import close

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name):
    return importlib.import_module(name)


# --------------------------------------------------------------------------------------------------------------- pages
def test_pages_are_what_the_results_files_say():
    for path, text in module("pages").pages().items():
        assert path.read_text() == text, f"{path.name} is not up to date: run python benchmarks/pages.py"


def test_the_readmes_figures_of_cpus():
    sides = {record["row"]: record["sides"] for record in json.loads((BENCHMARKS / "results" / "cpu.json").read_text())["rows"]}
    both = lambda side: side["forward"]["median"] + side["backward"]["median"]
    ratio = lambda n: both((row := sides[f"b1_n{n}_h8_d64_float32_causal"])["jax.nn"]) / both(row["flash_jax"])
    sentence = f"{ratio(2048):.1f} times as fast as `jax.nn` at length 2048 and {ratio(8192):.1f} times at 8192"
    assert sentence in (BENCHMARKS.parent / "README.md").read_text()


def timed(median, peers):
    over = {peer: {"ratio": ratio, "p10": ratio - 0.01, "p90": ratio + 0.01} for peer, ratio in peers.items()}
    return {"median": median, "p10": median, "p90": median, "tflops": 1.0, "memory": 10, "kernels": None, "over": over, "seconds": [median]}


def results(**ratios):
    sides = {"flash_jax": {"errors": {"out": 0.0}, "residuals": 100, "forward": timed(2e-3, ratios), "backward": timed(4e-3, ratios)}}
    where = {"device": "toy", "processor": "one", "platform": "gpu", "date": "2026-01-01", "command": "c", "jax": "0"}
    return {"preset": "quick", "provenance": where, "rows": [{"row": "r", "sides": sides}]}


def test_every_row_that_loses_is_listed():
    pages = module("pages")
    page = pages.results_page({"one": results(fast=0.9, slow=1.2), "two": results(slow=1.01), "three": results(close=0.995)})
    lost = page[page.index("## Where we lose") : page.index("## Quick")]
    assert lost.count("* r, forward: 0.90 of fast (0.89 to 0.91)\n") == 1
    assert lost.count("* r, backward: 0.90 of fast (0.89 to 0.91)\n") == 1
    assert lost.count("0.99 of close (0.98 to 1.00), a tie") + lost.count("0.99 of close (0.98 to 1.01), a tie") == 2
    assert "`two.json`" not in lost
    assert "| r | 2.000 |  | 1 | 0.90 | 1.20 |" in page


def test_block_sparse_is_held_to_its_density():
    pages, rows = module("pages"), [row for row in module("paper").PRESETS["features"]() if row.density]
    share = dict(zip((1.0, 0.5, 0.25, 0.125, 0.0625), (1.0, 0.59, 0.36, 0.2, 0.1), strict=True))
    record = lambda row: {"row": row.name, "sides": {"flash_jax": {phase: timed(share[row.density], {}) for phase in row.phases}}}
    table = pages.sparse({"preset": "features", "rows": [record(row) for row in rows]})
    assert "| 0.5 | 0.590 | 0.590 | 0.6 | yes |" in table
    assert "| 0.25 | 0.360 | 0.360 | 0.35 | no |" in table


def test_where_flash_stops_paying():
    """Of each curve; with dropout the standard computation is a side of its own."""
    paper = module("paper")
    times = {"full": {32: (4, 2), 128: (3, 3), 512: (2, 4)}, "causal": {32: (1, 2)}, "dropout 0.1": {512: (2, 5)}}
    rows: list[dict] = []
    for kind, words in paper.CURVES.items():
        for row in paper.PRESETS["paper"]():
            if (row.is_causal, row.dropout) == (kind == "causal", words.get("dropout", 0.0)) and row.length in times[kind]:
                ours, theirs = ({phase: timed(t * 1e-3, {}) for phase in row.phases} for t in times[kind][row.length])
                standard = {"jax.nn": {"refused": "no dropout"}, "standard": theirs} if row.dropout else {"jax.nn": theirs}
                rows.append({"row": row.name, "sides": {"flash_jax": ours, **standard}})
    results = {"preset": "paper", "rows": rows}
    assert paper.crossover(results).splitlines() == [
        "* full: the standard computation is as fast or faster at 32, 128.",
        "* causal: flash_jax is faster at every length measured; the shortest is 32.",
        "* dropout 0.1: flash_jax is faster at every length measured; the shortest is 512.",
    ]
    assert "| dropout 0.1 | 512 | 10.000 |  | 4.000 | 2.50 |  |" in paper.lengths(results)


def test_tiles_by_hand():
    pages = module("pages")
    row = lambda **words: module("counters").Row(1, 1024, 1, 8, is_causal=True, **words)
    assert pages.tiles(row()) == 36
    assert pages.tiles(row(window=(127, 0))) == 8 + 7
    assert pages.tiles(row(segments=(256, 768))) == 3 + 21


# ------------------------------------------------------------------------------------------------------------- counters
def test_kernels_between_marks():
    line = lambda name, *numbers: [name, *numbers]
    kernels = [
        line("xor"),
        line("sum", "1"),
        line("xor"),
        line("a", "1,000", "2"),
        line("b", "3"),
        line("xor"),
        line("sum", "4"),
        line("xor"),
    ]
    counters = module("counters")
    filled = [[name, *(values + ["0"] * (len(counters.METRICS) - len(values)))] for name, *values in kernels]
    parts = counters.split(filled)
    assert [[kernel["kernel"] for kernel in part] for part in parts] == [["sum"], ["a", "b"], ["sum"]]
    assert parts[1][0]["read"] == 1000
    assert parts[1][0]["written"] == 2


def test_what_stays_in_the_cache_counts_as_written():
    counters = module("counters")
    row = counters.rows()[0]
    kernels = [{"read": 5.0, "written": 7.0}, {"read": 1.0, "written": 0.0}]
    case = {"row": row.name, "side": "flash_jax", "phase": "forward", "kernels": kernels, "left_in_cache": 3.0}
    (line,) = counters.table(dated(1, case))
    assert (line["read"], line["written"]) == (6.0, 10.0)


def dated(day, *cases):
    return {"provenance": {"date": f"2026-01-0{day}"}, "cases": list(cases)}


def test_what_was_counted_twice_is_taken_from_the_later_file():
    counters = module("counters")
    case = lambda row, left: {"row": row.name, "side": "flash_jax", "phase": "forward", "kernels": [], "left_in_cache": left}
    first, second, *_ = counters.rows()
    lines = counters.table(dated(2, case(first, 2.0)), dated(1, case(second, 1.0), case(first, 1.0)))
    assert [line["written"] for line in lines] == [2.0, 1.0]


def test_scores_in_float32_are_wider():
    counters = module("counters")
    row = counters.Row(2, 4096, 3, 64)
    for phase, more in (("forward", 4), ("backward", 10)):
        model, stored = counters.predict(row, "jax.nn", phase)
        assert stored - model == more * 2 * 3 * 4096**2
        assert len(set(counters.predict(row, "flash_jax", phase))) == 1


# ------------------------------------------------------------------------------------------------------------- training
def test_differences_of_loss_curves():
    runs = [
        {"attention": a, "seed": s, "losses": [x, x]}
        for a, s, x in (("flash", 0, 1), ("flash", 1, 3), ("jax_xla", 0, 2), ("jax_xla", 1, 4))
    ]
    assert module("training").differences(runs) == {"implementations": 1.0, "seeds": 2.0}


def test_what_does_not_run_is_a_result(monkeypatch):
    import dataclasses
    from types import SimpleNamespace

    import jax

    training = module("training")
    base = dataclasses.replace(training.H200, seq=8)
    runs, fails, large, late = (dataclasses.replace(base, attention=name) for name in ("flash", "jax_xla", "jax_cudnn", "tokamax"))

    def step(temporary, fault=None):
        def result(params, state, tokens):
            if fault is not None:
                raise fault
            return params + 1, state, SimpleNamespace(block_until_ready=lambda: None)

        result.memory_analysis = lambda: SimpleNamespace(temp_size_in_bytes=temporary, argument_size_in_bytes=1)
        return result

    monkeypatch.setattr(training, "memory_limit", lambda: 1e9)
    began = []
    monkeypatch.setattr(training, "Training", lambda config: SimpleNamespace(begin=lambda seed: began.append(config.attention) or (0, 0)))
    steps = {runs: step(10), fails: "ValueError: no", large: step(2e9), late: step(10, jax.errors.JaxRuntimeError("out of memory"))}
    rows = training._race([runs, fails, large, late], steps, (0, 0), np.zeros((2, 9), np.int32))
    assert began == ["tokamax"]  # anew after the failure
    outcomes = ["ran", "ValueError: no", "out of memory: needs 2.0 of 1.0 GB", "JaxRuntimeError: out of memory"]
    assert [row["outcome"] for row in rows] == outcomes
    assert len(rows[0]["seconds"]) == training.ROUNDS
    assert rows[0]["tokens_per_second"] == rows[0]["tokens"] / np.median(rows[0]["seconds"])
    assert rows[0]["tokens"] == 16
    assert "tokens_per_second" not in rows[2]
    assert "tokens_per_second" not in rows[3]


def test_sequences_of_different_lengths_together_and_apart():
    """Both ways compute the same gradients; the page has the ratio of their times."""
    sides = module("batched_lengths").sides((40, 24, 7))
    separate = [jnp.stack(gradients) for _, gradients in sides["separate"]()]
    padded = jnp.concatenate([jnp.stack(gradients) for _, gradients in sides["separate, padded"]()], axis=1)
    for together in (padded, *(jnp.stack(sides[name]()[1]) for name in ("batched", "vmap"))):
        for n, (gradient, length) in enumerate(zip(separate, (40, 24, 7), strict=True)):
            close(together[:, n, :length], gradient[:, 0])
            assert not together[:, n, length:].any()
    row = {"lengths": [40, 24], "side": "vmap", "median": 0.5, "of_separate": {"ratio": 1.234, "p10": 1.0, "p90": 1.5}}
    about = {"heads": 1, "head_dim": 8, "dtype": "float32", "rows": [row]}
    assert "| 40, 24 | vmap | 500.0 | 1.23 | 1.00 | 1.50 |" in module("pages").batched_lengths(results() | about)


def test_both_sides_of_one_program_compute_the_same():
    sides = module("short_lengths").sides(module("short_lengths").Row(1, 24, 2, 8, dtype="float32", is_causal=True))
    close(sides["flash_jax"](), sides["jax.nn"]())
    row = {"row": "r", "median": 0.5, "over": {"ratio": 1.234, "p10": 1.0, "p90": 1.5}}
    assert "| r | 500.000 | 1.23 | 1.00 | 1.50 |" in module("pages").short_lengths(results() | {"rows": [row]})


def test_simulated_cycles_are_called_so_and_counted_by_visited_score():
    pages = module("pages")
    results = json.loads((BENCHMARKS / "results" / "tpu_simulated.json").read_text())
    text = pages.simulated(results)
    assert "Simulated cycles" in text
    assert "libtpu 0." in text
    rule, causal = pages.RowRule(8192, left=1023, right=0), pages.RowRule(8192, right=0)
    # Pieces of 256 rows take 1280 keys each, but the first q tile's own, which have no more than 256, 512, 768 and 1024 before their end.
    assert pages.of_steps(rule, pages.Tiles(1024, 512, 8192, 2, 4), False) == 28 * 256 * 1280 + 256 * (256 + 512 + 768 + 1024)
    assert pages.of_steps(causal, pages.Tiles(1024, 512, 8192, 2, 2), True) == 8 * 512 * (512 + 1024)
    assert pages.of_tiles(rule, pages.Tiles(1024, 512, 8192, 2, 4), False) == 1024 * 512 * (2 + 7 * 4)
    assert pages.of_tiles(causal, pages.Tiles(1024, 512, 8192, 2, 2), True) == 8 * 1024 * 1024
    row = lambda mask, phase, cycles: (("v5e", mask, phase, "ours"), {"with_xla_ops": cycles})
    shares = {"dense": 100, "half": 55, "quarter": 30, "eighth": 20, "sixteenth": 17}
    best = dict(row(mask, phase, cycles) for mask, cycles in shares.items() for phase in ("forward", "backward"))
    assert "| 0.5 | 0.550 | 0.550 | 0.6 | yes |" in pages.sparse_cycles(best)
    assert "| 0.0625 | 0.170 | 0.170 | 0.1625 | no |" in pages.sparse_cycles(best)
    best = {of: row | {"kernel": 2 * row["with_xla_ops"]} for of, row in best.items()}
    best["v5e", "half", "backward", "ours"] = {"with_xla_ops": None, "kernel": 102}
    text = pages.sparse_cycles(best)
    assert "| v5e backward, kernel alone, of density 1 |" in text
    assert "| 0.5 | 0.550 | 0.510 | 0.6 | yes |" in text
    full = {"kernel": 8192**2 + 4 * 2**20 / 546}
    window = {"mask": "window", "tiles": "1024/512/2/4/128", "kernel": 1.5 * 9830400 + 4 * 2**20 / 546}
    np.testing.assert_allclose(pages.by_score("v5e", window, full, "forward", pages.of_steps), 1.5, rtol=1e-6)


def test_tpu_rows_stand_beside_the_best_of_the_others():
    results = json.loads((BENCHMARKS / "results" / "tpu_simulated.json").read_text())
    case = {"generation": "v5e", "phase": "forward", "mask": "full"}
    row = case | {"tiles": "1/2/3", "with_xla_ops": 9, "mxu_percent": 50.0, "spills": 3, "vmem_mib": 7.5}
    others = [r for r in results["rows"] if r != r | case]
    of = {"ours": 8, "splash": 12, "flash": 20, "tokamax": 10}
    text = module("pages").simulated(results | {"rows": others + [row | {"who": who, "kernel": n} for who, n in of.items()]})
    assert "| v5e full forward | 1/2/3 | 8 | 9 | 50.0 | 3 | 7.5 | tokamax's splash 1/2/3 | 10 | 0.800 | 1.000 |" in text


def test_a_simulation_that_cannot_be_is_refused(monkeypatch):
    static = module("tpu_static")

    def row(mask, cycles):
        operations = {"flash_forward.1": cycles, "copy": 1000}
        result = {"cycles": operations, "vmem": {"flash_forward.1": 2**23, "copy": 2**25}, "spills": 5, "whole": True}
        monkeypatch.setattr(static, "run", lambda *_: result)
        return static.row_of(f"ours forward {mask} 1/2", "v5e", False)

    full = row("full", 400_000)  # two products of 8192 * 8192 * 128 at 65536 a cycle: 262144 cycles at least
    names = ("kernel", "with_xla_ops", "mxu_percent", "spills", "vmem_mib")
    assert [full[n] for n in names] == [400_000, 401_000, 65.5, 5, 8.0]
    assert "impossible: 250000 cycles would be 105 %" in row("full", 250_000)["error"]
    assert "suspicious: 0.75 of half of full" in static.line_of(row("causal", 150_000), [full])
    assert "suspicious" not in static.line_of(row("causal", 210_000), [full])
    assert set(static.GENERATIONS) == {"v5e", "v5p", "v6e"}


def test_results_files_say_where_they_come_from():
    """Measured ones with their device; none with the paths of a machine."""
    for path in (BENCHMARKS / "results").glob("*.json"):
        data = json.loads(path.read_text())
        where = data.get("provenance", data)
        assert where["command"].startswith("python "), path.name
        assert where is data or {"date", "device", "jax", "gpu"} <= set(where), path.name
        assert "/root" not in path.read_text(), path.name
