"""Results as Markdown and as a plot, and one results file against another."""

import json
import pathlib

from flash_jax.bench.measure import PHASES, best_peer, geometric_mean


def save(results: dict, path: pathlib.Path) -> None:
    """The file is whole at every moment: a run may be interrupted at any."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)


def machine(where: dict) -> str:
    """By the provenance: the device, or the processor where that is the device."""
    return where["processor"] if where["platform"] == "cpu" else where["device"]


def line(record: dict) -> str:
    """A row in short: the errors are allowed, and how many times faster than each peer."""
    words = [record["row"]]
    for phase in PHASES:
        over = record["sides"].get("flash_jax", {}).get(phase, {}).get("over", {})
        words += [phase, *(f"{ratio['ratio']:.2f} x {peer}" for peer, ratio in over.items())] if over else []
    return " ".join(words + [f"refused: {name}" for name, side in record["sides"].items() if "refused" in side])


def markdown(results: dict) -> str:
    """A table a phase: median milliseconds, p10 to p90, and how we stand against the fastest peer."""
    where = results["provenance"]
    lines = [f"# {results['preset']} on {where['device']}", ""]
    lines += [
        f"* {name}: {where[name]}"
        for name in ("date", "command", "XLA_FLAGS", "processor", "gpu", "jax", "python", "libraries")
        if where.get(name)
    ]
    for phase in PHASES:
        table = [text for record in results["rows"] for text in _lines(record, phase)]
        if not table:
            continue
        lines += ["", f"## {phase.capitalize()}", ""]
        lines += ["| row | side | ms (p10 to p90) | kernels, ms | TFLOP/s | memory, MB | largest error | over the best peer |"]
        lines += ["|---|---|---|---|---|---|---|---|", *table]
    lines += ["", "## Against each peer", "", *ratios(results)]
    lines += ["", "## Where we lose", ""]
    ours = [record for record in results["rows"] if "flash_jax" in record["sides"]]
    compared = any(best_peer(record, "flash_jax", phase) for record in ours for phase in PHASES)
    nowhere = "Nowhere in these rows: no ratio to the best peer is below 1.00." if compared else "Nothing was compared: no peer has a time."
    return "\n".join([*lines, *(lost(results) or [nowhere]), ""])


def _lines(record: dict, phase: str):
    for name, side in record["sides"].items():
        if "refused" in side:
            yield f"| {record['row']} | {name} | refused: {side['refused'].replace('|', '/')} | | | | | |"
            continue
        if phase not in side:
            continue
        s = side[phase]
        memory = "" if s["memory"] is None else f"{s['memory'] / 1e6:.1f}"
        kernels = "" if s.get("kernels") is None else f"{s['kernels'] * 1e3:.3f}"
        peer = best_peer(record, name, phase) if name.startswith("flash_jax") else None
        over = f"{peer[1]['ratio']:.2f} ({peer[1]['p10']:.2f} to {peer[1]['p90']:.2f}), {peer[0]}" if peer else ""
        times = f"{s['median'] * 1e3:.3f} ({s['p10'] * 1e3:.3f} to {s['p90'] * 1e3:.3f})"
        error = max(side["errors"].values())
        yield f"| {record['row']} | {name} | {times} | {kernels} | {s['tflops']:.3g} | {memory} | {error:.1e} | {over} |"


def ratios(results: dict) -> list[str]:
    """A table: how many times faster than each peer, in the geometric mean and at worst."""
    lines = ["| phase | peer | rows | geometric mean | lowest | rows below 1.00 |", "|---|---|---|---|---|---|"]
    for phase in PHASES:
        found: dict[str, list[float]] = {}
        for record in results["rows"]:
            if "flash_jax" not in record["sides"]:
                continue
            over = record["sides"]["flash_jax"].get(phase, {}).get("over", {})
            best = best_peer(record, "flash_jax", phase)
            for peer, ratio in [*over.items(), *([("the best peer", best[1])] if best else [])]:
                found.setdefault(peer, []).append(ratio["ratio"])
        for peer, values in found.items():
            below = sum(value < 1 for value in values)
            lines.append(f"| {phase} | {peer} | {len(values)} | {geometric_mean(values):.3f} | {min(values):.2f} | {below} |")
    return lines


def lost(results: dict) -> list[str]:
    """Each row below 1.00 of the best peer. A tie is a median of 0.97 at least whose p10 to p90 has 1.00 in it."""
    lines = []
    for record in results["rows"]:
        for phase in PHASES:
            peer = best_peer(record, "flash_jax", phase) if "flash_jax" in record["sides"] else None
            if peer and peer[1]["ratio"] < 1:
                low, middle, high = (peer[1][name] for name in ("p10", "ratio", "p90"))
                tie = ", a tie" if middle >= 0.97 and low <= 1 <= high else ""
                lines.append(f"* {record['row']}, {phase}: {middle:.2f} of {peer[0]} ({low:.2f} to {high:.2f}){tie}")
    return lines


def plot(results: dict, path: pathlib.Path) -> None:
    """How many times faster than the fastest peer, row by row, with p10 to p90."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [record for record in results["rows"] if "flash_jax" in record["sides"]]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    for shift, phase in ((-0.17, "forward"), (0.17, "backward")):
        points = [(n, peer[1]) for n, record in enumerate(rows) if (peer := best_peer(record, "flash_jax", phase))]
        at, ratios = [n + shift for n, _ in points], [p["ratio"] for _, p in points]
        spread = [[max(p["ratio"] - p["p10"], 0) for _, p in points], [max(p["p90"] - p["ratio"], 0) for _, p in points]]
        axes.barh(at, ratios, 0.32, xerr=spread, label=phase, ecolor="0.3")
    axes.axvline(1, color="k", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [record["row"] for record in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # from the top down
    axes.set(
        xlabel="times faster than the fastest peer (bar: median, line: p10 to p90)",
        title=f"{results['preset']}, {machine(results['provenance'])}",
    )
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def compare(old: dict, new: dict) -> str:
    """What changed between two results files, row by row; a difference is claimed only where the spreads do not overlap."""
    devices = [results["provenance"]["device"] for results in (old, new)]
    lines = [f"old: {old['provenance']['date']} on {devices[0]}", f"new: {new['provenance']['date']} on {devices[1]}"]
    if devices[0] != devices[1]:
        raise ValueError(f"the files are from different devices, {devices[0]} and {devices[1]}: their times say nothing about the code.")
    before = {record["row"]: record["sides"] for record in old["rows"]}
    ratios = []
    for record in new["rows"]:
        for name, side in record["sides"].items():
            earlier = before.get(record["row"], {}).get(name)
            if earlier is None:
                lines.append(f"{record['row']}, {name}: new")
                continue
            for phase in PHASES:
                a, b = earlier.get(phase), side.get(phase)
                if a is None or b is None:
                    was, now = earlier.get("refused", "timed"), side.get("refused", "timed")
                    lines.append(f"{record['row']}, {name}, {phase}: was {was}; is {now}")
                    continue
                ratio = a["median"] / b["median"]
                ratios.append(ratio)
                verdict = "faster" if b["p90"] < a["p10"] else "slower" if b["p10"] > a["p90"] else "no difference shown"
                lines.append(
                    f"{record['row']}, {name}, {phase}: {a['median'] * 1e3:.3f} -> {b['median'] * 1e3:.3f} ms, {ratio:.2f}x, {verdict}"
                )
    kept = {record["row"] for record in new["rows"]}
    lines += [f"{row}: gone" for row in before if row not in kept]
    if ratios:
        mean = f"geometric mean of {len(ratios)}: {geometric_mean(ratios):.3f}x."
        lines.append(f"{mean} Clocks differ between runs; to decide, run both sides in one.")
    return "\n".join(lines) + "\n"
