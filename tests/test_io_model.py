"""The IO model: counts by simulated loops and by hand, limits, monotonicity, the cache, the command."""

import collections
import dataclasses
import json
import pathlib
import runpy

import numpy as np
import pytest

from flash_jax import Mask, io_model, schedule
from flash_jax.io_model.__main__ import main

F16, F32 = 2, 4


def problem(q_len, kv_len=None, **options):
    return io_model.make_problem(q_len, kv_len, **({"head_dim": 4, "dtype": "float16"} | options))


def by_array(cost, kernel=None):
    """`{array: (read, written)}` of one kernel, or of all."""
    totals = collections.defaultdict(lambda: [0, 0])
    for k in cost.kernels:
        if kernel in (None, k.name):
            for t in k.traffic:
                totals[t.array][0] += t.read
                totals[t.array][1] += t.written
    return {name: tuple(moved) for name, moved in totals.items()}


# ----------------------------------------------------------------------------------------- loops over real arrays
class Memory:
    """Arrays in HBM: slices cost what their elements weigh."""

    def __init__(self, **arrays):
        self.arrays = arrays
        self.read, self.written = collections.Counter(), collections.Counter()

    def load(self, name, rows):
        part = self.arrays[name][rows]
        self.read[name] += part.nbytes
        return part

    def store(self, name, rows, value):
        part = self.arrays[name][rows]
        part[...] = value
        self.written[name] += part.nbytes

    def moved(self):
        return {name: (self.read[name], self.written[name]) for name in self.arrays}


def tiles(length, block):
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def head(q_len, kv_len, d, dv):
    """One head: arrays of a forward and a backward, in the dtypes of the model."""
    random = np.random.default_rng(0)
    of = lambda n, width: random.standard_normal((n, width)).astype(np.float16)
    return {"query": of(q_len, d), "key": of(kv_len, d), "value": of(kv_len, dv), "out": of(q_len, dv), "dout": of(q_len, dv)}


