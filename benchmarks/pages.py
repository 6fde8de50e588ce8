"""Writes docs/results.md and the generated parts of other pages from benchmarks/results/: no figure there is typed by hand.

    python benchmarks/pages.py            # write
    python benchmarks/pages.py --check    # say whether what is there is up to date

A generated part of a page stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable

import counters
import numpy as np
import paper
import training as steps
from paper import table

from flash_jax import Mask, io_model
from flash_jax.backends.tpu import Tiles, edge, plan
from flash_jax.bench import report
from flash_jax.bench.measure import PHASES, geometric_mean
from flash_jax.bench.presets import PRESETS
from flash_jax.bench.rows import BLOCK, Row
from flash_jax.visibility import RowRule

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Results

This page is written by `benchmarks/pages.py` from the files under `benchmarks/results/`, which have the raw samples and, of each run,
the date, the command, the device, driver, clocks and versions. Every result was compared with the dense definition before it was timed. The
sides of a row take turns in one process; a ratio is the median of the ratios of neighbouring samples, above 1.00 where flash_jax is faster.
A **tie** is a median of 0.97 at least whose p10 to p90 contains 1.00. Times are wall times of compiled calls; TFLOP/s count visible
scores, and a backward as 2.5 forwards. No TPU was measured: of its kernels there are [simulated cycles](#tpu-simulated-cycles).
"""


def load() -> dict[str, dict]:
    """Every results file by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


# ------------------------------------------------------------------------------------------------------------- benchmarks
def benchmark(name: str, results: dict) -> str:
    """A section of one run of `flash_jax.bench`."""
    rows = results["rows"]
    ours = [record["sides"].get("flash_jax", {}) for record in rows]
    peers = list(dict.fromkeys(peer for side in ours for phase in PHASES for peer in side.get(phase, {}).get("over", {})))
    text = [
        f"## {title(results)}",
        "",
        f"{origin(results)}, file `{name}.json`.",
    ]
    text += ["", *report.ratios(results)]
    for phase in PHASES:
        lines = [_line(record, phase, peers) for record in rows if phase in record["sides"].get("flash_jax", {})]
        if lines:
            text += [
                "",
                f"### {phase.capitalize()}",
                "",
                table(["row", "ms", "kernels, ms", "TFLOP/s", *(f"over {peer}" for peer in peers)], lines),
            ]
    refused = {(side, what["refused"]): None for record in rows for side, what in record["sides"].items() if "refused" in what}
    text += ["", *(f"* {side} has rows without a time: `{reason}`" for side, reason in refused)]
    return "\n".join(text).rstrip() + "\n"


def origin(results: dict) -> str:
    """Command, flags, date, version, and how long it took where that is on record."""
    where = results["provenance"]
    flags = f"XLA_FLAGS={where['XLA_FLAGS']} " if where.get("XLA_FLAGS") else ""
    took = f", {where['seconds']} seconds" if "seconds" in where else ""
    return f"`{flags}{where['command']}`, {where['date'][:10]}, jax {where['jax']}{took}"


def title(results: dict) -> str:
    """Of a section: preset and machine."""
    return f"{results['preset'].capitalize()}, {report.machine(results['provenance'])}"


def _line(record: dict, phase: str, peers: list[str]) -> list[str]:
    side = record["sides"]["flash_jax"][phase]
    ratio = lambda peer: f"{side['over'][peer]['ratio']:.2f}" if peer in side["over"] else ""
    kernels = f"{side['kernels'] * 1e3:.3f}" if side.get("kernels") else ""
    return [record["row"], f"{side['median'] * 1e3:.3f}", kernels, f"{side['tflops']:.3g}", *map(ratio, peers)]


def lost(name: str, results: dict) -> list[str]:
    """Each row below 1.00 of the best peer, and by how much."""
    return [f"\nOn {title(results)} (`{name}.json`):\n", *report.lost(results)] if report.lost(results) else []


def sparse(results: dict) -> str:
    """Time against density, and whether it keeps to density + 0.1."""
    by_name = {record["row"]: record["sides"]["flash_jax"] for record in results["rows"]}
    rows = [row for row in PRESETS[results["preset"]]() if row.density is not None and row.name in by_name]
    lines = []
    for row in rows:
        shares = [by_name[row.name][phase]["median"] / by_name[rows[0].name][phase]["median"] for phase in PHASES]
        kept = "yes" if row.density == 1 or max(shares) <= row.density + 0.1 else "no"
        lines.append([f"{row.density:g}", *(f"{share:.3f}" for share in shares), f"{row.density + 0.1:g}" if row.density < 1 else "", kept])
    return table(["density", "forward, of density 1", "backward, of density 1", "allowed", "kept"], lines)


def tiles(row: Row) -> int:
    """Tiles of 128 x 128 with a visible score, of one batch entry and head; packed sequences begin at multiples of 128."""
    mask = Mask.causal() if row.window is None else Mask.causal() & Mask.sliding_window(*row.window)
    problems = (io_model.make_problem(n, head_dim=row.head_dim, mask=mask) for n in row.segments or (row.length,))
    return sum(io_model.visits(problem, BLOCK, BLOCK).tiles for problem in problems)


def cost_of_features(results: dict) -> str:
    """What a mask costs beyond the work it leaves: the time of a tile, over that of the same side's plain causal row."""
    rows = paper.rows_of(results)
    alike = [row for row in rows if row.is_causal and row.dtype == "bfloat16" and row.head_dim == 128 and row.num_kv_heads is None]
    plain = next(row for row in alike if row.window is None and not row.segments)
    names = [name for name in ("flash_jax", "fa3", "fa4") if all(name in rows[row] for row in alike)]
    of_a_tile = lambda row, name, phase: rows[row][name][phase]["median"] / (row.batch * row.num_heads * tiles(row))
    cost = lambda row, name, phase: f"{of_a_tile(row, name, phase) / of_a_tile(plain, name, phase):.2f}"
    columns = [(name, phase) for phase in PHASES for name in names]
    lines = [[row.name, tiles(row), *(cost(row, *column) for column in columns)] for row in alike if row != plain]
    head = ["row", "tiles a head", *(f"{phase}, {name}" for name, phase in columns)]
    return f"Against `{plain.name}`, which has {tiles(plain)} tiles a head:\n\n" + table(head, lines)


