"""Bytes that reach HBM and the L2 cache, by hardware counters, beside what `flash_jax.io_model` predicts.

    python benchmarks/counters.py measure benchmarks/results/counters.json    # needs Nsight Compute's ncu and the right to read counters
    python benchmarks/counters.py measure counters.json --seconds 100         # as many of the cases as fit, ours and the shortest first
    python benchmarks/counters.py report benchmarks/results/counters.json     # Markdown on stdout, and a plot beside the file

Each computation starts with a cache that holds other data, all of it clean: a sum over 512 MB is read before it. The same sum after it
drives out what it wrote and left in the cache; those bytes are counted as written by it.
"""

import argparse
import csv
import ctypes
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from flash_jax import io_model
from flash_jax.bench import compiled
from flash_jax.bench.measure import in_short
from flash_jax.bench.presets import CHANNELS, DENSITIES, PRESETS, TOKENS
from flash_jax.bench.report import save
from flash_jax.bench.rows import BLOCK, Row
from flash_jax.bench.sides import SIDES
from flash_jax.bench.timing import provenance

METRICS = {  # few enough, and of such kinds, that no kernel runs twice: a second run would find another cache
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
    "asked": "lts__t_sectors_srcunit_tex_op_read.sum",  # of 32 bytes, which multiprocessors read from the L2 cache
    "crossed": "lts__t_sectors_srcunit_ltcfabric_op_read.sum",  # which one half of the cache reads from the other
    "lookups": "lts__t_tag_requests.sum",  # of lines of 128 bytes, reads and writes
    "hits": "lts__t_tag_requests_hit.sum",
}
GPT2_MEDIUM = PRESETS["paper"]()[0]
SIDE_NAMES = ("jax.nn", "jax.nn:cudnn", "flash_jax")
AT_ONCE = 12  # cases compiled together
SECTOR = 32  # bytes
ROWS_OF_A_TILE = {64: 192, 128: 128, 256: 128}  # of our forward on an H200, by head_dim; as `explain` says


