"""The FlashAttention paper's tables and curves on this hardware, from results files; `pages` puts them into docs/paper.md."""

import pathlib

import counters

from flash_jax import io_model
from flash_jax.bench.measure import PHASES
from flash_jax.bench.presets import PRESETS
from flash_jax.bench.rows import Row

LABEL = {"flash": "flash_jax", "jax_xla": "jax.nn (xla)", "jax_cudnn": "jax.nn (cudnn)", "tokamax": "tokamax"}
SIDES = {"jax.nn": "standard", "jax.nn:cudnn": "cuDNN", "flash_jax": "flash_jax"}
COLORS = {"jax.nn": "#d1495b", "jax.nn:cudnn": "#8d6a9f", "flash_jax": "#1f6fb4"}
CURVES = {"full": {}, "causal": {"is_causal": True}, "dropout 0.1": {"dropout": 0.1}}
# Figure 2, left, of arXiv 2205.14135: the version of June 2022, and in brackets the later one.
PRINTED = {"GFLOP": ("66.6", "75.2"), "HBM, GB": ("40.3 (35.3)", "4.4 (4.4)"), "ms": ("41.7 (35.1)", "7.3 (11.7)")}


def parts(files: dict[str, dict]) -> dict[str, str]:
    """The generated parts of the page, by name; those whose results file is missing say so."""
    found = dict.fromkeys(("figure2", "lengths", "crossover", "memory", "sparse", "counters"), "Not measured yet.")
    if "h200_paper" in files:
        results = files["h200_paper"]
        found |= {"lengths": lengths(results), "crossover": crossover(results), "memory": memory(results)}
        found["figure2"] = figure2(results, counters.table(*counted(files)))
    if "h200_features" in files:
        found["sparse"] = sparse(files["h200_features"])
    return found


def counted(files: dict[str, dict]) -> list[dict]:
    """The results of hardware counters."""
    return [results for name, results in files.items() if name.startswith("h200_counters")]


def rows_of(results: dict) -> dict[Row, dict]:
    """The sides of each row that was run."""
    by_name = {record["row"]: record["sides"] for record in results["rows"]}
    return {row: by_name[row.name] for row in PRESETS[results["preset"]]() if row.name in by_name}


def with_standard(sides: dict) -> dict:
    """The sides by the names of the tables: with dropout, which `jax.nn` has not, the standard computation is the side `standard`."""
    return sides | {"jax.nn": sides["standard"]} if "forward" in sides.get("standard", {}) else sides


def both(side: dict) -> float | None:
    """Seconds of forward and backward."""
    times = [side.get(phase, {}).get("median") for phase in PHASES]
    return None if None in times else sum(times)


def kept(side: dict, row: Row) -> float | None:
    """Bytes beyond the inputs while a step of training runs: what the forward keeps, and the backward's temporary memory."""
    if "backward" not in side:
        return None
    inputs = 3 * row.batch * row.length * row.num_heads * row.head_dim * 2
    return side["residuals"] - inputs + side["backward"]["memory"]


def table(head: list[str], lines: list[list]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, ["---"] * len(head), *lines))


def number(value: float | None, form: str) -> str:
    """Formatted, or empty."""
    return "" if value is None else format(value, form)


def figure2(results: dict, bytes_moved: list[dict]) -> str:
    """GPT-2 medium's attention, forward and backward."""
    row, sides = counters.GPT2_MEDIUM, rows_of(results)[counters.GPT2_MEDIUM]
    problem = io_model.make_problem(row.length, batch=row.batch, num_heads=row.num_heads, head_dim=row.head_dim, dtype=row.dtype)
    standard = [io_model.standard_forward(problem), io_model.standard_backward(problem)]
    flash = [of(problem, (128, 128)) for of in (io_model.flash_forward, io_model.flash_backward)]
    flops = {name: sum(cost.flops for cost in (standard if name == "jax.nn" else flash)) / 1e9 for name in SIDES}
    moved = dict.fromkeys(SIDES, 0.0)
    for x in bytes_moved:
        if x["row"] == row:
            moved[x["case"]["side"]] += (x["read"] + x["written"]) / 1e9
    ours = {"GFLOP": flops, "HBM, GB": moved, "ms": {name: (both(sides[name]) or 0) * 1e3 for name in SIDES}}
    head = ["", "paper: standard", "paper: FlashAttention", *SIDES.values()]
    cell = lambda value: f"{value:.1f}" if value else "not measured"
    return table(head, [[what, *printed, *(cell(ours[what][name]) for name in SIDES)] for what, printed in PRINTED.items()])


