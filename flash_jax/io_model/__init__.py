"""What attention costs: FLOPs, bytes between HBM and SRAM, SRAM need and roofline time of standard, flash and block-sparse attention.

    python -m flash_jax.io_model --q-len 4096 --head-dim 128 --device h200

The machine is the paper's: cores with a small fast memory (SRAM, `sram` bytes each) before a large slow one (HBM). An algorithm is a
list of kernels; a kernel says how often it reads and writes each array. `device` then places a cache between the two, as GPUs have it,
and turns bytes and FLOPs into a time. Counted are matrix products and array traffic; exponentials, launches and latency are not.

Sources: Dao et al., FlashAttention (arXiv 2205.14135): Algorithms 0, 1, 3, 4, 5, Theorems 2 and 5, Proposition 4; Dao,
FlashAttention-2 (arXiv 2307.08691), for the loop order of the kernels here.
"""

from flash_jax.io_model.algorithms import (
    algorithm_1,
    algorithm_4,
    flash_backward,
    flash_forward,
    paper_blocks,
    standard_backward,
    standard_forward,
)
from flash_jax.io_model.count import Cost, Kernel, Traffic, Visits, make_problem, visits, with_length
from flash_jax.io_model.device import DEVICES, Device, behind_cache, dram_bytes, gain_from, seconds, speedup
from flash_jax.io_model.limits import theta_flash, theta_holds, theta_standard

__all__ = [
    "DEVICES",
    "Cost",
    "Device",
    "Kernel",
    "Traffic",
    "Visits",
    "algorithm_1",
    "algorithm_4",
    "behind_cache",
    "dram_bytes",
    "flash_backward",
    "flash_forward",
    "gain_from",
    "make_problem",
    "paper_blocks",
    "seconds",
    "speedup",
    "standard_backward",
    "standard_forward",
    "theta_flash",
    "theta_holds",
    "theta_standard",
    "visits",
    "with_length",
]
