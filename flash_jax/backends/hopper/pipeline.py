"""Pieces of Hopper kernels that Pallas has no words for, each one inline and each replaceable by plain Pallas in interpret mode."""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, vector
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu import utils as mosaic_utils

WGMMA = plgpu.Layout.WGMMA
ROWS, COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)  # one value a row, one value a column of an accumulator tile
WARPGROUP_ROWS = 64  # of an accumulator tile
MAX_REGISTERS = 512  # setmaxnreg's sum over the warpgroups of a block; one more and the kernel hangs without a word


def swizzle_transforms(dtype, swizzle: int = 128):
    """How a matrix lies in shared memory, so that wgmma and the copy engine read it without bank conflicts; swizzle: bytes."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def swizzled(shape: tuple[int, ...], dtype, swizzle: int = 128):
    """Shared memory with `swizzle_transforms`."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(dtype, swizzle))


def shared(ref, axis: int, index):
    """The index on an axis, or 0 where the axis is 1."""
    return 0 if ref.shape[axis] == 1 else index


def constant(n: int):
    """An int32 of a kernel."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, n))


def cond(pred, true, false, *operands):
    """`lax.cond` of warpgroups, without the cast of pred to an integer, for which JAX starts `ptxas` each time to ask for its version.

    JAX lowers `false` twice: let it be the small one. A warp by itself takes `lax.cond` and `pl.when`: Mosaic has no clamp there, which
    `lax.switch` needs.
    """
    return lax.switch(lax.select(pred, jnp.int32(1), jnp.int32(0)), (false, true), *operands)


def when(pred):
    """`pl.when` by `cond`."""
    return lambda do: cond(pred, do, lambda: None)


def meet(barrier) -> None:
    """What each warpgroup wrote to shared memory is there for the products and copies of all, once all are here."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def remainder(n, divisor: int):
    """n mod divisor, n not negative: one instruction where divisor is a power of two; the sign would take three more."""
    return n & (divisor - 1) if divisor & (divisor - 1) == 0 else lax.rem(n, jnp.int32(divisor))


def keep_interval(x: jax.Array, lo: jax.Array | None, hi: jax.Array | None) -> jax.Array:
    """x `[64, n]`: column c of row r where `lo[r] <= c < hi[r]` (int32 `[64]`; None is no bound), else -inf.

    A thread holds columns `8 j + e + 2 (lane % 4)` of two rows. The lane's part goes to the bounds, so that columns are immediates;
    written with an iota they would be 16 registers that live through the loop, and spill.
    """
    bounds = [(bound, predicate) for bound, predicate in ((lo, "sle"), (hi, "sgt")) if bound is not None]

    @plgpu.inline_mgpu(arg_types=(WGMMA,) + (ROWS,) * len(bounds), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA))
    def select(_, x, *rows):
        f32 = ir.F32Type.get()
        at = lambda n: ir.DenseI64ArrayAttr.get([n])
        element = lambda v, n: vector.extract(v, dynamic_position=[], static_position=at(n))
        lane_columns = arith.shli(arith.andi(mosaic_utils.thread_idx(), constant(3)), constant(1))
        scalar = lambda r: element(r, 0) if isinstance(r.type, ir.VectorType) else r
        limits = [[arith.subi(scalar(r), lane_columns) for r in bound.registers.flat] for bound in rows]
        hidden = arith.constant(f32, ir.FloatAttr.get(f32, -math.inf))
        out = x.registers.copy()
        for n, index in enumerate(np.ndindex(out.shape)):
            column_group, row = divmod(n, 2)
            pair = out[index]
            for e in range(2):
                seen = None
                for limit, (_, predicate) in zip(limits, bounds, strict=True):
                    one = arith.cmpi(getattr(arith.CmpIPredicate, predicate), limit[row], constant(8 * column_group + e))
                    seen = one if seen is None else arith.andi(seen, one)
                pair = vector.insert(arith.select(seen, element(pair, e), hidden), pair, dynamic_position=[], static_position=at(e))
            out[index] = pair
        return fragmented_array.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=x.is_signed)

    return select(x, *(bound for bound, _ in bounds))