def curve(results: dict, **words) -> list[tuple[Row, dict]]:
    """The rows of one curve, by length."""
    wanted = {"is_causal": False, "dropout": 0.0} | words
    rows = [(row, with_standard(sides)) for row, sides in rows_of(results).items() if row != counters.GPT2_MEDIUM]
    return [(row, sides) for row, sides in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def lengths(results: dict) -> str:
    """Forward and backward, in milliseconds, against the length."""
    lines = []
    for kind, words in CURVES.items():
        for row, sides in curve(results, **words):
            times = {name: both(sides.get(name, {})) for name in SIDES}
            over = {name: times[name] / times["flash_jax"] for name in ("jax.nn", "jax.nn:cudnn") if times[name] and times["flash_jax"]}
            cells = [number(times[name] and times[name] * 1e3, ".3f") for name in SIDES]
            lines.append([kind, row.length, *cells, *(number(over.get(name), ".2f") for name in ("jax.nn", "jax.nn:cudnn"))])
    return table(["", "length", *(f"{name}, ms" for name in SIDES.values()), "over standard", "over cuDNN"], lines)


def crossover(results: dict) -> str:
    """Of each curve the lengths at which the standard computation is as fast or faster."""
    lines = []
    for kind, words in CURVES.items():
        times = [(row.length, both(sides["flash_jax"]), both(sides.get("jax.nn", {}))) for row, sides in curve(results, **words)]
        timed = [(length, flash, standard) for length, flash, standard in times if flash is not None and standard is not None]
        slower = [length for length, flash, standard in timed if standard <= flash]
        shortest = min((length for length, *_ in timed), default=None)
        if shortest is None:
            lines.append(f"* {kind}: the standard computation has no time in this run.")
        elif slower:
            lines.append(f"* {kind}: the standard computation is as fast or faster at {', '.join(map(str, slower))}.")
        else:
            lines.append(f"* {kind}: flash_jax is faster at every length measured; the shortest is {shortest}.")
    return "\n".join(lines)


def memory(results: dict) -> str:
    """Memory of a step beyond the inputs against the length; every row has the same number of tokens."""
    lines = [
        [row.length, *(number(b and b / 1e6, ",.0f") for b in (kept(sides[name], row) for name in SIDES))] for row, sides in curve(results)
    ]
    return table(["length", *(f"{name}, MB" for name in SIDES.values())], lines)


def sparse(results: dict) -> str:
    """Milliseconds against the density."""
    lines, dense = [], None
    for row, sides in rows_of(results).items():
        if row.density is not None:
            times = [sides["flash_jax"][phase]["median"] for phase in PHASES]
            dense = dense or times
            speedups = [f"{a / b:.2f}" for a, b in zip(dense, times, strict=True)]
            lines.append([f"{row.density:g}", *(f"{t * 1e3:.3f}" for t in times), *speedups, f"{1 / row.density:g}"])
    return table(["density", "forward, ms", "backward, ms", "forward, times faster", "backward, times faster", "ideal"], lines)


def plots(files: dict[str, dict], folder: pathlib.Path) -> None:
    """paper_lengths.png: time and memory against the length; paper_sparse.png: speed against the density."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    if "h200_paper" in files:
        results = files["h200_paper"]
        figure, (time, space) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
        for (kind, words), style in zip(CURVES.items(), ("o-", "s--", "^:"), strict=True):
            for name, color in COLORS.items():
                points = [(row.length, t * 1e3) for row, sides in curve(results, **words) if (t := both(sides[name])) is not None]
                if points:
                    time.loglog(*zip(*points, strict=True), style, base=2, color=color, label=f"{SIDES[name]}, {kind}", markersize=4)
        for name, color in reversed(COLORS.items()):
            points = [(row.length, b / 1e6) for row, sides in curve(results) if (b := kept(sides[name], row)) is not None]
            under = {"linewidth": 6, "alpha": 0.4} if name == "flash_jax" else {}  # cuDNN's line may be the same: both show
            space.loglog(*zip(*points, strict=True), "o-", base=2, color=color, label=SIDES[name], markersize=4, **under)
        time.set(title="forward and backward, 16384 tokens, 16 heads of 64", xlabel="length", ylabel="ms")
        space.set(title="memory beyond the inputs", xlabel="length", ylabel="MB")
        _finish(pyplot, figure, (time, space), folder / "paper_lengths.png", [row.length for row, _ in curve(results)])
    if "h200_features" in files:
        results = files["h200_features"]
        rows = [(row.density, sides["flash_jax"]) for row, sides in rows_of(results).items() if row.density is not None]
        figure, axis = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
        for phase, style in zip(PHASES, ("o-", "s--"), strict=True):
            shares = [side[phase]["median"] / rows[0][1][phase]["median"] for _, side in rows]
            axis.loglog([density for density, _ in rows], shares, style, base=2, color=COLORS["flash_jax"], label=phase)
        axis.loglog([density for density, _ in rows], [density for density, _ in rows], "k:", base=2, label="ideal")
        axis.set(title="block-sparse attention, 16384 tokens, 16 heads of 128", xlabel="density", ylabel="time, of density 1")
        _finish(pyplot, figure, (axis,), folder / "paper_sparse.png", [density for density, _ in rows])


def _finish(pyplot, figure, axes, path: pathlib.Path, ticks: list) -> None:
    for axis in axes:
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
