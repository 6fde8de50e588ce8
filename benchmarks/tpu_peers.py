"""Attention kernels of others for TPUs, in the form in which `tpu_static.py` simulates them: schedules as arithmetic on the grid.

A backward gets what ours gets, so delta, the sum of out * dout over a row, is among its operations.
"""

import functools
import importlib.util

HEAD_DIM = 128
WINDOW, DOCUMENT = 1024, 1024
SPARSE = {"dense": 1, "half": 2, "quarter": 4, "eighth": 8, "sixteenth": 16}  # one of so many blocks of the map is visible


def length(mask: str) -> int:
    return 16384 if mask in SPARSE else 8192


def arrays(mask, heads, heads_first):
    import jax
    import jax.numpy as jnp

    n = length(mask)
    x = jax.ShapeDtypeStruct((heads, n, HEAD_DIM) if heads_first else (1, n, heads, HEAD_DIM), jnp.bfloat16)
    return x, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)


def delta(out, dout):
    import jax.numpy as jnp

    return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)


def splash(heads):
    """jax's splash attention: forward, and the fused backward."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    minor = kernel.QKVLayout.HEAD_DIM_MINOR
    common = {"mask_value": kernel.DEFAULT_MASK_VALUE, "is_mqa": False}

    def by_arithmetic(causal, block_q, block_kv):
        def next_nonzero(h, i, j, data_next_ref, block_mask_ref, m_next_ref, next_i=False):
            if not causal:
                return (i if next_i else j), None, True, True
            run = j * block_kv <= i * block_q + (block_q - 1)
            if next_i:
                return jnp.where(run, i, (j * block_kv) // block_q), None, run, True
            return jnp.where(run, j, 0), None, run, True

        return next_nonzero

    def patched(causal, blocks, function):
        def run(*args):
            original = kernel._next_nonzero
            kernel._next_nonzero = by_arithmetic(causal, *blocks[:2])
            try:
                return function(*args)
            finally:
                kernel._next_nonzero = original

        return run

    def cases(mask, blocks):
        causal, (x, row) = mask != "full", arrays(mask, heads, heads_first=True)
        mask_info = info.MaskInfo(None, None, None, None, jnp.arange(length(mask), dtype=jnp.int32) if causal else None)
        function = (lambda q, k: q >= k) if causal else None

        def labels():
            of_row = jnp.arange(length(mask), dtype=jnp.int32) // DOCUMENT
            return kernel.SegmentIds(of_row, of_row) if mask == "packed" else None

        def forward(q, k, v):
            sizes = kernel.BlockSizes(block_q=blocks[0], block_kv=blocks[1], block_kv_compute=blocks[2])
            return kernel._splash_attention_forward(
                mask_info, q, k, v, labels(), None, block_sizes=sizes, residual_checkpoint_name=None, save_residuals=False,
                mask_function=function, **common,
            )  # fmt: skip

        def backward(q, k, v, out, lse, do):
            return kernel._splash_attention_bwd_dkv(
                q, k, v, labels(), None, lse, do, delta(out, do), bq=blocks[0], bkv=blocks[1], bkv_compute=blocks[2], mask_info=mask_info,
                attn_logits_soft_cap=None, use_fused_bwd_kernel=True, q_layout=minor, k_layout=minor, v_layout=minor,
                mask_function=function, interpret=False, **common,
            )  # fmt: skip

        name = "/".join(map(str, blocks))
        return {
            f"splash forward {mask} {name}": (patched(causal, blocks, forward), (x, x, x)),
            f"splash backward {mask} {name}": (patched(causal, blocks, backward), (x, x, x, x, row, x)),
        }

    blocks = ((1024, 1024, 512), (2048, 2048, 512), (1024, 1024, 1024))
    return {name: case for mask in ("full", "causal", "packed") for b in blocks for name, case in cases(mask, b).items()}


def flash(heads):
    """jax's flash attention: forward, and the backward, which is two kernels."""
    import jax
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    def case(mask, blocks):
        scale, causal = HEAD_DIM**-0.5, mask == "causal"

        def forward(q, k, v):
            return fa._flash_attention_impl(q, k, v, None, None, False, causal, scale, 1, *blocks, False)

        def backward(q, k, v, out, l, m, do):
            di = delta(out, do)
            common = {"sm_scale": scale, "causal": causal, "mask_value": fa.DEFAULT_MASK_VALUE, "debug": False}
            sizes = {"block_q_major": blocks[0], "block_k_major": blocks[0], "block_k": blocks[2]}
            dq = fa._flash_attention_bwd_dq(q, k, v, None, None, l, m, do, di, **sizes, **common)
            return dq, fa._flash_attention_bwd_dkv(q, k, v, None, None, l, m, do, di, block_q=blocks[2], **sizes, **common)

        x, row = (jax.ShapeDtypeStruct((1, *a.shape), a.dtype) for a in arrays(mask, heads, heads_first=True))
        name = "/".join(map(str, blocks))
        return {
            f"flash forward {mask} {name}": (forward, (x, x, x)),
            f"flash backward {mask} {name}": (backward, (x, x, x, x, row, row, x)),
        }

    blocks = (1024, 1024, 1024), (1024, 2048, 512)
    return {name: c for mask in ("full", "causal") for b in blocks for name, c in case(mask, b).items()}


