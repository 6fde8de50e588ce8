"""What stands in a key that no row sees reaches no output: V is cleared in shared memory where every weight is 0, before the product.

A product adds 0 * V, which is not 0 where V is infinite or NaN. Only key tiles that may hold such keys pay for this: `host.unseen_tiles`.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, vector
from jax.experimental.mosaic.gpu import utils as mosaic_utils

from flash_jax.backends.hopper.pipeline import WGMMA, constant, swizzle_transforms, words_of

_WARPS = 4  # of a warpgroup
MARKS = 4 * _WARPS  # words of a warpgroup


def mark_columns(p, marks) -> None:
    """Tell in `marks` which columns of the weights p, 16-bit `[64, n]` with n up to 128, are not all 0.

    marks: int32 `[MARKS or more]` in shared memory. Word `4 warp + c`, bit `2 g + e`: column `8 g + 2 c + e` in the rows of that warp.
    Lane l holds the columns of `c = l % 4` for two of the rows.
    """

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def mark(_, p, marks):
        words = words_of(p)
        bits = constant(0)
        for group in range(len(words) // 2):
            both_rows = arith.ori(words[2 * group], words[2 * group + 1])
            halves = arith.shli(both_rows, constant(16)), arith.shrui(both_rows, constant(16))
            for e, half in enumerate(halves):
                used = arith.cmpi(arith.CmpIPredicate.ne, half, constant(0))
                bit = 1 << (2 * group + e)
                bits = arith.ori(bits, arith.select(used, constant(bit - (1 << 32) if bit >> 31 else bit), constant(0)))
        for distance in (4, 8, 16):
            bits = arith.ori(bits, mosaic_utils.shfl_bfly(bits, distance))
        thread = arith.andi(mosaic_utils.thread_idx(), constant(127))
        word = arith.addi(arith.shli(arith.shrui(thread, constant(5)), constant(2)), arith.andi(thread, constant(3)))
        memref.store(bits, marks, [_index(word)])

    mark(p, marks)


def clear_rows(marks, v, swizzle: int, share, shares: int) -> None:
    """Zero the rows of v `[n, columns]` in shared memory, swizzled, that no warp has marked.

    marks: int32 `[warpgroups, MARKS or more]` of all warpgroups that use v. share: which of the `shares` warpgroups this is; it clears
    every so many-th piece of a row. A thread has a row, and zero is zero however a row is swizzled.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(swizzle_transforms(v.dtype, swizzle)), plgpu.Layout.WG_SPLAT))
    def clear(_, marks, v, share):
        groups, pieces, eight, columns = ir.MemRefType(v.type).shape
        row = arith.andi(mosaic_utils.thread_idx(), constant(127))
        eighth, rest = arith.shrui(row, constant(3)), arith.andi(row, constant(7))
        equals = lambda x, n: arith.cmpi(arith.CmpIPredicate.eq, x, constant(n))
        with mosaic_utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, constant(groups * eight))):
            word, column = constant(0), arith.shrui(rest, constant(1))
            for warpgroup in range(ir.MemRefType(marks.type).shape[0]):
                for warp in range(_WARPS):
                    at = [_index(constant(warpgroup)), _index(arith.addi(constant(4 * warp), column))]
                    word = arith.ori(word, memref.load(marks, at))
            bit = arith.ori(arith.shli(eighth, constant(1)), arith.andi(rest, constant(1)))
            with mosaic_utils.when(equals(arith.andi(arith.shrui(word, bit), constant(1)), 0)):
                element = ir.MemRefType(v.type).element_type
                sixteen_bytes = ir.VectorType.get((8,), element)
                zeros = arith.constant(sixteen_bytes, ir.DenseElementsAttr.get_splat(sixteen_bytes, ir.FloatAttr.get(element, 0)))
                for piece in range(pieces):
                    with mosaic_utils.when(equals(share.registers[()], piece % shares)):
                        for start in range(0, columns, 8):
                            at = [eighth, constant(piece), rest, constant(start)]
                            vector.store(zeros, v, [_index(n) for n in at])

    clear(marks, v, jnp.int32(share))


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)