def run_algorithm_1(memory, q_len, kv_len, block_q, block_kv, visible):
    """Algorithm 1 line by line; the numbers are right too, so no load or store is missing."""
    everything = slice(0, q_len)
    memory.store("out", everything, 0)
    memory.store("l, m", everything, np.array([0, -np.inf]))
    for j, keys in enumerate(tiles(kv_len, block_kv)):
        k, v = memory.load("key", keys), memory.load("value", keys)
        for i, rows in enumerate(tiles(q_len, block_q)):
            if not visible[i, j]:
                continue
            q, out, (l, m) = memory.load("query", rows), memory.load("out", rows), memory.load("l, m", rows).T
            s = q.astype(np.float32) @ k.T.astype(np.float32)
            m_new = np.maximum(m, s.max(1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            l_new = alpha * l + p.sum(1)
            memory.store("out", rows, ((l * alpha)[:, None] * out + p @ v) / l_new[:, None])
            memory.store("l, m", rows, np.stack([l_new, m_new], -1))


def run_flash(memory, q_len, kv_len, block_q, block_kv, visible):
    """A q tile stays, keys stream."""
    for i, rows in enumerate(tiles(q_len, block_q)):
        q = memory.load("query", rows).astype(np.float32)
        l, m, acc = np.zeros(len(q)), np.full(len(q), -np.inf), 0
        for j, keys in enumerate(tiles(kv_len, block_kv)):
            if not visible[i, j]:
                continue
            k, v = memory.load("key", keys), memory.load("value", keys)
            s = q @ k.T.astype(np.float32)
            m, old = np.maximum(m, s.max(1)), m
            p, alpha = np.exp(s - m[:, None]), np.exp(old - m)
            l, acc = alpha * l + p.sum(1), alpha[:, None] * acc + p @ v
        memory.store("out", rows, acc / l[:, None])
        memory.store("lse", rows, m + np.log(l))


def run_backward(memory, q_len, kv_len, block_q, block_kv, visible, *, paper):
    """Algorithm 4, and the order of the kernels here: they differ in what stays in HBM between the tiles."""
    everything, all_keys = slice(0, q_len), slice(0, kv_len)
    total = "dq" if paper else "dq sum"
    memory.store(total, everything, 0)
    if paper:
        memory.store("dk", all_keys, 0)
        memory.store("dv", all_keys, 0)
    else:
        memory.store("delta", everything, (memory.load("out", everything) * memory.load("dout", everything)).sum(1))
    for j, keys in enumerate(tiles(kv_len, block_kv)):
        k, v, dk, dv = memory.load("key", keys), memory.load("value", keys), 0, 0
        for i, rows in enumerate(tiles(q_len, block_q)):
            if not visible[i, j]:
                continue
            q, dout = memory.load("query", rows), memory.load("dout", rows)
            if paper:
                l, m = memory.load("l, m", rows).T
                lse, delta = np.log(l) + m, (memory.load("out", rows) * dout).sum(1)
            else:
                lse, delta = memory.load("lse", rows), memory.load("delta", rows)
            p = np.exp(q.astype(np.float32) @ k.T - lse[:, None])
            ds = p * (dout @ v.T - delta[:, None])
            dk, dv = dk + ds.T @ q, dv + p.T @ dout
            memory.store(total, rows, memory.load(total, rows) + ds @ k)
        memory.store("dk", keys, dk)
        memory.store("dv", keys, dv)
    if not paper:
        memory.store("dq", everything, memory.load("dq sum", everything))


CASES = {  # q_len, kv_len, head_dim, v_head_dim, bytes of SRAM
    "even": (8, 8, 4, 4, 128),
    "ragged": (13, 9, 4, 4, 128),
    "wide_values": (7, 11, 3, 5, 90),
    "one_tile": (3, 2, 4, 4, 4096),
}
PATTERNS = {"all": None, "causal": Mask.causal(), "window": Mask.sliding_window(2, 1)}


def pattern(mask, q_len, kv_len, block_q, block_kv):
    """Tiles with a visible score, from the booleans."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    seen = {None: i < np.inf, "causal": j <= i, "window": (i - 2 <= j) & (j <= i + 1)}[mask] | np.zeros((q_len, kv_len), bool)
    return np.array([[seen[r, c].any() for c in tiles(kv_len, block_kv)] for r in tiles(q_len, block_q)])


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("case", CASES)
def test_bytes_of_each_array_are_those_of_the_loops(case, name):
    q_len, kv_len, d, dv, sram = CASES[case]
    p = problem(q_len, kv_len, head_dim=d, v_head_dim=dv, mask=PATTERNS[name])
    visible = lambda blocks: pattern(None if name == "all" else name, q_len, kv_len, *blocks)
    blocks, ours = io_model.paper_blocks(p, sram), (4, 3)
    numbers = lambda *width: np.zeros((q_len, *width), np.float32)

    memory = Memory(**{n: x for n, x in head(q_len, kv_len, d, dv).items() if n != "dout"}, **{"l, m": numbers(2)})
    run_algorithm_1(memory, q_len, kv_len, *blocks, visible(blocks))
    assert by_array(io_model.algorithm_1(p, sram)) == memory.moved()
    if name == "all":
        s = memory.arrays["query"].astype(np.float64) @ memory.arrays["key"].T
        expected = np.exp(s - s.max(1, keepdims=True))
        expected = expected @ memory.arrays["value"] / expected.sum(1, keepdims=True)
        assert np.abs(memory.arrays["out"] - expected).max() < 0.01, "the simulated loop computes attention"

    if visible(ours).any(1).all():
        memory = Memory(**{n: x for n, x in head(q_len, kv_len, d, dv).items() if n != "dout"}, lse=numbers())
        run_flash(memory, q_len, kv_len, *ours, visible(ours))
        assert by_array(io_model.flash_forward(p, ours)) == memory.moved()

    gradients = {"dq": np.zeros((q_len, d), np.float16), "dk": np.zeros((kv_len, d), np.float16), "dv": np.zeros((kv_len, dv), np.float16)}
    memory = Memory(**head(q_len, kv_len, d, dv), **gradients, **{"l, m": numbers(2) + 1})
    run_backward(memory, q_len, kv_len, *blocks, visible(blocks), paper=True)
    assert by_array(io_model.algorithm_4(p, sram)) == memory.moved()

    rows = {"lse": numbers(), "delta": numbers(), "dq sum": numbers(d)}
    memory = Memory(**head(q_len, kv_len, d, dv), **gradients, **rows)
    run_backward(memory, q_len, kv_len, *ours, visible(ours), paper=False)
    assert by_array(io_model.flash_backward(p, ours)) == memory.moved()


# ---------------------------------------------------------------------------------------------------------- by hand
def test_standard_attention_by_hand():
    """N = 2, S = 3, d = 4, float16: q 16 bytes, k and v 24, s and p 12, out 16."""
    forward = io_model.standard_forward(problem(2, 3))
    assert (forward.read, forward.written) == (16 + 24 + 12 + 12 + 24, 12 + 12 + 16)
    assert forward.flops == 2 * 6 * 4 + 2 * 6 * 4
    assert forward.memory == 12 + 12
    backward = io_model.standard_backward(problem(2, 3))
    assert backward.read == (12 + 16) + (16 + 24) + (12 + 12) + (12 + 24) + (12 + 16)
    assert backward.written == 24 + 12 + 12 + 16 + 24
    assert backward.flops == 4 * (2 * 6 * 4)
    assert backward.recomputed == 0


def test_flops_and_heads_by_hand():
    """Batch 3, 4 heads over 2 of keys: scores 3 * 4 * 8 * 8; keys are read by each query head, but once by the backward here."""
    p = problem(8, batch=3, num_heads=4, num_kv_heads=2, v_head_dim=2)
    scores = 3 * 4 * 64
    forward, backward = io_model.flash_forward(p, (4, 8)), io_model.flash_backward(p, (4, 8))
    assert forward.flops == io_model.standard_forward(p).flops == 2 * scores * (4 + 2)
    assert backward.flops == 2 * scores * (3 * 4 + 2 * 2)
    assert backward.recomputed == 2 * scores * 4
    assert by_array(forward)["key"] == (3 * 4 * 2 * (8 * 4) * F16, 0), "two q tiles"
    assert by_array(backward)["key"] == (3 * 2 * (8 * 4) * F16, 0)
    assert by_array(backward)["dk"] == (0, 3 * 2 * (8 * 4) * F16)
    assert by_array(forward)["lse"] == (0, 3 * 4 * 8 * F32)


def test_together_flash_has_seven_products_where_standard_attention_has_six():
    p = problem(64, head_dim=64)
    standard = io_model.standard_forward(p).flops + io_model.standard_backward(p).flops
    flash = io_model.flash_forward(p, (16, 16)).flops + io_model.flash_backward(p, (16, 16)).flops
    assert flash * 6 == standard * 7


def test_blocks_of_the_paper():
    """M = 1000 elements, d = 8: B_c = ceil(1000 / 32) = 32, B_r = min(32, 8)."""
    assert io_model.paper_blocks(problem(512, head_dim=8), 2000) == (8, 32)
    assert io_model.paper_blocks(problem(5, 20, head_dim=8), 2000) == (5, 20)
    with pytest.raises(ValueError, match="sram must hold at least one row, 16 bytes for head_dim 8, got 15"):
        io_model.paper_blocks(problem(512, head_dim=8), 15)


def test_sram_by_hand():
    """q 128 x 64 in float16, two k and two v tiles of 128 x 64, 128 x 128 scores, 128 x 64 accumulators, m and l."""
    cost = io_model.flash_forward(problem(1024, head_dim=64), (128, 128))
    assert cost.sram == 128 * 64 * F16 + 2 * 2 * 128 * 64 * F16 + 128 * 128 * F32 + 128 * 64 * F32 + 2 * 128 * F32


@pytest.mark.parametrize("of", [io_model.flash_forward, io_model.flash_backward])
def test_tiles_are_the_largest_that_fit(of):
    p = problem(8192, head_dim=64)
    for sram in (50_000, 150_000, 400_000):
        cost = of(p, sram=sram)
        (block_q, block_kv) = (int(n) for n in cost.name.split("tiles ")[1].split(" x "))
        more = (block_q + 16, block_kv) if of is io_model.flash_forward else (block_q, block_kv + 16)
        assert cost.sram <= sram < of(p, more).sram
    with pytest.raises(ValueError, match="sram: 3000 bytes hold no tile of 16 x 16"):
        of(p, sram=3000)


def test_memory_example():
    """Batch 2, 16 heads, 16384 tokens: one float16 matrix of scores is 17 GB, lse is 2 MiB."""
    p = problem(16384, batch=2, num_heads=16, head_dim=128)
    scores = 2 * 16 * 16384 * 16384 * F16
    assert scores == 17_179_869_184
    assert io_model.standard_forward(p).memory == 2 * scores, "s and p"
    assert io_model.flash_forward(p, (128, 128)).memory == 2 * 16 * 16384 * F32 == 2 * 2**20
    assert io_model.algorithm_1(p, 100_000).memory == 2 * io_model.flash_forward(p, (128, 128)).memory, "l and m"
    assert io_model.flash_backward(p, (128, 128)).memory == 2 * 16 * 16384 * (128 + 2) * F32, "float32 dq, lse, delta"


def test_constants_of_the_documentation():
    """`a N d + b N d T + c N^2` elements of the matrices, one head; in float32 all elements weigh the same."""
    n, d, sram = 1024, 64, 4 * 2**14
    p = problem(n, head_dim=d, dtype="float32")
    assert io_model.paper_blocks(p, sram) == (64, 64)
    t = n // 64
    expected = {
        io_model.standard_forward(p): (4, 0, 4),
        io_model.algorithm_1(p, sram): (3, 3, 0),
        io_model.flash_forward(p, (64, 32)): (2, 2, 0),
        io_model.standard_backward(p): (8, 0, 7),
        io_model.algorithm_4(p, sram): (7, 5, 0),
        io_model.flash_backward(p, (32, 64)): (7 + 2, 2 + 2, 0),
    }
    for cost, (a, b, c) in expected.items():
        moved = sum(sum(moved) for name, moved in by_array(cost).items() if name not in ("l, m", "lse", "delta"))
        assert moved == 4 * (a * n * d + b * n * d * t + c * n * n), cost.name


# ------------------------------------------------------------------------------------------------- limits, monotony
def elements(cost):
    return cost.hbm / F16


def test_standard_attention_tends_to_its_form():
    for of, constant in ((io_model.standard_forward, 4), (io_model.standard_backward, 7)):
        ratios = [elements(of(p)) / io_model.theta_standard(p) for p in (problem(n, head_dim=64) for n in (2**8, 2**12, 2**20))]
        assert abs(ratios[-1] - constant) < 1e-3
        assert sorted(ratios, key=lambda r: abs(r - constant), reverse=True) == ratios


def test_flash_tends_to_its_form():
    """M a multiple of 4 d: T = 4 N d / M, so 3 N d T is 12 N^2 d^2 / M, and l and m add 4 float32 numbers a row: 16 (4 / 2) / d / 12."""
    d, n = 64, 2**22
    for elements_in_sram in (2**14, 2**15, 2**16):
        p, sram = problem(n, head_dim=d), F16 * elements_in_sram
        assert io_model.theta_holds(p, sram)
        ratio = elements(io_model.algorithm_1(p, sram)) / io_model.theta_flash(p, sram)
        assert abs(ratio - (12 + 16 * 2 / d)) < 0.01
        ratio = elements(io_model.algorithm_4(p, sram)) / io_model.theta_flash(p, sram)
        assert abs(ratio - (20 + 8 * 2 / d)) < 0.01, "query, out, dout, dq read and dq written, and l and m once"


def test_the_order_here_has_the_same_form():
    """2 N d T with T = N / block_q; block_q grows like M, so the ratio stays between constants while the traffic falls 25 times."""
    p = problem(2**20, head_dim=64)
    sizes = [F16 * 2**k for k in (15, 16, 17, 18)]
    costs = [io_model.flash_forward(p, sram=sram) for sram in sizes]
    assert all(1 < elements(c) / io_model.theta_flash(p, sram) < 20 for c, sram in zip(costs, sizes, strict=True))
    (block_q, _) = (int(n) for n in costs[1].name.split("tiles ")[1].split(" x "))
    assert abs(elements(costs[1]) / (2 * 2**40 * 64 / block_q) - 1) < 1e-3
    assert costs[0].hbm > 4 * costs[-1].hbm


def test_the_condition_of_the_theorem():
    p = problem(128, head_dim=64)  # N d = 8192 elements
    assert [io_model.theta_holds(p, F16 * m) for m in (63, 64, 8192, 8193)] == [False, True, True, False]


def test_quadratic_whatever_is_saved():
    """For a given M, twice the length is four times the FLOPs and, in the limit, four times the traffic; the memory doubles."""
    short, long = problem(2**16, head_dim=64), problem(2**17, head_dim=64)
    for of in (lambda p: io_model.algorithm_1(p, 100_000), lambda p: io_model.flash_forward(p, (128, 128))):
        assert of(long).flops == 4 * of(short).flops
        assert 3.95 < of(long).hbm / of(short).hbm < 4
        assert of(long).memory == 2 * of(short).memory


def test_more_of_anything_costs_more_and_more_sram_costs_less():
    base = {"q_len": 1000, "kv_len": 1000, "batch": 2, "num_heads": 4, "head_dim": 64}
    costs = lambda p, sram=100_000: [
        io_model.standard_forward(p),
        io_model.standard_backward(p),
        io_model.algorithm_1(p, sram),
        io_model.algorithm_4(p, sram),
        io_model.flash_forward(p, sram=sram),
        io_model.flash_backward(p, sram=sram),
    ]
    small = costs(problem(**base))
    for name, value in {"q_len": 1500, "kv_len": 1500, "batch": 3, "num_heads": 8, "head_dim": 128}.items():
        for a, b in zip(small, costs(problem(**base | {name: value})), strict=True):
            assert b.hbm > a.hbm, (name, a.name)
            assert b.flops > a.flops
    for a, b in zip(small[2:], costs(problem(**base), sram=400_000)[2:], strict=True):
        assert b.hbm < a.hbm
        assert b.flops == a.flops


def test_density_scales_the_quadratic_part_only():
    p = problem(2**14, head_dim=64)
    dense, half = (io_model.flash_forward(p, (128, 128), density=s) for s in (1.0, 0.5))
    linear = by_array(dense)["query"][0] + by_array(dense)["out"][1] + by_array(dense)["lse"][1]
    assert half.flops * 2 == dense.flops
    assert (half.hbm - linear) * 2 == dense.hbm - linear
    backward = [io_model.flash_backward(p, (128, 128), density=s) for s in (1.0, 0.25)]
    assert backward[1].flops * 4 == backward[0].flops
    sram = F16 * 2**15
    ratios = [elements(io_model.algorithm_1(p, sram, s)) / io_model.theta_flash(p, sram, s) for s in (1.0, 0.5, 0.1)]
    assert all(1 < r < 13 for r in ratios), "Proposition 4"
    n, d, m = 2**14, 64, 2**15
    assert io_model.theta_flash(p, sram) == n**2 * d**2 / m
    assert io_model.theta_flash(p, sram, 0.25) == n * d + 0.25 * n**2 * d**2 / m


def test_kinds_of_a_schedule_count_as_they_are():
    """Two heads with different patterns; full and partial tiles alike, shared by a batch of 3."""
    kinds = np.array([[[2, 0, 0], [1, 1, 0]], [[0, 0, 0], [0, 0, 2]]], np.int8)[None]
    p = problem(6, 10, batch=3, num_heads=2)
    v = io_model.visits(p, 4, 4, kinds=kinds)
    # head 0: (4 rows x 4 keys), (2 x 4), (2 x 4); head 1: the corner (2 x 2)
    assert v == (4, 4, 3 * 4, 3 * (16 + 8 + 8 + 4), 3 * (4 + 2 + 2 + 2), 3 * (4 + 4 + 4 + 2))
    blocks = io_model.visits(p, 4, 4, kinds=schedule.block_kinds(np.ones((1, 1, 1, 1), bool), (8, 16), 4, 4, 6, 10))
    assert blocks == io_model.visits(p, 4, 4)


def test_a_long_causal_problem_visits_half():
    """Longer than what is evaluated at once, and no multiple of the tile."""
    n, block = 20_001, 128
    v = io_model.visits(problem(n, mask=Mask.causal()), block, block)
    t = -(-n // block)
    last = n - (t - 1) * block
    assert v.tiles == t * (t + 1) // 2
    assert v.rows == (t - 1) * t // 2 * block + t * last
    assert v.scores == block**2 * (t - 1) * t // 2 + last * n


# --------------------------------------------------------------------------------------------------- device, cache
def test_without_a_cache_everything_reaches_hbm():
    p = problem(4096, num_heads=8, head_dim=64)
    for cost in (io_model.standard_forward(p), io_model.flash_forward(p, (128, 128)), io_model.flash_backward(p, (128, 128))):
        assert sum(io_model.dram_bytes(k, cores=132, cache=0) for k in cost.kernels) == cost.hbm


def test_a_cache_keeps_what_fits():
    """One head of 4096 x 64 float16: keys and values 1 MiB together, 32 q tiles, scores 32 MiB."""
    p = problem(4096, head_dim=64)
    flash, (scores, softmax, output) = io_model.flash_forward(p, (128, 128)).kernels[0], io_model.standard_forward(p).kernels
    once, sweep = 4 * 4096 * 64 * F16 + 4096 * F32, 2 * 4096 * 64 * F16
    lse = 4096 * F32
    assert io_model.dram_bytes(flash, cores=4, cache=2**20) == once - lse, "keys and values stay"
    assert io_model.dram_bytes(flash, cores=4, cache=2**20 - 1) == once - lse + (32 // 4 - 1) * sweep, "4 cores share a walk"
    matrix = 4096 * 4096 * F16
    assert io_model.dram_bytes(softmax, cores=4, cache=matrix - 1) == 2 * matrix
    assert io_model.dram_bytes(softmax, cores=4, cache=matrix) == 0
    assert io_model.dram_bytes(scores, cores=4, cache=matrix) == sweep
    assert io_model.dram_bytes(output, cores=4, cache=matrix - 1) == matrix + sweep


def test_a_cache_holds_the_heads_in_flight():
    """8 heads of 4 q tiles each, keys and values 64 KiB a head: 8 cores work on 2 heads, 64 cores on all 8."""
    kernel = io_model.flash_forward(problem(256, num_heads=8, head_dim=64), (64, 64)).kernels[0]
    once = 8 * 4 * 256 * 64 * F16
    assert kernel.sweepers == 4
    for cores, heads in ((8, 2), (64, 8)):
        assert io_model.dram_bytes(kernel, cores, heads * 2**16) == once
        assert io_model.dram_bytes(kernel, cores, heads * 2**16 - 1) == once, "the 4 tiles of a head walk together"
    assert io_model.dram_bytes(kernel, 2, 2**16) == once
    assert io_model.dram_bytes(kernel, 2, 2**16 - 1) == once + 8 * 2**16, "two by two"


def test_roofline_by_hand():
    device = io_model.Device("toy", bandwidth=1e9, matrix_rate=1e12, sram=10**6, registers=0, cores=1, cache=0, sources="invented")
    p = problem(1024, head_dim=64)
    s, softmax, out = io_model.standard_forward(p).kernels
    moved = [(2 * 1024 * 64 + 1024**2) * F16, 2 * 1024**2 * F16, (1024**2 + 2 * 1024 * 64) * F16]
    assert [io_model.dram_bytes(k, 1, 0) for k in (s, softmax, out)] == moved
    assert io_model.seconds(io_model.standard_forward(p), device) == pytest.approx(sum(moved) / 1e9), (
        "memory: 2.4 ms, products: 0.1 ms each"
    )
    flash = io_model.flash_forward(p, (1024, 128))
    assert io_model.seconds(flash, device) == pytest.approx(flash.hbm / 1e9)


@pytest.mark.parametrize("name", io_model.DEVICES)
def test_short_sequences_gain_nothing(name):
    """Where all scores fit into the cache, nothing is saved and the backward does more; where they do not, flash is ahead."""
    device = io_model.DEVICES[name]
    shape = {"num_heads": 16, "head_dim": 64}
    short = problem(256, **shape)
    assert io_model.speedup(short, device, (128, 128), backward=False) == pytest.approx(1)
    assert io_model.speedup(short, device, (128, 128), backward=True) < 1
    start = io_model.gain_from(short, device, (128, 128), backward=True)
    assert (start / 2**0.5) ** 2 * 16 * F16 <= device.cache < 2 * start**2 * 16 * F16, "the scores just no longer fit"
    for n in (start, 2 * start, 16384):
        assert io_model.speedup(problem(n, **shape), device, (128, 128), backward=True) >= 1.05
    assert io_model.gain_from(problem(256, batch=64, **shape), device, (128, 128), backward=True) < start, "a batch fills the cache sooner"


def test_datasheets_are_named():
    for device in io_model.DEVICES.values():
        assert f"{device.matrix_rate / 1e12:g} TFLOP/s" in device.sources
        assert f"{device.bandwidth / 1e12:g} TB/s" in device.sources or f"{device.bandwidth / 1e9:g} GB/s" in device.sources


# ------------------------------------------------------------------------------------------------- errors, command
def test_what_is_not_counted_is_refused():
    p = problem(64)
    with pytest.raises(ValueError, match=r"density must be above 0 and at most 1, got 1\.5"):
        io_model.visits(p, 8, 8, density=1.5)
    with pytest.raises(ValueError, match="density says which tiles are visited, and so do kinds or the problem's mask"):
        io_model.visits(problem(64, mask=Mask.causal()), 8, 8, density=0.5)
    with pytest.raises(ValueError, match="its mask depends on data or is no interval"):
        io_model.visits(problem(64, mask=Mask.from_function(lambda b, h, q, k: q > k)), 8, 8)
    with pytest.raises(ValueError, match=r"kinds must end in \[8, 8\]"):
        io_model.visits(p, 8, 8, kinds=np.ones((1, 1, 4, 8), np.int8))
    with pytest.raises(ValueError, match="q_len must be at least 1, got 0"):
        problem(0)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 4 and 3"):
        problem(8, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="Give block_sizes, or sram"):
        io_model.flash_forward(p)
    for changed in ({"dropout_rate": 0.1}, {"bias_shape": (1, 1, 64, 64)}):
        with pytest.raises(NotImplementedError, match="bias and dropout are not counted"):
            io_model.standard_forward(dataclasses.replace(p, **changed))


COMMAND = ["--q-len", "2048", "--head-dim", "64", "--num-heads", "16", "--batch", "8", "--device", "h200", "--block-sizes", "128", "128"]


def test_command_as_json(capsys):
    main([*COMMAND, "--json"])
    data = json.loads(capsys.readouterr().out)
    p = problem(2048, batch=8, num_heads=16, head_dim=64)
    costs = [io_model.standard_forward(p), io_model.algorithm_1(p, 227 * 1024), io_model.flash_forward(p, (128, 128))]
    assert [a["read"] for a in data["forward"]] == [c.read for c in costs]
    assert [a["flops"] for a in data["forward"]] == [c.flops for c in costs]
    assert data["score_matrix_bytes"] == 8 * 16 * 2048**2 * F16
    (device,) = data["devices"]
    assert device["forward_flash_seconds"] == io_model.seconds(costs[2], io_model.DEVICES["h200"])
    assert "datasheet" in device["sources"]


def test_command_as_text(capsys):
    main(COMMAND)
    shown = capsys.readouterr().out
    assert "forward: Algorithm 1, tiles 64 x 454" in shown
    assert "forward: flash_jax, tiles 128 x 128" in shown
    assert "flash does +16.7%" in shown
    assert "one matrix of scores is 1.074 GB, flash keeps 1.049 MB" in shown
    assert "H200 SXM" in shown


def test_command_has_no_times_for_float32(capsys):
    main([*COMMAND, "--dtype", "float32"])
    shown = capsys.readouterr().out
    assert "No roofline: the devices' matrix rates are of bfloat16 and float16." in shown
    assert "one matrix of scores is 2.147 GB" in shown


def test_command_plots(tmp_path: pathlib.Path):
    path = tmp_path / "out.png"
    main([*COMMAND, "--plot", str(path)])
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[0] > 300
    assert pixels.std() > 0.05, "something is drawn"


def test_command_names_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--q-len", "64", "--head-dim", "8", "--density", "2"])
    assert "density must be above 0 and at most 1, got 2.0" in capsys.readouterr().err


def test_the_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["io_model", *COMMAND, "--window", "100", "none", "--json"])
    runpy.run_path(str(pathlib.Path(io_model.__file__).parent / "__main__.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out)["problem"]["mask"] == "the interval offset=0, left=100"
