"""Every implementation that runs on this machine against the float64 oracle, over the whole list of cases."""

import functools

import jax
import numpy as np
import pytest
from cases import BY_NAME, CASES
from oracle import of_case, unfused, value_and_gradients
from tolerance import assert_as_exact_as_unfused

from flash_jax import dispatch, flash_attention
from flash_jax.backends.base import Device

TILES = (32, 48)  # several tiles, partial ones, in the small cases; a user's block_sizes


def check(case, attention):
    arguments, dout, dlse, plain, expected = of_case(case)
    got = value_and_gradients(attention, arguments, dout, dlse)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        dtype = arguments["query"].dtype if name != "lse" else np.float32
        assert_as_exact_as_unfused(f"{case.name}: {name}", x, plain[name], expected[name], dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla(case):
    blocks = None if case.name == "longer_than_a_tile" else TILES
    check(case, functools.partial(flash_attention, implementation="xla", return_residual=True, block_sizes=blocks))


@pytest.mark.parametrize("tiles", [(1, 1), (7, 70), (70, 5), (64, 64), (512, 512)], ids=str)
@pytest.mark.parametrize("name", ["everything", "blocks_by_head", "bottom_right_empty_rows"])
def test_any_tile_size_gives_the_same(name, tiles):
    check(BY_NAME[name], functools.partial(flash_attention, implementation="xla", return_residual=True, block_sizes=tiles))


@pytest.mark.parametrize("name", ["everything", "blocks_by_head", "both_lengths_causal", "function_with_operands", "two_batch_axes"])
def test_xla_with_the_whole_batch_in_one_tile(name, monkeypatch):
    """What an accelerator gets: fewer, larger steps, that skip what all batch entries skip."""
    monkeypatch.setattr(dispatch, "current_device", lambda *arrays: Device("gpu", "some GPU"))
    check(BY_NAME[name], functools.partial(flash_attention, implementation="xla", return_residual=True, block_sizes=TILES))


def test_float64():
    with jax.enable_x64(True):
        arguments, dout, dlse = BY_NAME["everything"].build()
        wide = {n: x.astype(np.float64) if n in ("query", "key", "value", "bias", "sinks") else x for n, x in arguments.items()}
        expected = unfused(wide, dout, dlse)
        attention = functools.partial(flash_attention, return_residual=True, block_sizes=TILES)
        got = value_and_gradients(attention, wide, dout, dlse)
        for name in expected:
            assert got[name].dtype == np.float64 or name == "dscale"
            assert_as_exact_as_unfused(name, got[name], expected[name], expected[name], np.float64 if name != "dscale" else np.float32)