class _Computed:
    """Stands in for an array in scalar memory: an element is computed, not loaded."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, index):
        return self.function(index)


def tokamax(heads):
    """tokamax's splash attention, where it is installed: forward, and the fused backward; queries are taken as scaled already."""
    if not importlib.util.find_spec("tokamax"):
        return {}
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from tokamax._src.ops.experimental.tpu.splash_attention import base
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask_info as info

    number = lambda x: jnp.asarray(x, jnp.int32)

    def divide(n, limit):
        """`t // n` for `t < limit`, as a product and a shift: the simulator does not divide."""
        shift = next(s for s in range(1, 24) if all((t * -(-(1 << s) // n)) >> s == t // n for t in range(limit)))
        return lambda t: jax.lax.shift_right_logical(number(t) * -(-(1 << shift) // n), number(shift))

    def triangle(n):
        """Row and column of the visible tiles of `n * n`, row n - 1 - p and row p in turn."""
        pair = divide(n + 1, n // 2 * (n + 1))
        split = lambda t: (pair(t), t - pair(t) * (n + 1))
        row = lambda p, r: number(jnp.where(r < n - p, n - 1 - p, p))
        column = lambda p, r: number(jnp.where(r < n - p, r, r - (n - p)))
        return (lambda t: row(*split(t))), (lambda t: column(*split(t)))

    class Pallas:
        """Pallas, but what would be prefetched into scalar memory is `refs`."""

        def __init__(self, refs, grid):
            self.refs, self.grid = refs, grid

        def __getattr__(self, name):
            return getattr(pl, name)

        def pallas_call(self, body, *, grid_spec, input_output_aliases=None, **options):
            refs, count = self.refs, grid_spec.num_scalar_prefetch

            def computed(spec):
                index = lambda *ids: spec.index_map(*ids, *refs)
                return spec and pl.BlockSpec(spec.block_shape, index, memory_space=spec.memory_space)

            specs = {name: [computed(spec) for spec in getattr(grid_spec, name)] for name in ("in_specs", "out_specs")}
            grid_spec = pl.GridSpec(grid=self.grid or grid_spec.grid, **specs, scratch_shapes=grid_spec.scratch_shapes)

            def call(*args):
                given = sum(x is not None for x in args[:count])
                aliases = {n - given: out for n, out in (input_output_aliases or {}).items()}
                run = functools.partial(body, *refs)
                return pl.pallas_call(run, grid_spec=grid_spec, input_output_aliases=aliases, **options)(*args[count:])

            return call

    def patched(refs, grid, function):
        kernel.pl = Pallas(refs, grid)
        try:
            return function()
        finally:
            kernel.pl = pl

    def cases(mask, blocks):
        causal, n = mask == "causal", length(mask) // blocks[0]
        config = kernel.SplashConfig(
            **dict(zip(("block_q", "block_kv", "block_kv_compute"), blocks, strict=True)),
            **dict(zip(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), blocks, strict=True)),
            q_prescaled_log2e=True,
        )
        mask_info = info.MaskInfo(*[None] * 6, jnp.arange(length(mask), dtype=jnp.int32) if causal else None)
        function, share = ((lambda q, k: q >= k), 0.5) if causal else (None, 1.0)

        def forward(q, k, v):
            refs, grid = [None] * 7, None
            if causal:
                row, column = triangle(n)
                kind = lambda t: jnp.where(column(t) == row(t), number(1), number(2))
                first, last = (lambda t: number(column(t) == 0)), (lambda t: number(column(t) == row(t)))
                refs = [_Computed(row), _Computed(column), None, _Computed(first), _Computed(last), _Computed(kind), None]
                grid = (heads, n * (n + 1) // 2)
            run = lambda: kernel._splash_attention_forward(
                mask_info, q, k, v, None, None, base.DEFAULT_MASK_VALUE, False, config, False, function, share
            )
            return patched(refs, grid, run)

        def backward(q, k, v, out, lse, do):
            refs = [None] * 7
            if causal:
                column = divide(n, n * n)
                row = lambda t: t - column(t) * n
                kind = lambda t: jnp.where(column(t) > row(t), number(0), jnp.where(column(t) == row(t), number(1), number(2)))
                refs[5] = _Computed(kind)
            run = lambda: kernel._splash_attention_bwd_dkv(
                q, k, v, None, lse, do, delta(out, do), bq=blocks[0], bkv=blocks[1], bkv_compute=blocks[2], is_mqa=False,
                mask_info=mask_info, mask_value=base.DEFAULT_MASK_VALUE, mask_function=function, config=config, dkv_mask_sparsity=share,
            )  # fmt: skip
            return patched(refs, None, run)

        x, row = arrays(mask, heads, heads_first=True)
        name = "/".join(map(str, blocks))
        return {
            f"tokamax forward {mask} {name}": (forward, (x, x, x)),
            f"tokamax backward {mask} {name}": (backward, (x, x, x, x, row, x)),
        }

    blocks = ((1024, 1024, 512), (2048, 2048, 512), (1024, 1024, 1024))
    return {name: case for mask in ("full", "causal") for b in blocks for name, case in cases(mask, b).items()}
