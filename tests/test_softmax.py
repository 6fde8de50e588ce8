"""The row verbs, by hand: the teaching core of the library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_jax import flash_attention, softmax

NEUTRAL = softmax.State(jnp.float32(-jnp.inf), jnp.float32(0), jnp.float32(0))


def tile_step(state, logits, values):
    """One tile of a row: the loop body of every forward kernel, in natural units outside."""
    s = jnp.asarray(logits, jnp.float32) * softmax.LOG2E
    m, pivot, alpha = softmax.rescale(state.m, s.max())
    p = softmax.probs(s, pivot)
    return softmax.State(m, state.l * alpha + p.sum(), state.acc * alpha + (p * jnp.asarray(values, jnp.float32)).sum())


def natural(state):
    """(m, l, u): running maximum, denominator and unnormalised output."""
    return [float(state.m) * softmax.LN2, float(state.l), float(state.acc)]


TILES = {  # tile order -> m, l, u after each tile, for the row of logits [2, 1, 0] and values [1, 3, 5]
    ((2.0, 1.0), (0.0,)): [(2, 1.367879, 2.103638), (2, 1.503215, 2.780315)],
    ((0.0,), (2.0, 1.0)): [(0, 1.0, 5.0), (2, 1.503215, 2.780315)],
}
VALUES = {2.0: 1.0, 1.0: 3.0, 0.0: 5.0}


@pytest.mark.parametrize("order", TILES, ids=str)
def test_the_worked_example(order):
    state = NEUTRAL
    for tile, expected in zip(order, TILES[order], strict=True):
        state = tile_step(state, tile, [VALUES[x] for x in tile])
        np.testing.assert_allclose(natural(state), expected, rtol=1e-6)
    out, lse = softmax.finish(*state, column=lambda row: row)
    np.testing.assert_allclose(out, 1.849579, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(np.exp([2.0, 1.0, 0.0]).sum()), rtol=1e-6)


def test_a_maximum_that_rises_in_the_last_tile_and_extreme_logits():
    logits, values = [-1e4, 3.0, 2.0, 1e4], [7.0, 5.0, -2.0, 11.0]
    state = NEUTRAL
    for s, v in zip(logits, values, strict=True):
        state = tile_step(state, [s], [v])
    out, lse = softmax.finish(*state, column=lambda row: row)
    assert float(out) == 11.0
    np.testing.assert_allclose(lse, 1e4, rtol=1e-6)


def test_a_row_without_keys():
    state = tile_step(NEUTRAL, [-np.inf, -np.inf], [1.0, 2.0])
    out, lse = softmax.finish(*state, column=lambda row: row)
    assert float(out) == 0.0
    assert float(lse) == -np.inf
    assert float(softmax.probs_from_lse(jnp.float32(3.0), softmax.lse_pivot(lse), lambda row: row)) == 0.0


states = st.builds(
    lambda m, l, acc: softmax.State(jnp.float32(m), jnp.float32(l), jnp.float32(acc)),
    st.floats(-50, 50, width=32, allow_subnormal=False),
    st.floats(0.5, 8, width=32),
    st.floats(-8, 8, width=32, allow_subnormal=False),
)


@given(states, states, states)
def test_merge_is_associative_and_commutative(a, b, c):
    finish = lambda s: np.asarray(softmax.finish(*s, column=lambda row: row))
    column = lambda row: row
    left = finish(softmax.merge(softmax.merge(a, b, column), c, column))
    np.testing.assert_allclose(left, finish(softmax.merge(a, softmax.merge(b, c, column), column)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(left, finish(softmax.merge(softmax.merge(c, b, column), a, column)), rtol=1e-5, atol=1e-5)


@given(states)
def test_no_keys_are_neutral(a):
    for merged in (softmax.merge(a, NEUTRAL, lambda row: row), softmax.merge(NEUTRAL, a, lambda row: row)):
        np.testing.assert_allclose(merged, a, rtol=1e-6)


def _attention(q, k, v, **options):
    return flash_attention(q, k, v, return_residual=True, **options)


def test_parts_of_the_keys_merge_by_their_lse():
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 9, 2, 8)) for n in range(3))
    whole, whole_lse = _attention(q, k, v)
    a, lse_a = _attention(q, k[:, :4], v[:, :4])
    b, lse_b = _attention(q, k[:, 4:], v[:, 4:])
    lse = jnp.logaddexp(lse_a, lse_b)
    merged = a * jnp.exp(lse_a - lse)[..., None] + b * jnp.exp(lse_b - lse)[..., None]
    np.testing.assert_allclose(lse, whole_lse, atol=1e-6)
    np.testing.assert_allclose(merged, whole, atol=1e-6)
