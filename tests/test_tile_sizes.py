"""Any tiles give the same result: values and every gradient, for lengths that no tile divides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import reference_attention, value_and_gradients
from tolerance import close

from flash_jax import Mask, flash_attention

Q_LEN, KV_LEN = 13, 17
RANDOM = np.random.default_rng(0)
IDS = [jnp.asarray(RANDOM.integers(0, 3, (2, n))) for n in (Q_LEN, KV_LEN)]
BLOCKS = jnp.asarray(RANDOM.random((2, 4, 3, 5)) < 0.6)
OPTIONS = {
    "plain": {},
    "window with dropout": {"is_causal": True, "q_offset": 4, "local_window_size": (5, None), "dropout_rate": 0.3},
    "segments with lengths": {"q_segment_ids": IDS[0], "kv_segment_ids": IDS[1], "key_value_seq_lengths": jnp.array([17, 6])},
    "bias with a cap": {"bias": jnp.asarray(RANDOM.standard_normal((1, 4, 1, KV_LEN)), jnp.float32), "logits_soft_cap": 2.0},
    "function and blocks": {"mask": Mask.from_function(lambda b, h, i, j: (i + 2 * j + h + b) % 5 > 0) & Mask.from_blocks(BLOCKS, 5, 4)},
}
SHAPES = {"query": (2, Q_LEN, 4, 8), "key": (2, KV_LEN, 2, 8), "value": (2, KV_LEN, 2, 4)}
ARRAYS = {name: jnp.asarray(RANDOM.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}
DOUT, DLSE = (jnp.asarray(RANDOM.standard_normal(shape), jnp.float32) for shape in ((2, Q_LEN, 4, 4), (2, Q_LEN, 4)))


def results(attention, name):
    return value_and_gradients(attention, ARRAYS | OPTIONS[name] | {"dropout_key": jax.random.key(3)}, DOUT, DLSE)


@functools.cache
def expected(name):
    return results(reference_attention, name)


@settings(max_examples=5)
@given(st.sampled_from(list(OPTIONS)), st.integers(1, Q_LEN + 3), st.integers(1, KV_LEN + 3))
def test_any_tiles_give_the_same(name, block_q, block_kv):
    attention = functools.partial(flash_attention, return_residual=True, implementation="xla", block_sizes=(block_q, block_kv))
    close(results(attention, name), expected(name))
