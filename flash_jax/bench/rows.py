"""What is run: one attention problem a row, and the presets."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.mask import Mask, segment_ids

BLOCK = 128  # of the block-sparse pattern


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem; lengths are those of queries and keys alike unless `kv_len` says otherwise.

    window: `local_window_size`. segments: as many sequences of equal length packed into one. density: block-sparse, that fraction
    of the blocks of 128 x 128, the diagonal among them.
    """

    batch: int
    length: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    kv_len: int | None = None
    dtype: str = "bfloat16"
    is_causal: bool = False
    window: tuple[int, int] | None = None
    segments: int = 0
    density: float | None = None

    @property
    def name(self) -> str:
        """Unique among rows that differ."""
        heads = f"{self.num_heads}" if self.num_kv_heads is None else f"{self.num_heads}/{self.num_kv_heads}"
        length = f"{self.length}" if self.kv_len is None else f"{self.length}x{self.kv_len}"
        words = [f"b{self.batch}", f"n{length}", f"h{heads}", f"d{self.head_dim}", self.dtype]
        words += ["causal"] if self.is_causal else []
        words += [f"window{self.window[0]},{self.window[1]}"] if self.window else []
        words += [f"packed{self.segments}"] if self.segments else []
        words += [f"sparse{self.density:g}"] if self.density else []
        return "_".join(words)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """query, key, value and dout, standard normal."""
        kv_shape = (self.batch, self.kv_len or self.length, self.num_kv_heads or self.num_heads, self.head_dim)
        q_shape = (self.batch, self.length, self.num_heads, self.head_dim)
        random = np.random.default_rng(0)
        make = lambda shape: jnp.asarray(random.standard_normal(shape, np.float32)).astype(self.dtype)
        return make(q_shape), make(kv_shape), make(kv_shape), make(q_shape)

    def _ids(self) -> jax.Array:
        return segment_ids(jnp.arange(self.segments + 1) * (self.length // self.segments), self.length)

    def _blocks(self) -> np.ndarray:
        """Booleans `[q blocks, key blocks]`: in each row the block on the diagonal, and others at random."""
        shape = -(-self.length // BLOCK), -(-(self.kv_len or self.length) // BLOCK)
        score = np.random.default_rng(1).random(shape)
        np.fill_diagonal(score, 2)
        kept = max(round((self.density or 1) * shape[1]), 1)
        return score >= np.sort(score, axis=1)[:, -kept, None]

    def options(self, batch: int) -> dict:
        """The words of `flash_attention` for `batch` entries."""
        options: dict = {"is_causal": self.is_causal}
        if self.window:
            options["local_window_size"] = self.window
        if self.segments:
            ids = jnp.broadcast_to(self._ids(), (batch, self.length))
            options |= {"q_segment_ids": ids, "kv_segment_ids": ids}
        if self.density:
            options["mask"] = Mask.from_blocks(jnp.asarray(self._blocks()), BLOCK, BLOCK)
        return options

    def peer_options(self) -> dict:
        """The words of `jax.nn.dot_product_attention`, which says packing and blocks by a dense mask."""
        options: dict = {"is_causal": self.is_causal}
        if self.window:
            options["local_window_size"] = self.window
        if self.segments:
            options["mask"] = (self._ids()[:, None] == self._ids()[None, :])[None, None]
        if self.density:
            blocks = jnp.repeat(jnp.repeat(jnp.asarray(self._blocks()), BLOCK, 0), BLOCK, 1)
            options["mask"] = blocks[None, None, : self.length, : self.kv_len or self.length]
        return options


def _cpu() -> list[Row]:
    rows = [Row(1, 2**n, 8, 64, dtype="float32", is_causal=causal) for n in range(7, 14) for causal in (True, False)]
    return [*rows, Row(1, 4096, 8, 64, dtype="float32", is_causal=True, segments=8)]


def _quick() -> list[Row]:
    masks = (True, False)
    if jax.default_backend() == "cpu":
        return [Row(1, n, 4, 64, dtype="float32", is_causal=causal) for n in (256, 1024, 2048) for causal in masks]
    return [Row(4, n, 16, 128, is_causal=causal) for n in (1024, 4096) for causal in masks]


def _sweep() -> list[Row]:
    """16384 tokens of 2048 channels at each length."""
    rows = [(2**n, d, causal) for n in range(9, 15) for d in (64, 128, 256) for causal in (True, False)]
    return [Row(16384 // n, n, 2048 // d, d, is_causal=causal) for n, d, causal in rows]


def _paper() -> list[Row]:
    """Figure 2 of the FlashAttention paper: GPT-2 medium, and block-sparse attention at 4096."""
    figure = Row(64, 1024, 16, 64, dtype="float16")
    return [figure, *(Row(16, 4096, 16, 64, dtype="float16", density=s) for s in (1.0, 0.5, 0.25, 0.125, 0.0625))]


def _training() -> list[Row]:
    """One layer of a transformer: GPT-2 medium, grouped heads, a window, packed sequences."""
    return [
        Row(16, 1024, 16, 64, is_causal=True),
        Row(2, 8192, 32, 128, num_kv_heads=8, is_causal=True),
        Row(2, 8192, 16, 128, is_causal=True, window=(1023, 0)),
        Row(2, 8192, 16, 128, is_causal=True, segments=8),
    ]


PRESETS: dict[str, Callable[[], list[Row]]] = {"quick": _quick, "cpu": _cpu, "sweep": _sweep, "paper": _paper, "training": _training}
