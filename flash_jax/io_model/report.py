"""The model's numbers for one problem as records, as text and as a plot."""

import dataclasses
import pathlib
from typing import Any

from flash_jax.io_model.algorithms import (
    algorithm_1,
    algorithm_4,
    flash_backward,
    flash_forward,
    standard_backward,
    standard_forward,
)
from flash_jax.io_model.count import Cost, with_length
from flash_jax.io_model.device import Device, behind_cache, bound, gain_from, pair, seconds, speedup
from flash_jax.io_model.limits import theta_flash, theta_holds, theta_standard
from flash_jax.problem import Problem

LENGTHS = [2**power for power in range(7, 18)]  # of the plot


@dataclasses.dataclass(frozen=True)
class Request:
    """What is modelled: `sram` for the paper's tiles, `on_chip` for the tiles here unless `block_sizes` says them; `density` or None."""

    problem: Problem
    sram: int
    on_chip: int
    block_sizes: tuple[int, int] | None = None
    density: float | None = None

    def forward(self) -> tuple[Cost, Cost, Cost]:
        """Standard, the paper's order, the order here."""
        flash = flash_forward(self.problem, self.block_sizes, sram=self.on_chip, density=self.density)
        return standard_forward(self.problem), algorithm_1(self.problem, self.sram, self.density), flash

    def backward(self) -> tuple[Cost, Cost, Cost]:
        """Likewise."""
        flash = flash_backward(self.problem, self.block_sizes, sram=self.on_chip, density=self.density)
        return standard_backward(self.problem), algorithm_4(self.problem, self.sram, self.density), flash


def records(request: Request, devices: list[Device]) -> dict:
    """Everything, ready for JSON; bytes, FLOPs and seconds of the whole batch and all heads."""
    p = request.problem
    sizes = {f: getattr(p, f) for f in ("batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim")}
    return {
        "problem": sizes | {"dtype": p.dtype.name, "mask": _mask(p), "density": request.density},
        "sram": request.sram,
        "block_sizes": request.block_sizes,
        "m_over_d2": request.sram / p.dtype.itemsize / max(p.head_dim, p.v_head_dim) ** 2,
        "theorem_2_holds": theta_holds(p, request.sram),
        "score_matrix_bytes": p.batch * p.num_heads * p.q_len * p.kv_len * p.dtype.itemsize,
        "forward": [_algorithm(cost, request) for cost in request.forward()],
        "backward": [_algorithm(cost, request) for cost in request.backward()],
        "devices": [_on_device(request, device) for device in devices] if p.dtype.itemsize == 2 else [],
    }


def _mask(problem: Problem) -> str:
    """The interval rule of the mask, by its fields."""
    if problem.mask.hides_nothing:
        return "all"
    fields = dataclasses.asdict(problem.mask.rule) if problem.mask.rule else {}
    return "the interval " + ", ".join(f"{name}={value}" for name, value in fields.items() if value is not None and name != "kv_len")


def _algorithm(cost: Cost, request: Request) -> dict:
    p = request.problem
    theta = theta_standard(p) if cost.name.startswith("standard") else theta_flash(p, request.sram, request.density or 1.0)
    return {
        "name": cost.name,
        "flops": cost.flops,
        "recomputed": cost.recomputed,
        "read": cost.read,
        "written": cost.written,
        "memory": cost.memory,
        "sram": cost.sram,
        "elements_over_theta": cost.hbm / (p.dtype.itemsize * p.batch * p.num_heads * theta),
        "kernels": [dataclasses.asdict(k) | {"traffic": [t._asdict() for t in k.traffic]} for k in cost.kernels],
    }


def _on_device(request: Request, device: Device) -> dict:
    tiles = request.block_sizes, request.density
    record: dict[str, Any] = {"name": device.name, "sources": device.sources}
    for side, costs in zip(("standard", "flash"), pair(request.problem, device, *tiles), strict=True):
        for phase, cost in zip(("forward", "backward"), costs, strict=True):
            record[f"{phase}_{side}"] = cost.name
            record[f"{phase}_{side}_seconds"] = seconds(cost, device)
            record[f"{phase}_{side}_hbm"] = behind_cache(cost, device)
            record[f"{phase}_{side}_bound"] = bound(cost, device)
    for backward, name in ((False, "gain_from_forward"), (True, "gain_from_both")):
        record[name] = gain_from(request.problem, device, *tiles, backward=backward)
    return record


# ----------------------------------------------------------------------------------------------------------- text
def text(data: dict) -> str:
    """The records as tables and sentences."""
    devices = _devices(data) if data["devices"] else "No roofline: the devices' matrix rates are of bfloat16 and float16."
    return "\n\n".join([_title(data), _algorithms(data), devices, _sentences(data)]) + "\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    line = lambda cells: "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]).rstrip()
    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])


def size(n: float) -> str:
    """Bytes for people, in powers of 1000: 4 significant digits."""
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = 0
    while n >= 999.95 and power < len(units) - 1:
        n, power = n / 1000, power + 1
    return f"{n:.4g} {units[power]}"


def _title(data: dict) -> str:
    p = data["problem"]
    mask = p["mask"] if p["density"] is None else f"{p['density']:g} of the tiles"
    sizes = f"{p['q_len']} queries, {p['kv_len']} keys, head_dim {p['head_dim']} ({p['v_head_dim']} of values), {p['dtype']}"
    heads = f"batch {p['batch']}, {p['num_heads']} heads ({p['num_kv_heads']} of keys)"
    return f"{heads}, {sizes}\nvisible: {mask}; M: {size(data['sram'])} of SRAM"


