"""The algorithms, kernel by kernel: which arrays each loop order reads and writes, and how often.

In the formulas `N` is q_len, `S` kv_len, `d` head_dim (and v_head_dim), `T` tiles along the outer loop. Inputs and outputs have the
problem's dtype; scores and accumulators on the chip, and every number a row (l, m, lse, delta), its compute dtype, float32.
"""

from collections.abc import Callable

from flash_jax.io_model.count import Cost, Kernel, Traffic, Visits, visits
from flash_jax.problem import Problem
from flash_jax.schedule import num_tiles

STAGES = 2  # copies of the streamed tile in SRAM: one is computed with while the next one arrives
STREAMED = (128, 64, 32, 16)  # rows of the streamed tile: the first with which at least as many resident rows fit
RESIDENT = 1024  # and no more of these: larger tiles compute more of what a mask hides


class _Arrays:
    """`Traffic` of the arrays of a problem; `read` and `written` are rows (or scores), the rest is known here."""

    def __init__(self, problem: Problem):
        if problem.bias_shape is not None or problem.dropout_rate:
            raise NotImplementedError("problem: bias and dropout are not counted. Leave them out.")
        p, self.item, self.wide = problem, problem.dtype.itemsize, problem.compute_dtype.itemsize
        self.rows, self.keys, self.kv_rows = (
            p.batch * p.num_heads * p.q_len,
            p.batch * p.num_heads * p.kv_len,
            p.batch * p.num_kv_heads * p.kv_len,
        )
        self.scores = self.rows * p.kv_len
        self._q, self._kv = p.batch * p.num_heads, p.batch * p.num_kv_heads
        self._width = {"query": p.head_dim, "key": p.head_dim, "value": p.v_head_dim, "out": p.v_head_dim}

    def _traffic(self, name: str, like: str, rows: int, pieces: int, read: int, written: int) -> Traffic:
        a_row = self._width[like] * self.item
        return Traffic(name, rows * a_row, pieces, read * a_row, written * a_row)

    def of_query(self, name: str, like: str, read: int = 0, written: int = 0) -> Traffic:
        """query, out and their gradients: one row a query, in every query head."""
        return self._traffic(name, like, self.rows, self._q, read, written)

    def of_key(self, name: str, like: str, read: int = 0, written: int = 0) -> Traffic:
        """key, value and their gradients: one row a key, in every key head."""
        return self._traffic(name, like, self.kv_rows, self._kv, read, written)

    def a_row(self, name: str, numbers: int = 1, read: int = 0, written: int = 0) -> Traffic:
        """`numbers` in compute dtype for each query row."""
        size = numbers * self.wide
        return Traffic(name, self.rows * size, self._q, read * size, written * size, temporary=True)

    def dense(self, name: str, read: int = 0, written: int = 0) -> Traffic:
        """One number a score, in the problem's dtype; read and written that many times."""
        size = self.scores * self.item
        return Traffic(name, size, self._q, read * size, written * size, temporary=True)


def standard_forward(problem: Problem) -> Cost:
    """Algorithm 0: scores, softmax and output are three passes; `4 N d + 4 N^2` elements. A mask saves nothing."""
    a = _Arrays(problem)
    scores = a.of_query("query", "query", read=a.rows), a.of_key("key", "key", read=a.kv_rows), a.dense("s", written=1)
    softmax = a.dense("s", read=1), a.dense("p", written=1)
    output = a.dense("p", read=1), a.of_key("value", "value", read=a.kv_rows), a.of_query("out", "out", written=a.rows)
    kernels = (
        Kernel("s = q k^T", 2 * a.scores * problem.head_dim, scores),
        Kernel("p = softmax(s)", 0, softmax),
        Kernel("out = p v", 2 * a.scores * problem.v_head_dim, output),
    )
    return Cost("standard, Algorithm 0", kernels)


def standard_backward(problem: Problem) -> Cost:
    """Algorithm 3: `8 N d + 7 N^2` elements, four products; p is kept from the forward."""
    a, d, dv = _Arrays(problem), problem.head_dim, problem.v_head_dim
    query, dout = a.of_query("query", "query", read=a.rows), a.of_query("dout", "out", read=a.rows)
    key, value = a.of_key("key", "key", read=a.kv_rows), a.of_key("value", "value", read=a.kv_rows)
    p, ds = a.dense("p", read=1), a.dense("ds", read=1)
    kernels = (
        Kernel("dv = p^T dout", 2 * a.scores * dv, (p, dout, a.of_key("dv", "value", written=a.kv_rows))),
        Kernel("dp = dout v^T", 2 * a.scores * dv, (dout, value, a.dense("dp", written=1))),
        Kernel("ds = p (dp - sum p dp)", 0, (p, a.dense("dp", read=1), a.dense("ds", written=1))),
        Kernel("dq = ds k", 2 * a.scores * d, (ds, key, a.of_query("dq", "query", written=a.rows))),
        Kernel("dk = ds^T q", 2 * a.scores * d, (ds, query, a.of_key("dk", "key", written=a.kv_rows))),
    )
    return Cost("standard, Algorithm 3", kernels)