def residual_memory(results: dict) -> str:
    """Bytes beside inputs and outputs that a step needs, the largest over the rows."""
    lines = []
    for record in results["rows"]:
        sides = {name: side for name, side in record["sides"].items() if "backward" in side}
        if "flash_jax" in sides and "jax.nn:cudnn" in sides:
            ours, theirs = (sides[name]["backward"]["memory"] + sides[name]["residuals"] for name in ("flash_jax", "jax.nn:cudnn"))
            lines.append((ours / theirs, record["row"], ours / 1e6, theirs / 1e6))
    worst = max(lines)
    what = "Residuals of the forward (the inputs among them) and temporary memory of the backward, over those of cuDNN"
    return f"{what}: at most {worst[0]:.2f}, in `{worst[1]}`, with {worst[2]:.0f} and {worst[3]:.0f} MB."


def first_calls(results: dict) -> str:
    """Seconds of trace and compile, a line for each row and side."""
    lines = [
        [r["row"], r["phase"], r["side"], *(f"{r[part]:.1f}" if part in r else r["refused"] for part in ("trace", "compile"))]
        for r in results["rows"]
    ]
    return f"{origin(results)}, {results['provenance']['processor']}.\n\n" + table(
        ["row", "phase", "side", "trace, s", "compile, s"], lines
    )


def deterministic(results: dict) -> str:
    """Time of a backward that repeats bit by bit, over that of one that adds in any order."""
    of = lambda row: [f"{row['cost'][part]:.2f}" for part in ("ratio", "p10", "p90")]
    ms = lambda row: [f"{row['median'][side] * 1e3:.2f}" for side in ("default", "deterministic")]
    lines = [[row["row"], *ms(row), *of(row)] for row in results["rows"]]
    return f"{origin(results)}, the backward alone.\n\n" + table(["row", "ms", "ms, deterministic", "over it", "p10", "p90"], lines)


def batched_lengths(results: dict) -> str:
    """Time of sequences of different lengths together, over that of a call for each."""
    of = lambda row: [f"{row['of_separate'][part]:.2f}" for part in ("ratio", "p10", "p90")]
    lines = [[", ".join(map(str, row["lengths"])), row["side"], f"{row['median'] * 1e3:.1f}", *of(row)] for row in results["rows"]]
    what = f"{results['heads']} heads of {results['head_dim']}, {results['dtype']}, causal, forward and backward."
    return f"{origin(results)}, {results['provenance']['processor']}. {what}\n\n" + table(
        ["lengths", "side", "ms", "over separate calls", "p10", "p90"], lines
    )


def short_lengths(results: dict) -> str:
    """Forward and backward in one program."""
    of = lambda row: [f"{row['over'][part]:.2f}" for part in ("ratio", "p10", "p90")]
    lines = [[row["row"], f"{row['median'] * 1e3:.3f}", *of(row)] for row in results["rows"]]
    return f"{origin(results)}, {results['provenance']['processor']}.\n\n" + table(["row", "ms", "over jax.nn", "p10", "p90"], lines)


