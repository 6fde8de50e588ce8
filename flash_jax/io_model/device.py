"""Devices by their datasheets, and the time that bandwidth and matrix rate allow at best."""

import dataclasses

from flash_jax.io_model.algorithms import flash_backward, flash_forward, standard_backward, standard_forward
from flash_jax.io_model.count import Cost, Kernel, with_length
from flash_jax.problem import Problem

KIB, MIB = 2**10, 2**20


@dataclasses.dataclass(frozen=True)
class Device:
    """One chip.

    bandwidth: of HBM, bytes a second. matrix_rate: of bfloat16 and float16 products without sparsity, FLOP a second.
    sram: bytes that a core has for tiles, the paper's M. registers: bytes beside it, in which scores and accumulators find their place.
    cores: how many. cache: bytes of the cache through which all cores reach HBM.
    sources: where each number is from.
    """

    name: str
    bandwidth: float
    matrix_rate: float
    sram: int
    registers: int
    cores: int
    cache: int
    sources: str

    @property
    def on_chip(self) -> int:
        """What the tiles of a kernel may take."""
        return self.sram + self.registers


# Sources: the manufacturers' pages, which the names stand for.
_DENSE = "989.4 TFLOP/s (half of the figure with sparsity)"
_HOPPER = "132 SMs, 50 MB L2: H100 datasheet; shared memory (227 of 228 KB an SM for a block) and registers: Hopper tuning guide"
_AMPERE = "108 SMs, 40 MB L2: A100 datasheet; shared memory (163 of 164 KB an SM for a block) and registers: Ampere tuning guide"
_VMEM = "VMEM of a core: jax.experimental.pallas.tpu.get_tpu_info; also taken as the cache, since XLA and kernels keep there what fits"

DEVICES = {
    "h100": Device("H100 SXM", 3.35e12, 989.4e12, 227 * KIB, 256 * KIB, 132, 50 * MIB, f"3.35 TB/s, {_DENSE}: H100 datasheet; {_HOPPER}"),
    "h200": Device("H200 SXM", 4.8e12, 989.4e12, 227 * KIB, 256 * KIB, 132, 50 * MIB, f"4.8 TB/s, {_DENSE}: H200 datasheet; {_HOPPER}"),
    "a100": Device(
        "A100 SXM 80GB", 2.039e12, 312e12, 163 * KIB, 256 * KIB, 108, 40 * MIB, f"2039 GB/s, 312 TFLOP/s: A100 datasheet; {_AMPERE}"
    ),
    "v5e": Device("TPU v5e", 819e9, 197e12, 128 * MIB, 0, 1, 128 * MIB, f"819 GB/s, 197 TFLOP/s, 1 core: Cloud TPU v5e page; {_VMEM}"),
    "v5p": Device("TPU v5p", 2.765e12, 459e12, 64 * MIB, 0, 2, 64 * MIB, f"2765 GB/s, 459 TFLOP/s: Cloud TPU v5p page; 2 cores, {_VMEM}"),
    "v6e": Device("TPU v6e", 1.638e12, 918e12, 128 * MIB, 0, 1, 128 * MIB, f"1638 GB/s, 918 TFLOP/s, 1 core: Cloud TPU v6e page; {_VMEM}"),
}


def dram_bytes(kernel: Kernel, cores: int, cache: int) -> int:
    """Bytes that reach HBM through a cache of `cache` bytes shared by `cores` cores.

    * A temporary array that fits into the cache as a whole stays there between the kernel that writes it and the one that reads it.
    * An array that a kernel comes back to is moved once if, of the heads worked on at the same time, all such arrays fit; otherwise
      the cores that share a head walk through it together, and each walk is moved once for all of them.

    Without a cache every access reaches HBM. The rules are generous: no other data, no conflict and no drift between cores.
    """
    kept = [t for t in kernel.traffic if not (t.temporary and t.size <= cache)]
    swept = [t for t in kept if max(t.read, t.written) > t.size]
    heads = -(-cores // kernel.sweepers)
    fits = sum(t.size * min(heads, t.pieces) / t.pieces for t in swept) <= cache
    together = 1 if cache == 0 else min(cores, kernel.sweepers)

    def moved(size: int, asked: int) -> int:
        once = min(size, asked)
        return once if fits else max(once, -(-asked // together))

    return sum(moved(t.size, t.read) + moved(t.size, t.written) for t in kept)


def behind_cache(cost: Cost, device: Device) -> int:
    """`dram_bytes` of all kernels."""
    return sum(dram_bytes(kernel, device.cores, device.cache) for kernel in cost.kernels)


def seconds(cost: Cost, device: Device) -> float:
    """Roofline time: for each kernel the longer of its products at full rate and its HBM traffic at full bandwidth, added up."""
    return sum(
        max(kernel.flops / device.matrix_rate, dram_bytes(kernel, device.cores, device.cache) / device.bandwidth) for kernel in cost.kernels
    )


def pair(
    problem: Problem, device: Device, block_sizes: tuple[int, int] | None = None, density: float | None = None
) -> tuple[tuple[Cost, Cost], tuple[Cost, Cost]]:
    """(forward, backward) of standard attention, and of the kernels here with the tiles asked for or the largest of the device."""
    tiles = {"sram": device.on_chip, "density": density}
    flash = flash_forward(problem, block_sizes, **tiles), flash_backward(problem, block_sizes, **tiles)
    return (standard_forward(problem), standard_backward(problem)), flash


def speedup(
    problem: Problem, device: Device, block_sizes: tuple[int, int] | None = None, density: float | None = None, *, backward: bool
) -> float:
    """Roofline time of standard attention over that of the kernels here, of the forward or of forward and backward."""
    standard, flash = (sum(seconds(c, device) for c in costs[: 1 + backward]) for costs in pair(problem, device, block_sizes, density))
    return standard / flash


def gain_from(
    problem: Problem,
    device: Device,
    block_sizes: tuple[int, int] | None = None,
    density: float | None = None,
    *,
    backward: bool,
    least: float = 1.05,
) -> int | None:
    """The length from which on the model predicts that flash is at least `least` times faster than standard attention.

    Lengths are tried in steps of sqrt(2) from 16 to 2^17, with the problem's batch, heads and mask; None where the longest does not gain.
    """
    lengths = [round(16 * 2 ** (step / 2)) for step in range(2 * 13 + 1)]
    losses = [n for n in lengths if speedup(with_length(problem, n), device, block_sizes, density, backward=backward) < least]
    return next((n for n in lengths if not losses or n > losses[-1]), None)


def bound(cost: Cost, device: Device) -> str:
    """Which of the two takes longer in sum: "memory" or "products"."""
    return "memory" if behind_cache(cost, device) / device.bandwidth > cost.flops / device.matrix_rate else "products"
