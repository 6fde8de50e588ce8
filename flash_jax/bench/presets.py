"""Which rows: lists by name."""

from collections.abc import Callable

import jax

from flash_jax.bench.rows import Row, equal_segments

TOKENS, CHANNELS = 16384, 2048  # of every row of the sweep
DENSITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)


def _quick() -> list[Row]:
    """A first look, in a minute or two."""
    masks = (True, False)
    if jax.default_backend() == "cpu":
        return [Row(1, n, 4, 64, dtype="float32", is_causal=causal) for n in (256, 1024, 2048) for causal in masks]
    return [Row(4, n, 16, 128, is_causal=causal) for n in (1024, 4096) for causal in masks]


def _cpu() -> list[Row]:
    """Lengths from 128 to 8192 in float32."""
    rows = [Row(1, 2**n, 8, 64, dtype="float32", is_causal=causal) for n in range(7, 14) for causal in (True, False)]
    return [*rows, Row(1, 4096, 8, 64, dtype="float32", is_causal=True, segments=equal_segments(4096, 8))]


def _sweep() -> list[Row]:
    """16384 tokens of 2048 channels at each length from 512 to 16384."""
    rows = [(2**n, d, causal) for n in range(9, 15) for d in (64, 128, 256) for causal in (True, False)]
    return [Row(TOKENS // n, n, CHANNELS // d, d, is_causal=causal) for n, d, causal in rows]


def _features() -> list[Row]:
    """Grouped heads, windows, packed sequences, a bias, float16, decoding, block-sparse patterns, dropout."""
    packed = (1024, 512, 2048, 1536, 768, 1280, 1024)
    return [
        *(Row(TOKENS // n, n, 32, 128, num_kv_heads=8, is_causal=True) for n in (4096, 8192)),
        *(Row(TOKENS // n, n, 16, 128, is_causal=True, window=(1023, 0)) for n in (8192, 16384)),
        Row(2, 8192, 16, 128, is_causal=True),
        Row(2, 8192, 16, 128, is_causal=True, segments=packed),
        Row(8, 2048, 16, 128, bias=True),
        *(Row(4, 4096, 16, 128, dtype="float16", is_causal=causal) for causal in (True, False)),
        *(Row(32, 1, 32, 128, num_kv_heads=8, kv_len=n) for n in (8192, 32768)),
        *(Row(1, 16384, 16, 128, density=density) for density in DENSITIES),
        *(Row(4, 4096, 16, 64, is_causal=True, dropout=rate) for rate in (0.0, 0.1)),
    ]


def _paper() -> list[Row]:
    """Of the FlashAttention paper: the table of its Figure 2, and its curves against the length, full, causal and with dropout."""
    gpt2_medium = Row(64, 1024, 16, 64, dtype="float16")
    curve = lambda n, **words: Row(TOKENS // n, n, 16, 64, dtype="float16", **words)
    full = [curve(2**n) for n in range(5, 14)]
    others = [curve(n, **words) for n in (32, 128, 512, 2048, 8192) for words in ({"is_causal": True}, {"dropout": 0.1})]
    return [gpt2_medium, *full, *others]


def _training() -> list[Row]:
    """One layer of a transformer: GPT-2 medium, grouped heads, a window, packed sequences."""
    return [
        Row(16, 1024, 16, 64, is_causal=True),
        Row(2, 8192, 32, 128, num_kv_heads=8, is_causal=True),
        Row(2, 8192, 16, 128, is_causal=True, window=(1023, 0)),
        Row(2, 8192, 16, 128, is_causal=True, segments=equal_segments(8192, 8)),
    ]


PRESETS: dict[str, Callable[[], list[Row]]] = {
    "quick": _quick,
    "cpu": _cpu,
    "sweep": _sweep,
    "features": _features,
    "paper": _paper,
    "training": _training,
}
