"""The IO model's counts against loops that are run: slices of real arrays, each access weighed."""

import collections

import numpy as np
import pytest
from io_support import by_array, problem

from flash_jax import Mask, io_model


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
