"""The maximum in the Hopper forward: kept from the first key tile on, and searched for where a row is lost by that. Interpreted."""

import jax
import numpy as np
import oracle
import pytest
from cases import Case
from hopper_interpret import interpreted
from tolerance import assert_as_exact_as_unfused

from flash_jax import api
from flash_jax.backends import hopper
from flash_jax.backends.base import Device
from flash_jax.backends.hopper.forward_tile import Config, Inputs, Rows, Tile

H200 = Device("gpu", "NVIDIA H200")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("dtype", "kv_len", "head_dim", "warpgroups"),
    [("bfloat16", 1, 64, 2), ("bfloat16", 150, 128, 2), pytest.param("float16", 150, 64, 1, marks=pytest.mark.slow)],
)
def test_equal_keys_weigh_alike_where_logits_are_beyond_1e9(dtype, kv_len, head_dim, warpgroups):
    """In every tile of keys, and of rows, on one multiprocessor: logits of 10 and thereabouts, of some 10^8 and of more than 10^9.

    Products are exact in float32, in whatever order they are added. Weights of the second tile of rows fit bfloat16 as they are.
    """
    query = (2.0 ** np.repeat([-15, 10, 15], 64) * (1 + np.arange(192) % 8 / 8))[None, :, None, None] * np.ones(head_dim)
    key = np.full((1, kv_len, 1, head_dim), 2.0**15)
    arrays = [np.asarray(x, dtype) for x in (query, key, np.random.default_rng(0).standard_normal(key.shape))]
    request = api.prepare(*arrays)
    with interpreted(multiprocessors=1):
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(request.problem, Config(warpgroups, 64), request.operands))()
    np.testing.assert_allclose(lse, (query * key[:, :1]).sum(-1) / head_dim**0.5 + np.log(kv_len), rtol=1e-6)
    mean = arrays[2].astype(np.float64).mean(1, keepdims=True)
    np.testing.assert_allclose(np.asarray(out, np.float64), np.broadcast_to(mean, out.shape), atol=2e-3)


def one_key_outweighs(row, key, logit):
    """The key's logit of that row."""

    def change(query, keys):
        keys[:, key] = query[:, row] * logit * query.shape[-1] ** 0.5 / (query[:, row] ** 2).sum(-1, keepdims=True)

    return change


def first_keys_outweigh(query, keys):
    """In nearly all rows."""
    keys[:, :16] *= 300


def all_logits_are(logit):
    """And thereabouts."""

    def change(query, keys):
        keys[..., 0], query[..., 0] = 1, logit * query.shape[-1] ** 0.5

    return change


def last_keys_for_one_row(case, random):
    visible = np.ones((1, 1, case.q_len, case.kv_len), bool)
    visible[..., -128:] = np.arange(case.q_len)[:, None] == 3
    return {"mask": visible}


def keys_of_no_row(case, random):
    """V is cleared, for which warpgroups meet."""
    labels = np.arange(300) // 170
    return {"q_segment_ids": labels, "kv_segment_ids": np.where(np.arange(300) // 4 == 10, 9, labels)}


LOST = {  # dtype, options, how query and key are changed, and the length if it is not 300
    "causal": ("bfloat16", lambda *_: {"is_causal": True}, one_key_outweighs(290, 3, 200)),
    "full": ("bfloat16", lambda *_: {}, one_key_outweighs(60, 3, 200)),
    "nearly": ("bfloat16", lambda *_: {}, one_key_outweighs(60, 3, 89.25)),  # whose sum is finite, and not its inverse on all machines
    "labels": ("bfloat16", lambda *_: dict.fromkeys(("q_segment_ids", "kv_segment_ids"), np.arange(300) // 170), all_logits_are(-300)),
    "array": ("bfloat16", last_keys_for_one_row, all_logits_are(-300)),
    "half": ("float16", lambda *_: {"is_causal": True}, one_key_outweighs(290, 3, 20)),
    "half low": ("float16", last_keys_for_one_row, all_logits_are(-15)),
    "cleared": ("bfloat16", keys_of_no_row, one_key_outweighs(160, 3, 200)),
    "all": ("bfloat16", lambda *_: {"is_causal": True}, first_keys_outweigh, 600),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", LOST)
def test_weights_that_leave_their_range(name):
    """Relative to the first key tile's maximum; on one multiprocessor, with two tiles of rows that search at once where all are lost."""
    dtype, options, change, *rest = LOST[name]
    length = rest[0] if rest else 300
    case = Case(name, options, q_len=length, kv_len=length, num_heads=1, num_kv_heads=1, head_dim=64, batch=(1,), dtype=dtype)
    arguments, dout, dlse = case.build()
    query, key = (np.array(arguments[n], np.float64) for n in ("query", "key"))
    change(query, key)
    arguments |= {"query": jax.numpy.asarray(query, dtype), "key": jax.numpy.asarray(key, dtype)}
    expected, unfused = oracle.in_float64(arguments, dout, dlse), oracle.unfused(arguments, dout, dlse)
    request = api.prepare(**arguments)
    with interpreted(multiprocessors=1):
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(request.problem, Config(2, 128), request.operands))()
    for part, x in {"out": out, "lse": lse}.items():
        x = np.asarray(x.astype(np.float32)).reshape(expected[part].shape)
        assert_as_exact_as_unfused(part, x, unfused[part], expected[part], np.float32 if part == "lse" else dtype)


def test_a_row_whose_weights_are_all_0_is_lost_if_it_sees_a_key():
    """A card rounds `s * factor - m` once, by which the weight of a single huge score can be 0. m is 0 where no key is seen."""
    x = jax.numpy.ones((1, 64, 1, 64), "bfloat16")
    tile = Tile(steps=1, first=0, full_begin=1, full_end=1, visible=1, b=0)
    rows = Rows(api.prepare(x, x, x).problem, Config(1, 64), Inputs(query=x, key=x, value=x, table=None, counts=None), tile, 0)
    m = jax.numpy.zeros(64).at[:2].set(jax.numpy.array([2.0**33, -90.0]))
    lost, has_sum = rows.is_lost(tile, m, jax.numpy.zeros((64, 8)), jax.numpy.zeros((64, 64)))
    np.testing.assert_array_equal(lost, np.arange(64) < 2)
    np.testing.assert_array_equal(has_sum, 0)


@pytest.mark.timeout(200)
def test_a_scale_below_the_smallest_normal_number():
    """A CPU takes it for 0, and -inf * 0 is NaN."""
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 70, 1, 16)), "bfloat16")
    request = api.prepare(x, x, x, scale=8e-39, is_causal=True)
    config, _ = hopper.BACKEND.default_config(request.problem, H200)
    with interpreted():
        out, lse = jax.jit(lambda: hopper.BACKEND.forward(request.problem, config, request.operands))()
    value, seen = np.asarray(x[0, :, 0], np.float64), np.arange(1, 71)
    np.testing.assert_allclose(np.asarray(out[0, :, 0], np.float64), value.cumsum(0) / seen[:, None], atol=0.02)
    np.testing.assert_allclose(np.asarray(lse)[0, :, 0], np.log(seen), atol=1e-5)