# ------------------------------------------------------------------------------------------------ the paper's order
def paper_blocks(problem: Problem, sram: int) -> tuple[int, int]:
    """`(B_r, B_c)` of Algorithm 1, line 1: `B_c = ceil(M / 4d)`, `B_r = min(B_c, d)`, with M the elements that `sram` bytes hold."""
    d = max(problem.head_dim, problem.v_head_dim)
    elements = sram // problem.dtype.itemsize
    if elements < d:
        raise ValueError(f"sram must hold at least one row, {d * problem.dtype.itemsize} bytes for head_dim {d}, got {sram}.")
    columns = -(-elements // (4 * d))
    return min(columns, d, problem.q_len), min(columns, problem.kv_len)


def algorithm_1(problem: Problem, sram: int, density: float | None = None) -> Cost:
    """FlashAttention's own forward: keys in the outer loop, so out, l and m are read and written once for each key tile.

    Per head, with T key tiles: `2 S d` for keys and values, `3 N d T` for query and out, `4 N T` for l and m, and `N d + 2 N` to
    set out, l and m to their first value. With `density` it is Algorithm 5: row tiles are skipped, keys are loaded all the same.
    """
    block_q, block_kv = paper_blocks(problem, sram)
    v = visits(problem, block_q, block_kv, density)
    a, d, dv = _Arrays(problem), problem.head_dim, problem.v_head_dim
    traffic = (
        a.of_key("key", "key", read=a.keys),
        a.of_key("value", "value", read=a.keys),
        a.of_query("query", "query", read=v.rows),
        a.of_query("out", "out", read=v.rows, written=a.rows + v.rows),
        a.a_row("l, m", 2, read=v.rows, written=a.rows + v.rows),
    )
    need = (block_q + block_kv) * (d + dv) * a.item + block_q * block_kv * a.wide + 2 * block_q * a.wide
    kernel = Kernel("attention", 2 * v.scores * (d + dv), traffic, need)
    return Cost(_named("Algorithm 1" if v.tiles == _all_tiles(problem, v) else "Algorithm 5", v, problem), (kernel,))


def algorithm_4(problem: Problem, sram: int, density: float | None = None) -> Cost:
    """FlashAttention's own backward: keys in the outer loop, dq read and written in HBM once for each key tile.

    Per head: `2 S d` for keys and values, `4 S d` for dk and dv set to 0 and written, `N d` for dq set to 0, `5 N d T` for query, out, dout
    and dq in both directions, `2 N T` for l and m. With shared key heads dk and dv are those of each query head.
    """
    block_q, block_kv = paper_blocks(problem, sram)
    v = visits(problem, block_q, block_kv, density)
    a, d, dv = _Arrays(problem), problem.head_dim, problem.v_head_dim
    traffic = (
        a.of_key("key", "key", read=a.keys),
        a.of_key("value", "value", read=a.keys),
        a.of_key("dk", "key", written=2 * a.keys),
        a.of_key("dv", "value", written=2 * a.keys),
        a.of_query("query", "query", read=v.rows),
        a.of_query("out", "out", read=v.rows),
        a.of_query("dout", "out", read=v.rows),
        a.of_query("dq", "query", read=v.rows, written=a.rows + v.rows),
        a.a_row("l, m", 2, read=v.rows),
    )
    tiles = block_kv * (d + dv) * (a.item + a.wide) + 2 * block_q * (d + dv) * a.item
    need = tiles + 2 * block_q * block_kv * a.wide + 2 * block_q * a.wide
    kernel = Kernel("attention backward", 2 * v.scores * (3 * d + 2 * dv), traffic, need)
    return Cost(_named("Algorithm 4", v, problem), (kernel,), recomputed=2 * v.scores * d)


# --------------------------------------------------------------------------------------------- the order of the kernels here
def flash_forward(
    problem: Problem, block_sizes: tuple[int, int] | None = None, *, sram: int | None = None, density: float | None = None, kinds=None
) -> Cost:
    """The order of the kernels here (FlashAttention-2's): a q tile stays, keys stream past it, out is written once.

    Per head, with T query tiles: `2 N d + N` for query, out and lse, `2 S d T` for keys and values.

    Args:
      problem: what is asked.
      block_sizes: `(block_q, block_kv)`; without them the largest tile that `sram` bytes hold.
      sram: bytes of a core.
      density: fraction of the tiles that are visited, for a problem without a mask.
      kinds: kinds of tiles from `flash_jax.schedule`, for any mask.
    """
    a, d, dv = _Arrays(problem), problem.head_dim, problem.v_head_dim

    def need(block_q: int, block_kv: int) -> int:
        resident = block_q * (d * a.item + dv * a.wide + 2 * a.wide)
        return resident + STAGES * block_kv * (d + dv) * a.item + block_q * block_kv * a.wide

    block_q, block_kv = _blocks(need, block_sizes, sram, problem.q_len, problem.kv_len)
    v = visits(problem, block_q, block_kv, density, kinds)
    traffic = (
        a.of_query("query", "query", read=a.rows),
        a.of_key("key", "key", read=v.keys),
        a.of_key("value", "value", read=v.keys),
        a.of_query("out", "out", written=a.rows),
        a.a_row("lse", written=a.rows),
    )
    kernel = Kernel("attention", 2 * v.scores * (d + dv), traffic, need(block_q, block_kv), num_tiles(problem.q_len, block_q))
    return Cost(_named("flash_jax", v, problem), (kernel,))


def flash_backward(
    problem: Problem, block_sizes: tuple[int, int] | None = None, *, sram: int | None = None, density: float | None = None, kinds=None
) -> Cost:
    """The backward here: a key tile stays with its dk and dv, rows stream past it, dq is added up in float32 in HBM.

    Per head, with T key tiles: `2 S d` for keys and values, `2 S d` for dk and dv, `(2 N d + 2 N) T` for query, dout, lse and delta,
    and `2 N d T` float32 for the additions to dq, each a read and a write. Around it delta is computed, dq set to 0 and rounded at the
    end. A key tile serves every query head of its group. Arguments as in `flash_forward`.
    """
    a, d, dv = _Arrays(problem), problem.head_dim, problem.v_head_dim

    def need(block_kv: int, block_q: int) -> int:
        resident = block_kv * (d + dv) * (a.item + a.wide)
        streamed = STAGES * block_q * ((d + dv) * a.item + 2 * a.wide) + block_q * d * a.wide
        return resident + streamed + block_q * block_kv * (2 * a.wide + a.item)

    block_kv, block_q = _blocks(
        need, None if block_sizes is None else (block_sizes[1], block_sizes[0]), sram, problem.kv_len, problem.q_len
    )
    v = visits(problem, block_q, block_kv, density, kinds)
    out, dout = a.of_query("out", "out", read=a.rows), a.of_query("dout", "out", read=a.rows)
    traffic = (
        a.of_key("key", "key", read=a.kv_rows),
        a.of_key("value", "value", read=a.kv_rows),
        a.of_key("dk", "key", written=a.kv_rows),
        a.of_key("dv", "value", written=a.kv_rows),
        a.of_query("query", "query", read=v.rows),
        a.of_query("dout", "out", read=v.rows),
        a.a_row("lse", read=v.rows),
        a.a_row("delta", read=v.rows),
        a.a_row("dq sum", d, read=v.rows, written=v.rows),
    )
    kernels = (
        Kernel("delta = sum out dout", 0, (out, dout, a.a_row("delta", written=a.rows))),
        Kernel("dq = 0", 0, (a.a_row("dq sum", d, written=a.rows),)),
        Kernel(
            "attention backward", 2 * v.scores * (3 * d + 2 * dv), traffic, need(block_kv, block_q), num_tiles(problem.kv_len, block_kv)
        ),
        Kernel("round dq", 0, (a.a_row("dq sum", d, read=a.rows), a.of_query("dq", "query", written=a.rows))),
    )
    return Cost(_named("flash_jax", v, problem), kernels, recomputed=2 * v.scores * d)


def _all_tiles(problem: Problem, v: Visits) -> int:
    return problem.batch * problem.num_heads * num_tiles(problem.q_len, v.block_q) * num_tiles(problem.kv_len, v.block_kv)


def _named(name: str, v: Visits, problem: Problem) -> str:
    part = v.tiles / _all_tiles(problem, v)
    return f"{name}, tiles {v.block_q} x {v.block_kv}" + (f", {part:.1%} of them" if part < 1 else "")


def _blocks(
    need: Callable[[int, int], int], blocks: tuple[int, int] | None, sram: int | None, resident_len: int, streamed_len: int
) -> tuple[int, int]:
    """`(resident, streamed)` rows of a tile: as asked for, or the most resident rows, in sixteens, that `sram` bytes hold."""
    if blocks is not None:
        return min(blocks[0], resident_len), min(blocks[1], streamed_len)
    if sram is None:
        raise ValueError("Give block_sizes, or sram, the bytes that the tiles may take.")
    for streamed in STREAMED:
        fixed, a_row = need(0, streamed), need(1, streamed) - need(0, streamed)
        resident = min((sram - fixed) // a_row // 16 * 16, RESIDENT)
        if resident >= streamed:
            return min(resident, resident_len), min(streamed, streamed_len)
    raise ValueError(f"sram: {sram} bytes hold no tile of 16 x 16, which needs {need(16, 16)}.")
