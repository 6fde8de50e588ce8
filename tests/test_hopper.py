"""The Hopper kernels without a Hopper: interpreted with race detection, and lowered. On a card: `pytest --device`."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import BY_NAME
from hopper_interpret import interpreted
from oracle import of_case
from tolerance import assert_as_exact_as_unfused

from flash_jax import api
from flash_jax.backends import hopper
from flash_jax.backends.base import Device
from flash_jax.backends.hopper import work
from flash_jax.problem import DIFFERENTIABLE

H200 = Device("gpu", "NVIDIA H200")
SHORT = ["everything"]  # in every run; the rest with --slow
LONG = [
    "full",
    "window",
    "both_lengths_causal",
    "packed",
    "scattered_labels",
    "dense_heads",
    "bias_keys",
    "gqa",
    "v_head_dim",
    "one_row",
    "dropout",
    "soft_cap",
]


@functools.cache
def in_bfloat16(name):
    """The case without sinks, which are not the kernels' business."""
    case = BY_NAME[name]
    options = lambda _, random: {n: x for n, x in case.options(case, random).items() if n != "sinks"}
    return dataclasses.replace(case, dtype="bfloat16", options=options)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_interpreted(name):
    arguments, dout, dlse, unfused, expected = of_case(in_bfloat16(name))
    request = api._prepare(**arguments)
    problem, operands = request.problem, request.operands
    assert hopper.BACKEND.why_not(problem, H200) is None
    wanted = tuple(n for n in DIFFERENTIABLE if getattr(operands, n) is not None)
    config = hopper.BACKEND.default_config(problem, H200)

    def run():
        out, lse = hopper.BACKEND.forward(problem, config, operands)
        cotangents = dout.reshape(out.shape).astype(out.dtype), dlse.reshape(lse.shape)
        gradients = hopper.BACKEND.backward(problem, config, operands, out, lse, *cotangents, wanted)
        return {"out": out, "lse": lse} | {f"d{n}": x for n, x in gradients.items()}

    with interpreted():
        got = jax.block_until_ready(jax.jit(run)())
    for part, x in got.items():
        x = np.asarray(x.astype(np.float32)).reshape(expected[part].shape)
        assert_as_exact_as_unfused(f"{name}: {part}", x, unfused[part], expected[part], np.float32 if part == "lse" else problem.dtype)


def test_work_is_dealt_once_and_evenly():
    steps = np.arange(1, 33)
    table = work.deal(steps, batch=2, num_heads=4, bytes_per_head=2**20, num_multiprocessors=7)
    tiles = [tuple(entry) for entry in table.reshape(-1, 3) if entry[0] >= 0]
    assert sorted(tiles) == [(b, h, q) for b in range(2) for h in range(4) for q in range(32)]
    load = [sum(steps[entry[2]] for entry in entries if entry[0] >= 0) for entries in table]
    assert max(load) <= 1.05 * sum(load) / 7


def test_work_is_dealt_by_data_once_and_evenly():
    steps = np.random.default_rng(0).integers(1, 40, (2, 3, 17))
    b, head, q_tile = (np.asarray(x) for x in work.deal_by_data(jax.numpy.asarray(steps), 5))
    used = b >= 0
    tiles = sorted(zip(b[used].tolist(), head[used].tolist(), q_tile[used].tolist(), strict=True))
    assert tiles == [(i, j, k) for i in range(2) for j in range(3) for k in range(17)]
    assert all((row[: row.sum()]).all() for row in used), "a list has no holes"
    load = [steps[b[n][used[n]], head[n][used[n]], q_tile[n][used[n]]].sum() for n in range(5)]
    assert max(load) <= 1.1 * steps.sum() / 5


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lowers_for_a_gpu(head_dim):
    x = jax.ShapeDtypeStruct((1, 300, 4, head_dim), "bfloat16")
    problem = api._prepare(*(np.zeros(x.shape, x.dtype) for _ in range(3)), is_causal=True).problem
    config = hopper.BACKEND.default_config(problem, H200)

    def run(q, k, v):
        operands = api._prepare(q, k, v, is_causal=True).operands
        out, lse = hopper.BACKEND.forward(problem, config, operands)
        return hopper.BACKEND.backward(problem, config, operands, out, lse, out, lse, ("query", "key", "value"))

    text = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2


def test_declines_name_what_came():
    def case(dtype=np.float16, **options):
        return api._prepare(*(np.zeros((1, 8, 1, 64), dtype) for _ in range(3)), **options).problem

    reasons = {
        "must be bfloat16 or float16, got float32": case(dtype=np.float32),
        "got (8, 8)": case(block_sizes=(8, 8)),
    }
    for text, problem in reasons.items():
        assert text in hopper.BACKEND.why_not(problem, H200)
    assert "got cpu" in hopper.BACKEND.why_not(case(), Device("cpu", "cpu"))
