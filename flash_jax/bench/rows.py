"""What is run: one attention problem a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax.mask import Mask, segment_ids

BLOCK = 128  # of the block-sparse pattern
DIFFERENTIATED = ("query", "key", "value", "bias")

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem; lengths are those of queries and keys alike unless `kv_len` says otherwise.

    window: `local_window_size`. segments: the lengths of the sequences that are packed into each batch entry. density: block-sparse,
    that fraction of the blocks of 128 x 128, the diagonal among them. bias: `[1, num_heads, length, kv_len]`, with its gradient.
    dropout: `dropout_rate`.
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
    segments: tuple[int, ...] = ()
    density: float | None = None
    bias: bool = False
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """Unique among rows that differ."""
        heads = f"{self.num_heads}" if self.num_kv_heads is None else f"{self.num_heads}/{self.num_kv_heads}"
        length = f"{self.length}" if self.kv_len is None else f"{self.length}x{self.kv_len}"
        words = [f"b{self.batch}", f"n{length}", f"h{heads}", f"d{self.head_dim}", self.dtype]
        words += ["causal"] if self.is_causal else []
        words += [f"window{self.window[0]},{self.window[1]}"] if self.window else []
        words += [f"packed{len(self.segments)}"] if self.segments else []
        words += [f"sparse{self.density:g}"] if self.density else []
        words += ["bias"] if self.bias else []
        words += [f"dropout{self.dropout:g}"] if self.dropout else []
        return "_".join(words)

    @property
    def phases(self) -> tuple[str, ...]:
        """What is timed: one query is a step of decoding, which has no backward."""
        return ("forward",) if self.length == 1 else ("forward", "backward")

    @property
    def starts(self) -> np.ndarray:
        """Where each packed sequence begins in a batch entry, and where the last one ends."""
        return np.cumsum((0, *self.segments), dtype=np.int32)

    @functools.cached_property
    def blocks(self) -> np.ndarray:
        """Booleans `[q blocks, key blocks]`: in each row the block on the diagonal, and others at random."""
        shape = -(-self.length // BLOCK), -(-(self.kv_len or self.length) // BLOCK)
        score = np.random.default_rng(1).random(shape)
        np.fill_diagonal(score, 2)
        kept = max(round((self.density or 1) * shape[1]), 1)
        return score >= np.sort(score, axis=1)[:, -kept, None]

    def draw(self) -> Arrays:
        """The inputs and `dout`, standard normal, and what the masks need. Traceable."""
        kv_shape = (self.batch, self.kv_len or self.length, self.num_kv_heads or self.num_heads, self.head_dim)
        q_shape = (self.batch, self.length, self.num_heads, self.head_dim)
        shapes = {"query": q_shape, "key": kv_shape, "value": kv_shape, "dout": q_shape}
        if self.bias:
            shapes["bias"] = (1, self.num_heads, self.length, self.kv_len or self.length)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(shapes))  # the cheapest to compile
        arrays = {name: jax.random.normal(key, shape).astype(self.dtype) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
        if self.segments:
            arrays["ids"] = jnp.broadcast_to(segment_ids(self.starts, self.length), (self.batch, self.length))
        if self.density:
            arrays["blocks"] = jnp.asarray(self.blocks)
        if self.dropout:
            arrays["dropout_key"] = jnp.asarray([0, 1], jnp.uint32)
        return arrays

    def words(self, arrays: Arrays) -> dict:
        """The arguments of `flash_attention` for `arrays`, which may be part of the batch and of the heads."""
        words: dict = {name: arrays[name] for name in (*DIFFERENTIATED, "dropout_key") if name in arrays}
        words |= {"is_causal": self.is_causal, "dropout_rate": self.dropout}
        if self.window:
            words["local_window_size"] = self.window
        if self.segments:
            words |= {"q_segment_ids": arrays["ids"], "kv_segment_ids": arrays["ids"]}
        if self.density:
            words["mask"] = Mask.from_blocks(arrays["blocks"], BLOCK, BLOCK)
        return words

    def dense_words(self, arrays: Arrays) -> dict:
        """The arguments of `jax.nn.dot_product_attention`, which says packing and blocks by a dense mask."""
        if self.dropout:
            raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
        words: dict = {name: arrays[name] for name in DIFFERENTIATED if name in arrays}
        words["is_causal"] = self.is_causal
        if self.window:
            words["local_window_size"] = self.window
        if self.segments:
            words["mask"] = (arrays["ids"][:, :, None] == arrays["ids"][:, None, :])[:, None]
        if self.density:
            blocks = jnp.repeat(jnp.repeat(arrays["blocks"], BLOCK, 0), BLOCK, 1)
            words["mask"] = blocks[None, None, : self.length, : self.kv_len or self.length]
        return words

    @property
    def products(self) -> float:
        """FLOPs of a forward's two matrix products over the scores that are visible; the backward's five are 2.5 times as many.

        A causal mask counts as half of them, a block-sparse one as its share.
        """
        kv_len = self.kv_len or self.length
        visible = sum(n * n for n in self.segments) if self.segments else self.length * kv_len * (self.density or 1.0)
        visible *= 0.5 if self.is_causal else 1.0
        if self.window is not None:
            visible = min(visible, self.length * (self.window[0] + 1 + (0 if self.is_causal else self.window[1])))
        return 4.0 * self.batch * self.num_heads * self.head_dim * visible

    def part(self, arrays: Arrays) -> Arrays:
        """One key head and its query heads, of the first batch entry, or of all where they share a bias whose gradient sums over them."""
        group = self.num_heads // (self.num_kv_heads or self.num_heads)
        batch = self.batch if self.bias else 1
        heads = {"query": group, "dout": group, "out": group}
        part = {}
        for name, x in arrays.items():
            if name in ("blocks", "dropout_key"):
                part[name] = x
            elif name == "bias":
                part[name] = x[:, :group]
            elif name == "ids":
                part[name] = x[:batch]
            else:
                part[name] = x[:batch, :, : heads.get(name, 1)]
        return part


def equal_segments(length: int, number: int) -> tuple[int, ...]:
    """`number` lengths that differ by one at most."""
    return tuple(length * (n + 1) // number - length * n // number for n in range(number))