def rows() -> list[Row]:
    """Lengths at head_dim 128, three of them at 64 and 256, block-sparse patterns, and the table of the FlashAttention paper."""
    sizes = [(n, 128) for n in (1024, 2048, 4096, 8192, 16384)] + [(n, d) for d in (64, 256) for n in (1024, 4096, 16384)]
    plain = [Row(TOKENS // n, n, CHANNELS // d, d) for n, d in sizes]
    return [*plain, *(Row(1, TOKENS, CHANNELS // 128, 128, density=density) for density in DENSITIES), GPT2_MEDIUM]


def cases() -> list[tuple[Row, str]]:
    """What is counted, in this order: the table of the paper, fused kernels, the standard computation; block-sparse, only ours."""
    fused = [(row, name) for row in rows() for name in SIDE_NAMES if name != "jax.nn" and (row.density is None or name == "flash_jax")]
    standard = [(row, "jax.nn") for row in rows() if row.density is None]
    return sorted([*fused, *standard], key=lambda case: case[0] != GPT2_MEDIUM)


# ------------------------------------------------------------------------------------------------------- under the profiler
def run(seconds: float) -> None:
    """What ncu watches: for each case a mark, the sum, a mark, the computation; and the sum once more at the end."""
    began = time.monotonic()
    profiler = ctypes.CDLL("libcuda.so.1")
    mark, eight = jax.jit(lambda x: x ^ 1), jnp.zeros(8, jnp.int32)
    flush, large = jax.jit(lambda x: x.sum(dtype=jnp.int32)), jnp.ones(2**29, jnp.int8)

    def counted(*calls):
        profiler.cuProfilerStart()
        for call in (lambda: mark(eight), lambda: flush(large), lambda: mark(eight), *calls):
            jax.block_until_ready(call())
        profiler.cuProfilerStop()

    def say(kind, *what):
        sys.stdout.write(f"{kind} {json.dumps(what)}\n")
        sys.stdout.flush()

    for several in itertools.batched(cases(), AT_ONCE):
        if time.monotonic() - began > seconds:
            for row, name in several:
                say("left out", row.name, name, "the time given was over")
            continue
        with ThreadPoolExecutor() as pool:  # nothing is traced or compiled while kernels are counted: that runs kernels too
            sides = list(pool.map(_compile, several))
        for (row, name), side in zip(several, sides, strict=True):
            try:
                if isinstance(side, Exception):
                    raise side
                calls = side.calls(jax.jit(row.draw)())
                for call in calls.values():  # the first call of an executable does more
                    jax.block_until_ready((call(), mark(eight), flush(large)))
            except Exception as error:  # it may not fit
                say("left out", row.name, name, in_short(error))
                continue
            for phase, call in calls.items():
                counted(call)
                say("case", row.name, name, phase)
            del calls, call  # and with them the arrays
    counted()


def _compile(case: tuple[Row, str]) -> compiled.Side | Exception:
    try:
        return compiled.compile_side(*case, SIDES[case[1]](case[0]))
    except Exception as error:
        return error


def measure(out: pathlib.Path, seconds: float) -> None:
    """Run the cases under ncu and write what it counted."""
    began, log = time.monotonic(), out.with_suffix(".csv")
    options = "--clock-control none --cache-control none --profile-from-start off --target-processes application-only --csv --page raw"
    options += f" --print-units base --metrics {','.join(METRICS.values())}"
    command = ["ncu", *options.split(), "--log-file", str(log), sys.executable, __file__, "run", "--seconds", str(seconds)]
    quick = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"  # products by cuBLAS: a search for faster ones takes minutes
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "XLA_FLAGS": quick}).stdout
    said = lambda kind: [json.loads(line.removeprefix(kind)) for line in shown.splitlines() if line.startswith(kind)]
    where = {"command": f"python benchmarks/counters.py measure --seconds {seconds:g}", "XLA_FLAGS": quick, "ncu": options}
    results = {"provenance": provenance() | where, "left_out": said("left out"), "cases": []}
    head, _, *kernels = csv.reader(line for line in log.read_text().splitlines() if line.startswith('"'))
    passes = sorted({line[n] for n, name in enumerate(head) if name == "profiler__replayer_passes" for line in kernels})  # ["1"]
    results["provenance"] |= {"passes": passes, "seconds": round(time.monotonic() - began)}
    columns = [head.index(name) for name in ("Kernel Name", *METRICS.values())]
    counted = split([[line[column] for column in columns] for line in kernels])
    for (row, side, phase), kernels, after in zip(said("case"), counted[1::2], counted[2::2], strict=True):
        left = sum(kernel["written"] for kernel in after)
        results["cases"].append({"row": row, "side": side, "phase": phase, "kernels": kernels, "left_in_cache": left})
    save(results, out)
    log.unlink()


def split(kernels: list[list[str]]) -> list[list[dict]]:
    """Kernels between marks: the sum and a case in turns, the sum first."""
    parts: list[list[dict]] = []
    for name, *values in kernels:
        if "xor" in name:
            parts.append([])
        else:
            parts[-1].append({"kernel": name, **{key: float(value.replace(",", "")) for key, value in zip(METRICS, values, strict=True)}})
    return [part for part in parts if part]


# --------------------------------------------------------------------------------------------------------------- report
def _problem(row: Row):
    sizes = {"batch": row.batch, "num_heads": row.num_heads, "head_dim": row.head_dim}
    return io_model.make_problem(row.length, **sizes, dtype=row.dtype)


def asked(row: Row) -> int:
    """Bytes that our forward reads in all, whichever memory they come from: query once, keys and values for each tile of rows."""
    rows = ROWS_OF_A_TILE[row.head_dim] if row.density is None else BLOCK
    return io_model.flash_forward(_problem(row), (rows, BLOCK), density=row.density).read


def predict(row: Row, side: str, phase: str) -> tuple[int, int]:
    """Bytes to HBM behind the H200's cache: as the model has it, and, of the standard computation, with float32 scores as XLA stores them.

    XLA's forward writes and reads scores in float32 and weights in 16 bits, 12 bytes a score where Algorithm 0 has 4 passes of 2. Its
    backward writes dP, reads scores and dP twice, writes P and dS and reads them in three products: 24 bytes where Algorithm 3 has 14.
    """
    problem = _problem(row)
    standard = {"forward": io_model.standard_forward, "backward": io_model.standard_backward}
    flash = {"forward": io_model.flash_forward, "backward": io_model.flash_backward}
    cost = standard[phase](problem) if side == "jax.nn" else flash[phase](problem, (BLOCK, BLOCK), density=row.density)
    model = io_model.behind_cache(cost, io_model.DEVICES["h200"])
    wider = {"forward": 12 - 8, "backward": 24 - 14}[phase] if side == "jax.nn" else 0
    return model, model + wider * row.batch * row.num_heads * row.length**2


def table(*files: dict) -> list[dict]:
    """Of each case of these results: bytes measured and predicted. What was counted twice is taken from the later file."""
    by_name = {row.name: row for row in rows()}
    found = {}
    for results in sorted(files, key=lambda results: results["provenance"]["date"]):
        found |= {(case["row"], case["side"], case["phase"]): case for case in results["cases"]}
    order = lambda case: (list(by_name).index(case["row"]), SIDE_NAMES.index(case["side"]))
    lines = []
    for case in sorted(found.values(), key=order):
        row = by_name[case["row"]]
        model, stored = predict(row, case["side"], case["phase"])
        read = sum(kernel["read"] for kernel in case["kernels"])
        written = sum(kernel["written"] for kernel in case["kernels"]) + case["left_in_cache"]
        lines.append({"case": case, "row": row, "read": read, "written": written, "model": model, "predicted": stored})
    return lines


def markdown(lines: list[dict]) -> str:
    """A table a phase."""
    text = []
    for phase in ("forward", "backward"):
        names = ("batch", "length", "head_dim", "density", "side", "read, MB", "written", "sum", "model", "as stored", "sum / as stored")
        text += ["", f"### {phase.capitalize()}", "", *_head(names)]
        for x in lines:
            if x["case"]["phase"] == phase:
                measured = x["read"] + x["written"]
                sums = [f"{b / 1e6:.0f}" for b in (x["read"], x["written"], measured, x["model"], x["predicted"])]
                text.append(_line([*_where(x), *sums, f"{measured / x['predicted']:.2f}"]))
    return "\n".join(text[1:]) + "\n"


def cache_markdown(lines: list[dict]) -> str:
    """What the fused forwards read from the L2 cache, and what of it the cache had to fetch."""
    names = (
        "batch",
        "length",
        "head_dim",
        "density",
        "side",
        "tiles x bytes, MB",
        "read from L2",
        "from HBM",
        "not from HBM, %",
        "hits, %",
        "crossed, MB",
    )
    text = _head(names)
    for x in lines:
        kernels = x["case"]["kernels"]
        if x["case"]["phase"] == "forward" and x["case"]["side"] != "jax.nn" and "asked" in kernels[0]:
            of = lambda name, kernels=kernels: sum(kernel[name] for kernel in kernels)
            model = f"{asked(x['row']) / 1e6:.0f}" if x["case"]["side"] == "flash_jax" else ""
            bytes_ = [f"{b / 1e6:.0f}" for b in (SECTOR * of("asked"), x["read"])]
            shares = [f"{100 * share:.0f}" for share in (1 - x["read"] / (SECTOR * of("asked")), of("hits") / of("lookups"))]
            text.append(_line([*_where(x), model, *bytes_, *shares, f"{SECTOR * of('crossed') / 1e6:.0f}"]))
    return "\n".join(text) + "\n"


def _where(x: dict) -> list:
    row = x["row"]
    return [row.batch, row.length, row.head_dim, "" if row.density is None else f"{row.density:g}", x["case"]["side"]]


def _head(names: tuple[str, ...]) -> list[str]:
    return [_line(names), "|---" * len(names) + "|"]


def _line(cells: Iterable) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def plot(lines: list[dict], path: pathlib.Path) -> None:
    """Measured points over predicted lines, against the length and against the density."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colors = {"jax.nn": "#d1495b", "jax.nn:cudnn": "#8d6a9f", "flash_jax": "#1f6fb4"}
    labels = {"jax.nn": "standard (jax.nn)", "jax.nn:cudnn": "cuDNN", "flash_jax": "flash_jax"}
    sizes = {"jax.nn": 6, "jax.nn:cudnn": 9, "flash_jax": 6}  # cuDNN's a ring, which shows around the same number
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for (left, right), phase in zip(axes, ("forward", "backward"), strict=True):
        for side, color in colors.items():
            of = [x for x in lines if x["case"]["side"] == side and x["case"]["phase"] == phase]
            plain = [x for x in of if x["row"].density is None and x["row"].head_dim == 128]
            sparse = [x for x in of if x["row"].density is not None]
            fill = "none" if side == "jax.nn:cudnn" else "full"
            for axis, points, key in ((left, plain, "length"), (right, sparse, "density")):
                at = [getattr(x["row"], key) for x in points]
                if not points:
                    continue
                measured = [(x["read"] + x["written"]) / 1e9 for x in points]
                axis.plot(at, measured, "o", color=color, markersize=sizes[side], fillstyle=fill, label=f"{labels[side]}, measured")
                if side != "jax.nn:cudnn":  # the model's line is that of flash_jax
                    axis.plot(at, [x["predicted"] / 1e9 for x in points], "-", color=color, label=f"{labels[side]}, predicted")
                axis.set_xscale("log", base=2)
                axis.set_xticks(at, [f"{n:g}" for n in at])
        left.set(title=f"{phase}, head_dim 128, {TOKENS} tokens", xlabel="length")
        left.set_yscale("log", base=2)
        right.set(title=f"{phase}, block-sparse, length {TOKENS}, head_dim 128", xlabel="density")
        right.set_ylim(bottom=0)
        for axis in (left, right):
            axis.set_ylabel("GB to and from HBM")
            axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis.grid(alpha=0.25)
            if axis.lines:
                axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "report"):
        commands.add_parser(name).add_argument("file", type=pathlib.Path)
    commands.add_parser("run", help="what ncu watches")
    for command in (commands.choices["measure"], commands.choices["run"]):
        command.add_argument("--seconds", type=float, default=math.inf, help="begin no case after this time")
    o = parser.parse_args()
    if o.command == "run":
        run(o.seconds)
    elif o.command == "measure":
        measure(o.file, o.seconds)
    else:
        lines = table(json.loads(o.file.read_text()))
        sys.stdout.write(markdown(lines) + cache_markdown(lines))
        plot(lines, o.file.with_suffix(".png"))


if __name__ == "__main__":
    main()
