"""The IO model's counts by hand, their limits, and what makes them grow."""

import numpy as np
import pytest
from io_support import F16, F32, by_array, elements, problem

from flash_jax import Mask, io_model, schedule


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