# --------------------------------------------------------------------------------------------------------------- training
def training(results: dict) -> str:
    """Tokens a second, a line for each model, length and recomputation."""
    names = list(dict.fromkeys(row["attention"] for row in results["rows"]))
    groups: dict[tuple, dict] = {}
    for row in results["rows"]:
        key = (f"{row['heads']} x {row['head_dim']}", row["seq"], "recomputed" if row["remat"] else "kept")
        groups.setdefault(key, {})[row["attention"]] = row
    head = ["heads", "length", "activations", *(f"{paper.LABEL[name]}, tokens/s" for name in names), "over the best peer"]
    lines = []
    for key, of in groups.items():
        cells = [f"{of[name]['tokens_per_second']:,.0f}" if "tokens_per_second" in of[name] else of[name]["outcome"] for name in names]
        peers = [row for name, row in of.items() if name != "flash" and "seconds" in row]
        ratio = min((float(np.median(np.array(p["seconds"]) / np.array(of["flash"]["seconds"]))) for p in peers), default=None)
        lines.append([*key, *cells, "" if ratio is None else f"{ratio:.2f}"])
    memory = {row["remat"]: row["temporary_bytes"] / 1e9 for row in results["rows"] if row["attention"] == "flash"}
    why = (
        'Of a block, "recomputed" keeps what the backward of attention needs and computes the rest again. It is faster for the same '
        f"tokens a step, as what is kept is written and read back: {memory[False]:.1f} GB of temporary memory where that is all of it, "
        f"and {memory[True]:.1f} GB otherwise (flash_jax, its last rows)."
    )
    return f"{origin(results)}, {results['provenance']['device']}.\n\n" + table(head, lines) + "\n\n" + why


def training_in_short(results: dict) -> str:
    """Tokens a second over those of each peer, the range over the steps that fit."""
    found: dict[str, list[float]] = {}
    for _, of in itertools.groupby(results["rows"], key=lambda row: [row[part] for part in ("heads", "head_dim", "seq", "remat")]):
        tokens = {row["attention"]: row["tokens_per_second"] for row in of if "seconds" in row}
        for name in tokens.keys() - {"flash"}:
            found.setdefault(name, []).append(tokens["flash"] / tokens[name])
    lines = [f"{min(found[name]):.2f} to {max(found[name]):.2f} times those of {paper.LABEL[name]}" for name in sorted(found)]
    return "Tokens a second of whole training steps, GPT-2 medium's size, 1024 to 16384 tokens: " + ", ".join(lines) + "."


def curves(results: dict) -> str:
    """What the loss curves say."""
    ends = [[paper.LABEL[r["attention"]], r["seed"], f"{r['losses'][0]:.3f}", f"{np.mean(r['losses'][-30:]):.3f}"] for r in results["runs"]]
    apart = results["differences"]
    between = f"the implementations, with one seed, is {apart['implementations']:.4f}; between the seeds, with one implementation"
    text = f"The root mean square over all steps of the difference between {between}, {apart['seeds']:.4f}."
    return table(["attention", "seed", "first loss", "mean of the last 30"], ends) + "\n\n" + text