def _algorithms(data: dict) -> str:
    header = ["", "GFLOP", "recomputed", "HBM read", "HBM written", "memory", "SRAM a core", "over Theta"]
    rows = []
    for phase in ("forward", "backward"):
        for a in data[phase]:
            flops = f"{a['flops'] / 1e9:.4g}", f"{a['recomputed'] / 1e9:.4g}"
            sram = "any" if a["sram"] is None else size(a["sram"])
            theta = f"{a['elements_over_theta']:.3g}" if data["theorem_2_holds"] or a["name"].startswith("standard") else "-"
            rows.append([f"{phase}: {a['name']}", *flops, size(a["read"]), size(a["written"]), size(a["memory"]), sram, theta])
    legend = (
        "recomputed: GFLOP of scores that the forward had computed already. memory: HBM beyond inputs and outputs.\n"
        "over Theta: elements moved, divided by N d + N^2 (standard) or N^2 d^2 / M (flash), for each head; for d <= M <= N d."
    )
    if data["block_sizes"] is None:
        legend += (
            "\ntiles: Algorithms 1, 4, 5 by the paper's formula of M, flash_jax's are the largest that fit; its kernels take tuned ones\n"
            "(flash_jax.explain says which; --block-sizes sets them here)."
        )
    return "Without a cache between SRAM and HBM:\n" + _table(header, rows) + "\n" + legend


def _devices(data: dict) -> str:
    header = [
        "roofline",
        "fwd standard",
        "",
        "flash",
        "",
        "ratio",
        "bwd standard",
        "",
        "flash",
        "",
        "ratio",
        "bound by",
        "gain from",
        "with bwd",
    ]
    rows = []
    for d in data["devices"]:
        cells = []
        for phase in ("forward", "backward"):
            for side in ("standard", "flash"):
                cells += [f"{d[f'{phase}_{side}_seconds'] * 1e3:.4g} ms", size(d[f"{phase}_{side}_hbm"])]
            cells.append(f"{d[f'{phase}_standard_seconds'] / d[f'{phase}_flash_seconds']:.2f}x")
        both = " / ".join(dict.fromkeys(d[f"{phase}_flash_bound"] for phase in ("forward", "backward")))
        gains = [str(d[name] or "never") for name in ("gain_from_forward", "gain_from_both")]
        rows.append([d["name"], *cells, both, *gains])
    legend = (
        "Lower bounds of the time, and the bytes that pass the cache; no kernel reaches them.\n"
        "gain from: the length from which flash is predicted to be 1.05x faster, forward alone and with the backward."
    )
    return "Behind each device's cache:\n" + _table(header, rows) + "\n" + legend


def _sentences(data: dict) -> str:
    """What the paper's claim is, and what it is not, in this problem's numbers."""
    (standard, paper, flash), (standard_b, _, flash_b) = data["forward"], data["backward"]
    times = [(standard["read"] + standard["written"]) / (a["read"] + a["written"]) for a in (paper, flash)]
    flops = (flash["flops"] + flash_b["flops"]) / (standard["flops"] + standard_b["flops"])
    matrix, share = size(data["score_matrix_bytes"]), data["m_over_d2"]
    return (
        f"FLOPs stay quadratic in the length; forward and backward together, flash has {flops:.2f} times the FLOPs of standard attention\n"
        "(scores are recomputed, and what the mask hides is skipped).\n"
        "HBM traffic stays quadratic too, for a given M; what is saved is a factor. Without a cache, the forward of standard attention\n"
        f"moves {times[0]:.3g} times the bytes of the paper's order and {times[1]:.3g} times those of flash_jax; M / d^2 is {share:.3g}.\n"
        f"What goes away is the storage of N^2: one matrix of scores is {matrix}, flash keeps {size(flash['memory'])}.\n"
        "Short sequences gain nothing: where all scores fit into the cache there is no traffic to save, and the backward computes more."
    )


# ----------------------------------------------------------------------------------------------------------- plot
def plot(request: Request, devices: list[Device], path: pathlib.Path) -> None:
    """Bytes, memory and predicted speed against the length, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--plot needs matplotlib, which flash_jax does not install: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    at = [dataclasses.replace(request, problem=with_length(request.problem, n)) for n in LENGTHS]
    costs = [r.forward() for r in at]
    figure, (traffic, memory, speed) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    styles = {"standard, Algorithm 0": "C3o-", "FlashAttention's Algorithm 1": "C1s-", "flash_jax": "C0^-"}
    for n, (label, style) in enumerate(styles.items()):
        traffic.loglog(LENGTHS, [c[n].hbm for c in costs], style, label=label, base=2, markersize=4)
        memory.loglog(LENGTHS, [c[n].memory for c in costs], style, label=label, base=2, markersize=4)
    once = [sum(min(t.size, t.read + t.written) for t in c[2].kernels[0].traffic) for c in costs]
    traffic.loglog(LENGTHS, once, "k:", label="inputs and outputs once", base=2)
    traffic.set(title="forward: bytes between SRAM and HBM", ylabel="bytes")
    memory.set(title="forward: memory beyond inputs and outputs", ylabel="bytes")
    for axes in (traffic, memory):
        axes.set_yscale("log", base=10)
    for number, device in enumerate(devices):
        for backward, line in ((False, "-"), (True, "--")):
            ratios = [speedup(r.problem, device, r.block_sizes, r.density, backward=backward) for r in at]
            speed.semilogx(LENGTHS, ratios, f"C{number}{line}", label=None if backward else device.name, base=2)
    speed.axhline(1, color="k", linewidth=0.8)
    speed.set(title="predicted speedup (dashed: with backward)", ylabel="roofline time, standard / flash", ylim=(0, None))
    for axes in (traffic, memory, speed):
        axes.set_xlabel("length")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(_title(records(request, [])).replace(f"{request.problem.q_len} queries, {request.problem.kv_len} keys, ", ""))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
