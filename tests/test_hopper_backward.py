"""The Hopper backward in Mosaic GPU's interpreter, race detector on: gradients against the float64 oracle."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_NAME
from hopper_interpret import gradients_one_by_one, interpreted
from oracle import in_float64, reference_attention, unfused
from tolerance import assert_as_exact_as_unfused

from flash_jax import Mask, api, reference
from flash_jax.backends import hopper
from flash_jax.backends.base import Device
from flash_jax.backends.hopper import backward, launch, turns


def gradients(arguments, dout, dlse, wanted):
    """By the kernels, from out and lse of the reference in float32."""
    request = api.prepare(**arguments)
    problem = request.problem
    assert launch.declines(problem) is backward.declines(problem) is None
    wide = {n: x.astype(jnp.float32) if n in ("query", "key", "value") else x for n, x in arguments.items()}
    out, lse = reference_attention(**wide)
    args = (out.astype(problem.dtype), lse, dout.astype(problem.dtype), dlse)
    shapes = (problem.out_shape, problem.lse_shape) * 2
    out, lse, dout, dlse = (x.reshape(shape) for x, shape in zip(args, shapes, strict=True))
    with interpreted():
        return gradients_one_by_one(functools.partial(backward.backward, problem, request.operands), (out, lse, dout, dlse), wanted)


ORDERED = {"deterministic_backward": True}
FAST = [
    ("causal", {}),
    ("both_lengths_causal", {"head_dim": 200}),
    ("bias_of_padding", {}),  # a bias that is copied
    ("gqa", {"q_len": 150, "kv_len": 150} | ORDERED),
]
SLOW = [
    ("full", {"q_len": 130, "kv_len": 260} | ORDERED),
    ("window", {"q_len": 200, "kv_len": 300, "head_dim": 128} | ORDERED),
    ("both_lengths_causal", {"head_dim": 200, "q_len": 130, "kv_len": 200, "num_heads": 4} | ORDERED),
    ("packed", {"q_len": 70, "kv_len": 70, "head_dim": 200} | ORDERED),
    ("scattered_labels", {"q_len": 200, "kv_len": 300} | ORDERED),
    ("dense_full", ORDERED),
    ("everything", {"num_heads": 4} | ORDERED),
    ("full", {"head_dim": 200}),
    ("full", {"head_dim": 100, "dtype": "float16"}),
    ("window", {"head_dim": 128, "q_len": 200, "kv_len": 200}),
    ("bottom_right_empty_rows", {}),
    ("both_lengths_causal", {}),
    ("kv_lengths", {"head_dim": 200}),
    ("packed", {}),
    ("scattered_labels", {}),
    ("dense_keys", {}),
    ("dense_full", {}),
    ("soft_cap", {}),
    ("soft_cap", {"head_dim": 200}),
    ("dropout", {}),
    ("dropout", {"head_dim": 200}),
    ("scale_array", {}),
    ("bias_rows_gqa", {}),
    ("bias_of_padding", {"bias_dtype": jnp.float32, "head_dim": 128, "q_len": 50}),
    ("bias_of_padding", {"head_dim": 200}),
    ("bias_keys", {}),
    ("bias_full", {"head_dim": 128}),
    ("bias_shared_batch_hides", {"num_heads": 2, "num_kv_heads": 1}),
    ("soft_cap_bias", {"head_dim": 200}),
    ("v_head_dim", {}),
    ("function_over_captured", {}),
    ("function_with_operands", {"head_dim": 200}),
    ("function_of_positions", {"q_len": 150, "kv_len": 150, "head_dim": 128}),
    ("two_segmentations", ORDERED),
    ("blocks", {"q_len": 150, "kv_len": 150}),
    ("blocks_by_head", {"num_kv_heads": 2}),
    ("everything", {"num_heads": 4}),
]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(*x, id=str(x)) for x in FAST] + [pytest.param(*x, marks=pytest.mark.slow, id=str(x)) for x in SLOW],
)
def test_gradients(name, sizes):
    sizes = dict(sizes)
    options = {n: sizes.pop(n) for n in ORDERED if n in sizes}
    bias_dtype = sizes.pop("bias_dtype", None)
    case = dataclasses.replace(BY_NAME[name], **{"dtype": "bfloat16", **sizes})
    arguments, dout, dlse = case.build()
    if bias_dtype is not None:
        arguments["bias"] = arguments["bias"].astype(bias_dtype)
    arguments.pop("sinks", None)
    check_gradients(arguments | options, dout, dlse, case.dtype)


def check_gradients(arguments, dout, dlse, dtype):
    operands = api.prepare(**arguments).operands
    wanted = ("query", "key", "value", *(n for n in ("bias", "scale") if getattr(operands, n) is not None))
    got = gradients(arguments, dout, dlse, wanted)
    expected, yardstick = in_float64(arguments, dout, dlse), unfused(arguments, dout, dlse)
    checked = [n for n in wanted if f"d{n}" in expected]
    assert checked[:3] == ["query", "key", "value"]
    for n in checked:
        x = np.asarray(got[n].astype(jnp.float32)).reshape(expected[f"d{n}"].shape)
        assert_as_exact_as_unfused(f"d{n}", x, yardstick[f"d{n}"], expected[f"d{n}"], dtype)


def test_whole_blocks_hide_keys_where_an_lse_has_lost_log_l():
    case = dataclasses.replace(BY_NAME["bias_of_padding"], dtype="bfloat16", q_len=128, kv_len=256, head_dim=64)
    arguments, dout, dlse = case.build()
    check_gradients(arguments | {"mask": Mask.from_blocks(jnp.array([[True, False]]), 128, 128)}, dout, dlse, case.dtype)


def visited(ranges=None, lists=None, num_kv_tiles=0, num_q_tiles=0):
    """Booleans `[1, 1, num_kv_tiles, num_q_tiles]`, by the rule of `Walk`."""
    seen = np.zeros((1, 1, num_kv_tiles, num_q_tiles), bool)
    for kv in range(num_kv_tiles):
        if lists is not None:
            seen[0, 0, kv, lists[0, 0, kv, 2 : 2 + lists[0, 0, kv, 1]]] = True
        else:
            seen[0, 0, kv, slice(None) if ranges is None else slice(ranges[0, kv, 0], ranges[0, kv, 3])] = True
    return seen


@pytest.mark.parametrize("source", ["all", "ranges", "lists"])
def test_turns_number_the_blocks_that_visit_a_query_tile(source):
    random = np.random.default_rng(0)
    begin, index = random.integers(0, 6, (1, 7)), np.stack([random.permutation(9) for _ in range(7)])
    ranges = np.stack([begin, begin, begin, begin + 3], -1)
    lists = np.concatenate([np.zeros((7, 1), int), random.integers(0, 10, (7, 1)), index], -1)[None, None]
    arguments = {"ranges": ranges if source == "ranges" else None, "lists": lists if source == "lists" else None}
    table = np.asarray(turns.table(*(None if x is None else jnp.asarray(x) for x in arguments.values()), 7, 9))
    seen = visited(**arguments, num_kv_tiles=7, num_q_tiles=9)
    for tile in range(9):
        assert table[0, 0, seen[0, 0, :, tile], tile].tolist() == list(range(seen[0, 0, :, tile].sum()))


def labels_of_nothing(case):
    """Packed rows with labels that only rows, only keys, or keys after all rows of that label have."""
    arguments, dout, dlse = case.build()
    ids = np.asarray(arguments["q_segment_ids"])
    q_ids, kv_ids = ids.copy(), ids.copy()
    q_ids[0, 30:33], kv_ids[0, 40:44], kv_ids[1, 69] = 7, 8, ids[1, 0]
    q_ids[1, 64:] = 9
    return arguments | {"q_segment_ids": jnp.asarray(q_ids), "kv_segment_ids": jnp.asarray(kv_ids)}, dout, dlse


def keys_hidden_by_two_rules(case):
    """Rows before key 20 do not see it by the causal rule, the others not by an array; half of the heads have such a key 45 too."""
    arguments, dout, dlse = case.build()
    mask = np.ones((1, case.num_heads, case.q_len, case.kv_len), bool)
    mask[:, :, 20:, 20] = mask[:, case.num_heads // 2 :, 45:, 45] = False
    mask[:, 0, 50] = False
    return arguments | {"mask": jnp.asarray(mask)}, dout, dlse


def with_a_bias_of_keys(case):
    arguments, dout, dlse = case.build()
    return arguments | {"bias": jnp.linspace(-1, 1, case.kv_len)}, dout, dlse


POISONED = {"both_lengths_causal": with_a_bias_of_keys, "packed": labels_of_nothing, "gqa": keys_hidden_by_two_rules}


@pytest.mark.parametrize("head_dim", [16, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", POISONED)
def test_what_stands_in_unseen_rows_and_keys_reaches_no_gradient(name, head_dim):
    case = dataclasses.replace(BY_NAME[name], dtype="bfloat16", head_dim=head_dim)
    arguments, dout, dlse = POISONED[name](case)
    wanted = ("query", "key", "value", *arguments.keys() & {"bias"})
    clean = gradients(arguments, dout, dlse, wanted)
    request = api.prepare(**arguments)
    visible = np.asarray(reference.visible_scores(request.problem, request.operands))
    rows, keys = (~seen.swapaxes(1, 2) for seen in (visible.any(3), visible.reshape(2, case.num_kv_heads, -1, 70).any(2)))
    assert rows.any()
    assert keys.any()
    spoil = lambda x, where: jnp.where(where[..., None], jnp.nan, x)
    poisoned = arguments | {
        "query": spoil(arguments["query"], rows),
        "key": spoil(arguments["key"], keys),
        "value": spoil(arguments["value"], keys),
    }
    wide = {n: x.astype(jnp.float32) if n in ("query", "key", "value") else x for n, x in arguments.items()}
    out, lse = reference_attention(**wide)
    operands = api.prepare(**poisoned).operands
    args = (out.astype(jnp.bfloat16), lse, spoil(dout, rows).astype(jnp.bfloat16), jnp.where(rows, jnp.nan, dlse))
    with interpreted():
        spoiled = gradients_one_by_one(functools.partial(backward.backward, request.problem, operands), args, wanted)
    for n, x in clean.items():
        np.testing.assert_array_equal(np.asarray(spoiled[n].astype(jnp.float32)), np.asarray(x.astype(jnp.float32)), err_msg=n)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": np.dtype(np.float32)}, "must be bfloat16 or float16"),
        ({"head_dim": 320}, "at most 256"),
        ({"batch": 65536}, "at most 65535"),
    ],
)
def test_declines(changes, sentence):
    problem, device = api.prepare(*(jnp.zeros((1, 8, 1, 64), jnp.bfloat16) for _ in range(3))).problem, Device("gpu", "NVIDIA H200")
    assert hopper.why_not(problem, device) is None
    assert sentence in hopper.why_not(dataclasses.replace(problem, **changes), device)
