"""Every implementation that runs on this machine against the float64 oracle, over the whole list of cases."""

import functools

import jax
import numpy as np
import pytest
from cases import BY_NAME, CASES
from oracle import of_case, value_and_gradients
from tolerance import assert_as_exact_as_unfused

from flash_jax import flash_attention

TILES = (32, 48)  # several tiles, partial ones, in the small cases; a user's block_sizes


def check(case, attention):
    arguments, dout, dlse, unfused, expected = of_case(case)
    got = value_and_gradients(attention, arguments, dout, dlse)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        dtype = arguments["query"].dtype if name != "lse" else np.float32
        assert_as_exact_as_unfused(f"{case.name}: {name}", x, unfused[name], expected[name], dtype)
    for name in arguments.keys() & {n[1:] for n in got}:
        assert (
            got[f"d{name}"].dtype
            == np.asarray(arguments[name].astype(np.float32) if arguments[name].dtype == "bfloat16" else arguments[name]).dtype
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla(case):
    blocks = None if case.name == "longer_than_a_tile" else TILES
    check(case, functools.partial(flash_attention, implementation="xla", return_residual=True, block_sizes=blocks))


@pytest.mark.parametrize("tiles", [(1, 1), (7, 70), (70, 5), (64, 64), (512, 512)], ids=str)
@pytest.mark.parametrize("name", ["everything", "blocks_by_head", "bottom_right_empty_rows"])
def test_any_tile_size_gives_the_same(name, tiles):
    check(BY_NAME[name], functools.partial(flash_attention, implementation="xla", return_residual=True, block_sizes=tiles))


def test_float64():
    with jax.enable_x64(True):
        arguments, dout, dlse = BY_NAME["everything"].build()
        wide = {n: x.astype(np.float64) if n in ("query", "key", "value", "bias", "sinks") else x for n, x in arguments.items()}
        from oracle import unfused

        expected = unfused(wide, dout, dlse)
        attention = functools.partial(flash_attention, return_residual=True, block_sizes=TILES)
        got = value_and_gradients(attention, wide, dout, dlse)
        for name in expected:
            assert got[name].dtype == np.float64 or name == "dscale"
            assert_as_exact_as_unfused(name, got[name], expected[name], expected[name], np.float64 if name != "dscale" else np.float32)