PEERS = {"jax.nn:cudnn": "cuDNN through `jax.nn`", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4's kernels"}


TPU_BYTES = {"v5e": 546, "v6e": 937}  # of HBM a cycle
TPU_PEERS = {"splash": "splash", "flash": "flash", "tokamax": "tokamax's splash"}
KEYS_BYTES = 2 * 2 * 8192 * 128  # keys and values of the simulated head, bfloat16


def simulated(results: dict) -> str:
    """Cycles of the TPU kernels beside the best of the others', and of masks that skip, by score."""
    best, lines = {}, []
    for row in results["rows"]:
        key = (row["generation"], row["mask"], row["phase"], row["who"])
        if "kernel" in row and row["kernel"] < best.get(key, row | {"kernel": float("inf")})["kernel"]:
            best[key] = row
    cycles = lambda row, name: f"{row[name]:,}" if row.get(name) else ""
    for (*case, who), row in best.items():
        if who == "ours":
            other = min((best[*case, peer] for peer in TPU_PEERS if (*case, peer) in best), key=lambda row: row["kernel"], default={})
            ratio = lambda name, row=row, other=other: f"{row[name] / other[name]:.3f}" if row[name] and other.get(name) else ""
            sizes = [row["tiles"], cycles(row, "kernel"), cycles(row, "with_xla_ops"), row["mxu_percent"]]
            sizes += [row["spills"], row.get("vmem_mib") or ""]
            name = f"{TPU_PEERS[other['who']]} {other['tiles']}" if other else ""
            lines.append([" ".join(case), *sizes, name, cycles(other, "kernel"), ratio("kernel"), ratio("with_xla_ops")])
    ratios = []
    for mask in ("window", "packed"):
        for phase in PHASES:
            pair = [(g, best.get((g, mask, phase, "ours")), best.get((g, "full", phase, "ours"))) for g in TPU_BYTES]
            of = lambda count, phase=phase, pair=pair: [f"{by_score(*x, phase, count):.2f}" if x[1] and x[2] else "" for x in pair]
            ratios.append([f"{mask} {phase}", *of(of_steps), *of(of_tiles)])
    heads = ["", "ours", "kernel", "with XLA's", "MXU %", "spills", "VMEM MiB", "best of the others", "kernel", "ratio", "ratio with XLA's"]
    return f"""{results["title"]} Command: `{results["command"]}`. A ratio
below 1.000 is fewer cycles than the best of two or three tilings of each of jax's splash, jax's flash attention and tokamax's splash;
differences under 5 % mean nothing. Tiles of ours: rows, keys, tiles a turn, pieces, rows of a band. `causal_64` and its like have that head
dimension, `192_128` one for keys and one for values. XLA's operations are layouts, delta of a backward, splash's and tokamax's sum of the
parts of the queries' gradient, and for packed rows our pass over keys and values.

{table(heads, lines)}

Cycles of the kernel per visited score over those of the full mask, the load of the keys and values (backward: and the store of their
gradients) left out by bytes and bandwidth: 1.00 is cycles in proportion to what is visited. Visited is what the steps cover, or all of the
tiles that have something to visit: the steps leave parts of tiles out.

{table(["", *(f"{g}, of the steps" for g in TPU_BYTES), *(f"{g}, of the tiles" for g in TPU_BYTES)], ratios)}

Block maps of 16384 tokens, XLA's operations counted where their cycles are known:

{sparse_cycles(best)}

[Experiments](dev/experiments_tpu.md) has what was tried, and what the rest of each gap is made of."""


def sparse_cycles(best: dict) -> str:
    """Cycles against density, and whether they keep to density + 0.1; `best` as in `simulated`."""
    maps = {"half": 0.5, "quarter": 0.25, "eighth": 0.125, "sixteenth": 0.0625}
    cases = {}  # and which cycles: the sum is not known where the simulator fails after the kernel
    for case in itertools.product(TPU_BYTES, PHASES):
        rows = [best[of] for mask in ("dense", *maps) if (of := (case[0], mask, case[1], "ours")) in best]
        if len(rows) == 1 + len(maps):
            cases[case] = "with_xla_ops" if all(row["with_xla_ops"] for row in rows) else "kernel"
    lines = []
    for name, density in maps.items():
        shares = [best[g, name, p, "ours"][cycles] / best[g, "dense", p, "ours"][cycles] for (g, p), cycles in cases.items()]
        lines.append([f"{density:g}", *(f"{x:.3f}" for x in shares), f"{density + 0.1:g}", "yes" if max(shares) <= density + 0.1 else "no"])
    sides = [f"{g} {p}{', kernel alone' * (cycles == 'kernel')}, of density 1" for (g, p), cycles in cases.items()]
    return table(["density", *sides, "allowed", "kept"], lines)


def by_score(generation: str, row: dict, full: dict, phase: str, count: Callable[[RowRule, Tiles, bool], int]) -> float:
    """Cycles of a visited score over those of one of the full mask; a window of 1024, or documents of 1024 whose tiles are no larger."""
    outside = KEYS_BYTES * (2 if phase == "backward" else 1) / TPU_BYTES[generation]
    block_q, block_kv, *others = map(int, row["tiles"].split("/"))
    rule, tiles = RowRule(8192, left=1023 if row["mask"] == "window" else None, right=0), Tiles(block_q, block_kv, 8192, *others)
    return (row["kernel"] - outside) / count(rule, tiles, row["mask"] == "packed") / ((full["kernel"] - outside) / 8192**2)


def of_steps(rule: RowRule, tiles: Tiles, packed: bool) -> int:
    """Scores of the steps of 8192 tokens."""
    at_edge = edge.edge(rule, 8192, tiles, packed)
    assert at_edge is not None
    of = lambda steps: sum(step.width for step in steps if step) * tiles.block_q // tiles.pieces
    return of(at_edge.head) * at_edge.turn + of(at_edge.steps) * (8192 // tiles.block_q - at_edge.turn)


def of_tiles(rule: RowRule, tiles: Tiles, packed: bool) -> int:
    """Scores of the tiles that are not empty; of documents, those of a document's rows and keys."""
    if packed:
        return 8192 * 1024
    r = plan.ranges_of(rule, 8192, tiles, np.arange(8192 // tiles.block_q))
    return int((r.end - r.begin).sum()) * tiles.block_q * tiles.block_kv


def speed(results: dict) -> str:
    """Ratios to each peer: the geometric mean over the rows, and the lowest."""
    ours = [record["sides"]["flash_jax"] for record in results["rows"]]
    peers = list(dict.fromkeys(peer for side in ours for peer in side["forward"]["over"]))
    lines = []
    for phase in PHASES:
        by_peer = [[side[phase]["over"][peer]["ratio"] for side in ours if peer in side[phase]["over"]] for peer in peers]
        lines.append([phase, *(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" for ratios in by_peer)])
    return table(["", *(f"over {PEERS.get(peer, peer)}" for peer in peers)], lines)


# ------------------------------------------------------------------------------------------------------------------ pages
def quick(files: dict[str, dict]) -> str:
    """How long `bench quick` takes."""
    runs = [results for results in files.values() if results.get("preset") == "quick" and "seconds" in results["provenance"]]
    took = lambda where: f"{where['seconds']} seconds on {report.machine(where)}"
    return f"It took {', '.join(took(results['provenance']) for results in runs)}."


def results_page(files: dict[str, dict]) -> str:
    """docs/results.md."""
    text = [HEAD]
    runs = {name: results for name, results in files.items() if "preset" in results}
    losses = [line for name, results in runs.items() for line in lost(name, results)]
    text += ["## Where we lose\n", "Each row below 1.00 of the best peer of its run.", *losses, ""]
    for name, results in runs.items():
        text.append(benchmark(name, results))
        if results["preset"] == "features":
            text += ["### Block-sparse\n", sparse(results), "\n### The time of a tile under a mask\n", cost_of_features(results), ""]
        if results["preset"] == "sweep" and results["provenance"]["platform"] == "gpu":
            text += ["### Memory\n", residual_memory(results), ""]
    if "cpu_short_lengths" in files:
        text += ["## Forward and backward in one program\n", short_lengths(files["cpu_short_lengths"]), ""]
    if "cpu_batched_lengths" in files:
        text += ["## Sequences of different lengths\n", batched_lengths(files["cpu_batched_lengths"]), ""]
    if "h200_deterministic" in files:
        text += ["## Gradients that repeat bit by bit\n", deterministic(files["h200_deterministic"]), ""]
    if "h200_first_call" in files:
        text += ["## Before the first call\n", first_calls(files["h200_first_call"]), ""]
    if "tpu_simulated" in files:
        text += ["## TPU: simulated cycles\n", simulated(files["tpu_simulated"]), ""]
    if "h200_training" in files:
        text += ["## Training steps\n", training(files["h200_training"]), ""]
    if "h200_loss_curves" in files:
        text += ["## Loss curves\n", curves(files["h200_loss_curves"]), "", "![Loss curves](loss_curves.png)", ""]
    return "\n".join(text)


def pages() -> dict[pathlib.Path, str]:
    """Every page with generated parts, as it should be."""
    files = load()
    parts = paper.parts(files)
    counted = counters.table(*paper.counted(files))
    parts |= {"counters": counters.markdown(counted), "cache": counters.cache_markdown(counted)}
    parts["quick"] = quick(files)
    parts["speed"] = speed(files["h200_sweep"])
    parts["training"] = training_in_short(files["h200_training"])
    docs = ROOT / "docs"
    written = {docs / "results.md": results_page(files)}
    for path in (docs / "io.md", docs / "paper.md", ROOT / "README.md"):
        part = lambda match: f"{match[1]}\n{parts[match[2]].strip()}\n{match[3]}"
        written[path] = re.sub(r"(<!-- generated: (\S+) -->)\n.*?(<!-- end -->)", part, path.read_text(), flags=re.DOTALL)
    return written


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    o = parser.parse_args()
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if o.check:
        sys.stdout.writelines(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/pages.py\n" for path in stale)
        return int(bool(stale))
    for path, text in pages().items():
        path.write_text(text)
    files = load()
    paper.plots(files, ROOT / "docs")
    counters.plot(counters.table(*paper.counted(files)), ROOT / "docs" / "io_counters.png")
    if "h200_loss_curves" in files:
        steps.plot(files["h200_loss_curves"], ROOT / "docs" / "loss_curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
