"""Tiles: what a TPU generation likes, and what fits into its VMEM."""

import dataclasses
from typing import NamedTuple

from flash_jax.backends.base import Device
from flash_jax.problem import Problem
from flash_jax.schedule import num_tiles

MIB = 2**20
LANES = 128
BYTE_ROWS = 32  # of a register of int8
PIECE = 256  # rows of a piece: with fewer there is as much to load into the MXU as to stream past it, and more code


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What a kernel works in.

    block_q, block_kv: scores of a tile.
    resident: keys in VMEM at a time.
    unroll: tiles a turn of the loop over full tiles.
    pieces: parts of a q tile, each a step of its own where a static rule cuts through the tile (`edge.Edge`); 0: none of that.
    band: rows whose scores are looked at together in such a step (`edge.Band`); 0: all rows of the piece.
    """

    block_q: int
    block_kv: int
    resident: int
    unroll: int = 1
    pieces: int = 1
    band: int = 0

    @property
    def tiles_resident(self) -> int:
        return self.resident // self.block_kv

    @property
    def lanes(self) -> int:
        """Width in which a number a row is kept beside a tile."""
        return next(n for n in range(LANES, 0, -1) if self.block_kv % n == 0)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles of each phase, and the VMEM that a kernel may ask for, in bytes."""

    forward: Tiles
    backward: Tiles
    vmem: int


class _Preferred(NamedTuple):
    """Of forward or backward.

    by_label: most rows and keys of a tile where labels decide: of such tiles no part is skipped.
    band: see `Tiles.band`.
    """

    block_q: int
    block_kv: int
    unroll: int
    by_label: int = 512
    band: int = 0


class _Generation(NamedTuple):
    """VMEM of a core in bytes, and the tiles of both phases."""

    vmem: int
    forward: _Preferred
    backward: _Preferred


# measured in simulated cycles: python benchmarks/tpu_static.py --tiles
_GENERATIONS = {
    "v4": _Generation(16 * MIB, _Preferred(512, 512, 2), _Preferred(512, 512, 1)),
    "v5e": _Generation(128 * MIB, _Preferred(1024, 512, 2), _Preferred(1024, 512, 4)),
    "v5p": _Generation(64 * MIB, _Preferred(1024, 512, 2), _Preferred(1024, 512, 1)),
    "v6e": _Generation(128 * MIB, _Preferred(2048, 1024, 1, by_label=1024), _Preferred(2048, 1024, 1, band=128)),
    "7x": _Generation(64 * MIB, _Preferred(1024, 1024, 1), _Preferred(1024, 512, 1)),
}
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}
KNOWN_KINDS = tuple(_KINDS)


def _round_up(n: int, to: int) -> int:
    return num_tiles(n, to) * to


def _even(length: int, block: int, multiple: int) -> int:
    """The block nearest below `block` that cuts the length into equal tiles."""
    return _round_up(num_tiles(length, max(num_tiles(length, block), 1)), multiple) or multiple


def default_config(problem: Problem, device: Device) -> Config:
    """The generation's tiles, evened out for the lengths, and as many resident keys as VMEM holds."""
    generation = _GENERATIONS[_KINDS.get(device.kind, "v4")]
    vmem = generation.vmem * 5 // 8  # XLA keeps operands of its own in the rest
    forward = _tiles(problem, generation.forward, vmem, backward=False)
    return Config(forward, _tiles(problem, generation.backward, vmem, backward=True), vmem)


def _tiles(problem: Problem, preferred: _Preferred, vmem: int, *, backward: bool) -> Tiles:
    block_q, block_kv, unroll, by_label, band = preferred
    rule = problem.mask.rule
    if problem.mask.has_labels:
        by_label = 1024 if rule is not None and not rule.is_trivial else by_label
        block_q, block_kv = min(block_q, by_label), min(block_kv, by_label)
    wide = 4 if problem.dtype.itemsize != 2 or problem.dtype.kind == "f" else 2
    row = _round_up(problem.head_dim, LANES) + _round_up(problem.v_head_dim, LANES)  # q, out and dout, or k and v
    columns, maps = (problem.bias_shape is not None) * 4 + problem.mask.num_dense, problem.mask.block_sizes
    area = (5 if backward else 4) * 4 + (columns + len(maps)) * 4  # live copies of a tile of scores and what lies beside it
    a_key = row * (2 * wide + (4 + 2 * wide if backward else 0)) + 64
    left = lambda: vmem - block_q * block_kv * area - block_q * row * (wide * 4 + 8)
    if problem.mask.num_dense or problem.bias_shape or problem.mask.functions or wide == 4:
        block_q, block_kv, unroll = min(block_q, 512), min(block_kv, 512), 1
    for sizes in maps:  # a tile of many blocks of a map is rarely empty
        block_q, block_kv = (min(n, max(_round_up(size, LANES), PIECE)) for n, size in zip((block_q, block_kv), sizes, strict=True))
    if problem.block_sizes:
        block_q, block_kv = problem.block_sizes
    elif backward and block_q > 1024 and left() // a_key < problem.kv_len:
        block_q //= 2  # more keys at a time are worth more
    while left() < vmem // 3 and block_q > LANES:
        block_q //= 2
        block_kv = max(block_kv // 2, LANES)
    block_q = _even(problem.q_len, block_q, LANES)
    if problem.q_len <= 64 and not backward:
        block_q = _round_up(max(problem.q_len, 1), 32)
    block_kv = _even(problem.kv_len, block_kv, LANES)
    rows_of_map = lambda size: _round_up(num_tiles(block_q, size) + 1, BYTE_ROWS)
    a_key += 2 * columns * block_q + sum(num_tiles(2 * rows_of_map(rows), keys) for rows, keys in maps)
    most = max(left() // a_key // block_kv, 1)
    tiles = max(num_tiles(problem.kv_len, block_kv), 1)
    piece = PIECE // 2 if problem.mask.has_labels and not backward else PIECE
    pieces = max(block_q // piece, 1)
    pieces = pieces if block_q % (pieces * LANES) == 0 else 1
    return Tiles(block_q, block_kv, num_tiles(tiles, num_tiles(tiles, most)) * block_kv, min(unroll, tiles), pieces, band)
