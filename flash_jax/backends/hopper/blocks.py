"""Block maps whose blocks are not whole tiles: a bit a column in global memory, tested on partial tiles.

The map keeps its rows and is widened along its columns only, 32 columns a word; a thread looks up the words of its two rows.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, vector
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic_utils

from flash_jax.backends.hopper.pipeline import ROWS, WGMMA, constant

Array = jax.Array

WORD = 32


def as_bits(blocks: Array, size: int, length: int) -> Array:
    """Booleans `[..., rows, columns]`, `size` positions a column -> int32 `[..., rows, ceil(length / 32)]`: bit n of word w is 32 w + n."""
    words = -(-length // WORD)
    column = jnp.minimum(np.arange(words * WORD) // size, blocks.shape[-1] - 1)
    bits = blocks[..., column].reshape(*blocks.shape[:-1], words, WORD).astype(jnp.uint32) << np.arange(WORD, dtype=np.uint32)
    return bits.sum(-1, dtype=jnp.uint32).astype(jnp.int32)


def keep_blocks(x: Array, words, row: Array, first_word) -> Array:
    """x `[64, n]`, n a multiple of 32: where the bit of its column is set in its row of the map, else -inf.

    words: int32 `[rows, words]` in global memory. row: int32 `[64]`, row of the map. first_word: the word of column 0.
    """

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.RefType(), ROWS, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA),
    )
    def select(_, x, words, row, first_word):
        f32, index = ir.F32Type.get(), ir.IndexType.get()
        at = lambda n: ir.DenseI64ArrayAttr.get([n])
        element = lambda v, n: vector.extract(v, dynamic_position=[], static_position=at(n))
        scalar = lambda r: element(r, 0) if isinstance(r.type, ir.VectorType) else r
        hidden = arith.constant(f32, ir.FloatAttr.get(f32, -math.inf))
        lane_columns = arith.shli(arith.andi(mosaic_utils.thread_idx(), constant(3)), constant(1))
        first, out = first_word.registers[()], x.registers.copy()
        rows = [arith.index_cast(index, scalar(r)) for r in row.registers.flat]
        word = [None, None]
        for n, where in enumerate(np.ndindex(out.shape)):
            column_group, half = divmod(n, 2)
            if column_group % 4 == 0:
                place = arith.index_cast(index, arith.addi(first, constant(column_group // 4)))
                word[half] = arith.shrui(memref.load(words, [rows[half], place]), lane_columns)
            pair = out[where]
            for e in range(2):
                bit = arith.andi(arith.shrui(word[half], constant(8 * (column_group % 4) + e)), constant(1))
                seen = arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0))
                pair = vector.insert(arith.select(seen, element(pair, e), hidden), pair, dynamic_position=[], static_position=at(e))
            out[where] = pair
        return fragmented_array.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=x.is_signed)

    return select(x, words, row, first_word)