def raise_flag(flag, rows: jax.Array) -> None:
    """Make `flag`, int32 `[]` in shared memory, 1 if any of the rows, int32 `[64]`, is not 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROWS))
    def store(_, flag, rows):
        element = lambda v: vector.extract(v, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        bits = [element(r) if isinstance(r.type, ir.VectorType) else r for r in rows.registers.flat]
        with mosaic_utils.when(arith.cmpi(arith.CmpIPredicate.ne, arith.ori(*bits), constant(0))):
            memref.store(constant(1), flag, [])

    store(flag, rows)


def await_turn(warpgroup) -> None:
    """Wait until another warpgroup has called `pass_turn` to this one: hardware barriers, cheaper than those in shared memory."""
    _named_barrier("sync", warpgroup)


def pass_turn(warpgroup) -> None:
    """Let a warpgroup that waits in `await_turn` go on."""
    _named_barrier("arrive", warpgroup)


_FIRST_NAMED_BARRIER = 8  # below are Mosaic's own


def _named_barrier(operation: str, warpgroup) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def barrier(_, index):
        mosaic_utils.inline_ptx(f"bar.{operation} $0, 256;", index.registers[()])

    barrier(jnp.int32(_FIRST_NAMED_BARRIER) + warpgroup)


def words_of(x) -> list[ir.Value]:
    """A 16-bit tile of a kernel as int32, two columns each: for every eight columns the word of a row and that of the row 8 below."""
    whole, at = ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), ir.DenseI64ArrayAttr.get([0])
    return [vector.extract(vector.bitcast(whole, r), dynamic_position=[], static_position=at) for r in x.registers.flat]


def store_tile(ref, x: jax.Array) -> None:
    """`ref[...] = x`, 16-bit `[64, n]`, n a multiple of 64, to memory swizzled by 128 bytes.

    For Mosaic's own store the compiler keeps eight addresses in registers through the whole kernel. Here a lane computes four, at the end:
    lane l gives that of 16 bytes in row l % 16, left half if l < 16, and one instruction stores 16 columns of a warp's 16 rows.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle_transforms(x.dtype)), WGMMA))
    def store(_, ref, x):
        i32, words = ir.IntegerType.get_signless(32), words_of(x)
        groups = ir.MemRefType(ref.type).shape[1]  # of 64 columns; 1024 bytes each eight rows
        bits = lambda word, mask: arith.andi(word, constant(mask))
        times = lambda word, n: arith.muli(word, constant(n))
        opaque = lambda word: mosaic_utils.inline_ptx("mov.b32 $0, $1;", word, result_types=i32, has_side_effects=True)
        thread = opaque(mosaic_utils.thread_idx())
        row = arith.ori(bits(arith.shrui(thread, constant(1)), 48), bits(thread, 15))
        row_of_eight = bits(row, 7)
        start = llvm.ptrtoint(i32, mosaic_utils.memref_ptr(ref))
        start = arith.addi(start, times(arith.shrui(row, constant(3)), 1024 * groups))
        start = arith.addi(start, times(row_of_eight, 128))
        right_half = bits(arith.shrui(thread, constant(4)), 1)
        for n in range(4):  # 16 columns each
            swizzled = arith.xori(arith.ori(right_half, constant(2 * n)), row_of_eight)
            address = arith.addi(start, times(swizzled, 16))
            for group in range(groups):
                four = words[16 * group + 4 * n :][:4]
                to = f"[$0 + {1024 * group}]"
                mosaic_utils.inline_ptx(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 {to}, {{$1, $2, $3, $4}};", address, *four)

    store(ref, x)


def start_product(a_ref, b_ref) -> jax.Array:
    """`a . b^T` of two references in shared memory, `[64, k]` and `[n, k]`, swizzled by 128 bytes, float32 `[64, n]`.

    Asynchronous: call `finish_product` on the result before using it. The first step overwrites the accumulator (scale-d 0), which
    Mosaic's own wgmma cannot, so that no registers are zeroed between a turn and the product.
    """
    (m, k), n, dtype = a_ref.shape[-2:], b_ref.shape[-2], a_ref.dtype
    assert m == WARPGROUP_ROWS
    transforms = swizzle_transforms(dtype)
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype.name]
    num_registers = n // 2

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms), plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((m, n), jnp.float32, layout=WGMMA),
    )
    def product(_, a, b):
        i64 = ir.IntegerType.get_signless(64)
        b = mosaic_utils.memref_transpose(b, (1, 0, 3, 2))
        empty = mosaic_gpu.WGMMAAccumulator.zero(m, n)._value
        register = empty.registers.flat[0].type
        (a_base, a_steps), (_, a_stride), a_major = mma_utils.create_descriptor(
            a, swizzle=128, large_tile=(64, 64), group_size=(64, 64), logical_k_major=False
        )
        (b_base, b_steps), (_, b_stride), b_major = mma_utils.create_descriptor(
            b, swizzle=128, large_tile=(64, 64), group_size=(64, n), logical_k_major=True
        )
        transposed = [int(major != mma_utils.Dim.K) for major in (a_major, b_major)]

        def address(base, stride, step, group, i):
            offset = mma_utils.encode_addr(group * stride) + i * (step[1][0] >> 4)
            add = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, offset)).result
            return llvm.add(base, add, overflow_flags=llvm.IntegerOverflowFlags.none)

        registers = []
        for group in range(k // 64):
            for i in range(4):  # 16 of the 64 columns of a swizzled group at a time
                a_at, b_at = address(a_base, a_stride, a_steps, group, i), address(b_base, b_stride, b_steps, group, i)
                outputs = "{" + ",".join(f"${r}" for r in range(num_registers)) + "}"
                first = num_registers + len(registers)
                ptx = (
                    f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(registers))}, 0; "
                    f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {outputs}, ${first}, ${first + 1}, "
                    f"p, 1, 1, {transposed[0]}, {transposed[1]}; }}"
                )
                constraints = ["=f"] * num_registers + [str(r) for r in range(len(registers))] + ["l", "l"]
                struct = llvm.StructType.get_literal([register] * num_registers)
                result = llvm.inline_asm(struct, [*registers, a_at, b_at], ptx, ",".join(constraints), asm_dialect=0, has_side_effects=True)
                registers = [llvm.extractvalue(register, result, [r]) for r in range(num_registers)]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        array = fragmented_array.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(empty.registers.shape), _layout=empty.layout, _is_signed=empty.is_signed
        )
        return array.to_layout(fragmented_array.WGMMA_LAYOUT)

    return product(a_ref, b_ref)


def finish_product(product: jax.Array, in_flight: int) -> jax.Array:
    """The product's values, once at most `in_flight` later products are still running."""
    plgpu.wgmma_wait(in_flight)
    return jax.lax.optimization_barrier(product)  # the asynchronous result does not depend on the wait by itself
