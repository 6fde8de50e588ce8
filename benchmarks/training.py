"""Whole training steps of a GPT with one attention beside another: tokens a second, memory, and loss curves.

    python benchmarks/training.py speed benchmarks/results/training.json       # GPT-2 medium's size; --tiny to try it on any machine
    python benchmarks/training.py curves benchmarks/results/loss_curves.json   # and a plot beside the file
    python benchmarks/training.py both benchmarks/results                      # the curves while the steps compile

The model is that of examples/train_gpt.py. Steps that are compared take turns in one process; each such process compiles beside the others,
and then they are timed one after the other.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

from paper import LABEL
from train_gpt import ATTENTION, PRESETS, Config, Training, memory_limit, read_text, sample_batch, temporary_bytes

from flash_jax.bench import turns
from flash_jax.bench.measure import in_short
from flash_jax.bench.report import save
from flash_jax.bench.sides import PACKAGES, call_tokamax
from flash_jax.bench.timing import provenance

ROUNDS = 5
H200 = PRESETS["h200"]
HEADS = ((16, 64), (8, 128))
LENGTHS = (1024, 4096, 16384)
CURVES = dataclasses.replace(H200, heads=8, head_dim=128, tokens=4096)
SEEDS = (0, 1)
SETTINGS = {
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",  # products by cuBLAS, without a search
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",  # the rest is for the processes that wait
}
if importlib.util.find_spec(PACKAGES["tokamax"]):
    ATTENTION["tokamax"] = call_tokamax


def tiny(config: Config) -> Config:
    """The same program in seconds on a processor."""
    return dataclasses.replace(config, layers=2, heads=2, head_dim=16, seq=min(config.seq // 16, 256), tokens=256, steps=8)


def names() -> list[str]:
    """Every attention that this machine may run."""
    return [name for name in ATTENTION if name != "jax_cudnn" or jax.default_backend() == "gpu"]


# ----------------------------------------------------------------------------------------------------------------- speed
def groups(small: bool) -> list[Config]:
    """Steps that are compared, one attention of each."""
    configs = [dataclasses.replace(H200, heads=h, head_dim=d, seq=n) for (h, d), n in itertools.product(HEADS, LENGTHS)]
    if small:
        configs = list(dict.fromkeys(tiny(config) for config in configs))
    return [dataclasses.replace(config, remat=remat) for config in configs for remat in (False, True)]


def speed(small: bool, curves_file: pathlib.Path | None = None) -> Iterator[list[dict]]:
    """Tokens a second of each attention, with and without recomputation; a step that does not fit is a result too."""
    words = ["--tiny"] * small
    command = lambda *words: [sys.executable, __file__, *words]
    drawing = [subprocess.Popen(command("curves", str(curves_file), *words))] if curves_file is not None else []
    compiling = [command("group", str(n), *words) for n in range(len(groups(small)))]
    for line in turns.in_turn(compiling, lambda: [process.wait() for process in drawing]):
        if line.startswith("["):
            yield json.loads(line)


def group(config: Config) -> list[dict]:
    """The steps of one group, timed when standard input says so."""
    variants = [dataclasses.replace(config, attention=name) for name in names()]
    with ThreadPoolExecutor() as pool:
        begin = pool.submit(lambda: Training.begin.lower(Training(config), 0).compile())
        steps = dict(zip(variants, pool.map(_compile, variants), strict=True))
    turns.ready()
    batch = np.random.default_rng(0).integers(0, 256, (_batch(config), config.seq + 1), np.int32)
    return _race(variants, steps, begin.result()(0), batch)


def line(row: dict) -> str:
    """A result in short."""
    how = f"{row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else row["outcome"]
    return f"length {row['seq']}{', recomputed' if row['remat'] else ''}, {LABEL[row['attention']]}: {how}"


def _batch(config: Config) -> int:
    return max(config.tokens // config.seq, 1)


def _compile(config: Config):
    try:
        return Training(config).compiled_step(_batch(config))
    except Exception as error:  # out of memory, mostly; whatever it is, it is a result
        return in_short(error)


def _race(variants: list[Config], steps: dict, carry, batch: np.ndarray) -> list[dict]:
    """Steps in turns, in shuffled order, all on the same parameters."""
    rows, taken = [], {}
    for config in variants:
        step = steps[config]
        row = {"heads": config.heads, "head_dim": config.head_dim, "layers": config.layers, "seq": config.seq, "remat": config.remat}
        row |= {"tokens": batch.size - len(batch), "attention": config.attention, "outcome": "ran"}
        if isinstance(step, str):
            row["outcome"] = step
        else:
            analysis = step.memory_analysis()
            row["temporary_bytes"] = temporary_bytes(step)
            if (needed := analysis.temp_size_in_bytes + analysis.argument_size_in_bytes) > memory_limit():
                row["outcome"] = f"out of memory: needs {needed / 1e9:.1f} of {memory_limit() / 1e9:.1f} GB"
            else:
                taken[config] = []
        rows.append(row)
    for config, row in zip(variants, rows, strict=True):  # a first step each, which may find that there is too little memory after all
        if config in taken:
            try:
                *carry, loss = steps[config](*carry, batch)
                loss.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                row["outcome"] = in_short(error)
                del taken[config]
                carry = Training(config).begin(0)
    for _ in range(ROUNDS):
        for config in random.sample(list(taken), len(taken)):
            start = time.perf_counter()
            *carry, loss = steps[config](*carry, batch)
            loss.block_until_ready()
            taken[config].append(time.perf_counter() - start)
    for config, row in zip(variants, rows, strict=True):
        if config in taken:
            row["seconds"] = taken[config]
            row["tokens_per_second"] = row["tokens"] / float(np.median(taken[config]))
    return rows


# ----------------------------------------------------------------------------------------------------------------- curves
def curves(config: Config) -> list[dict]:
    """The loss of every step, for each attention and seed; the same seed means the same parameters and the same text."""
    text, _ = read_text(None)
    found = []
    for name in ("flash", "jax_xla"):
        training = Training(dataclasses.replace(config, attention=name))
        step = training.compiled_step(_batch(config))
        for seed in SEEDS:
            carry, rng, losses = training.begin(seed), np.random.default_rng(seed), []
            for _ in range(config.steps):
                *carry, loss = step(*carry, sample_batch(text, rng, _batch(config), config.seq))
                losses.append(loss)
            found.append({"attention": name, "seed": seed, "losses": [float(loss) for loss in losses]})
            sys.stderr.write(f"{name}, seed {seed}: {found[-1]['losses'][0]:.3f} -> {np.mean(found[-1]['losses'][-30:]):.3f}\n")
    return found


def differences(runs: list[dict]) -> dict[str, float]:
    """Root mean square over the steps: between two implementations with one seed, and between two seeds with one implementation."""
    losses = {(run["attention"], run["seed"]): np.array(run["losses"]) for run in runs}
    rms = lambda pairs: float(np.sqrt(np.mean([(losses[a] - losses[b]) ** 2 for a, b in pairs])))
    return {
        "implementations": rms([(("flash", seed), ("jax_xla", seed)) for seed in SEEDS]),
        "seeds": rms([((name, SEEDS[0]), (name, SEEDS[1])) for name in ("flash", "jax_xla")]),
    }


def plot(results: dict, path: pathlib.Path) -> None:
    """All curves over each other."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run in results["runs"]:
        flash, seed = run["attention"] == "flash", run["seed"]
        look = {"linewidth": 4 if flash else 1, "alpha": 0.35 if flash else 1, "color": ("#1f6fb4", "#d1495b")[seed]}
        axes.plot(run["losses"], label=f"{LABEL[run['attention']]}, seed {seed}", **look)
    apart = results["differences"]
    c = results["config"]
    shape = f"{c['layers']} layers, {c['heads']} heads of {c['head_dim']}, length {c['seq']}, {c['dtype']}"
    axes.set(
        xlabel="step",
        ylabel="training loss (nats a byte)",
        title=f"{shape}\nrms difference {apart['implementations']:.4f} between implementations, {apart['seeds']:.4f} between seeds",
    )
    axes.title.set_fontsize(9)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_speed(path: pathlib.Path, small: bool, curves_file: pathlib.Path | None = None) -> None:
    """Every group as it comes."""
    results = {"rows": []}
    for rows in speed(small, curves_file):
        results["rows"] += rows
        sys.stderr.write("".join(f"{row['heads']} x {row['head_dim']} {line(row)}\n" for row in rows))
        where = provenance() | {"command": "python benchmarks/training.py speed"}
        save({"provenance": where} | results, path)


def write_curves(path: pathlib.Path, config: Config) -> None:
    """The curves and their plot."""
    runs = curves(config)
    where = provenance() | {"command": "python benchmarks/training.py curves"}
    results = {"provenance": where, "config": dataclasses.asdict(config), "differences": differences(runs), "runs": runs}
    save(results, path)
    plot(results, path.with_suffix(".png"))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("speed", "curves", "both", "group"))
    parser.add_argument("file", type=pathlib.Path, help="results file; for both a folder; for group, which speed starts, its number")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    o = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if o.command == "speed":
        write_speed(o.file, o.tiny)
    elif o.command == "curves":
        write_curves(o.file, tiny(CURVES) if o.tiny else CURVES)
    elif o.command == "both":
        write_speed(o.file / "training.json", o.tiny, o.file / "loss_curves.json")
    else:
        sys.stdout.write(json.dumps(group(groups(o.tiny)[int(str(o.file))])) + "\n")


if __name__ == "__main__":
    main()
