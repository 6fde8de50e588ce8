"""Linear memory, read off what XLA plans to allocate, no hidden q_len * kv_len buffer, and no product too many."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from flash_jax import Mask, flash_attention, segment_ids

HEADS, HEAD_DIM = 8, 64


def temporaries(length, options=lambda length: {"is_causal": True}, batch=1):
    """Bytes of temporaries of forward and backward, 8 heads of 64, float32."""
    shape = jax.ShapeDtypeStruct((batch, length, HEADS, HEAD_DIM), jnp.float32)

    def run(q, k, v, dout):
        out, pullback = jax.vjp(lambda *a: flash_attention(*a, **options(length)), q, k, v)
        return out, pullback(dout)

    return jax.jit(run).lower(shape, shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def test_causal_temporaries_are_linear_and_few():
    lengths = [4096, 8192, 16384, 32768]
    sizes = [temporaries(n) for n in lengths]
    growth = [b / a for a, b in itertools.pairwise(sizes)]
    assert max(growth) <= 2.1, f"temporaries {sizes} at {lengths}"
    inputs = 3 * 16384 * HEADS * HEAD_DIM * 4
    assert sizes[2] <= 6 * inputs, f"{sizes[2] / inputs:.2f} times the bytes of q, k and v"


def test_a_batch_takes_no_more_than_one_of_its_sequences():
    """What is rearranged is one sequence's; of a batch there are the operands, the results and lse."""
    lengths = lambda length: {"is_causal": True, "query_seq_lengths": (n := jnp.full(8, length - 1)), "key_value_seq_lengths": n}
    one, eight = temporaries(1024), temporaries(1024, lengths, batch=8)
    assert eight <= 2 * one, f"{eight} bytes for eight, {one} for one"


OPTIONS = {
    "packed": lambda n: {"q_segment_ids": (ids := segment_ids(jnp.array([0, n // 3, n]), n)[None]), "kv_segment_ids": ids},
    "function": lambda n: {"mask": Mask.from_function(lambda b, h, q, k: (q - k) % 3 == 0)},
    "blocks": lambda n: {"mask": Mask.from_blocks(jnp.eye(n // 256, dtype=bool), 256, 256)},
    "bias_keys_dropout": lambda n: {"bias": jnp.zeros((1, 8, 1, n)), "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    "window_cap_sinks": lambda n: {"local_window_size": (500, 0), "logits_soft_cap": 5.0, "sinks": jnp.zeros(8)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_feature_is_linear(name):
    small, large = (temporaries(n, OPTIONS[name]) for n in (4096, 8192))
    assert large <= 2.1 * small, f"{small} bytes at 4096, {large} at 8192"
    assert large < 8192 * 8192 * 4, "less than one head's dense scores"


def test_gradient_of_a_small_bias_stays_small():
    def run(q, bias):
        return jax.grad(lambda bias: flash_attention(q, q, q, bias, is_causal=True).sum())(bias)

    n = 8192
    shapes = jax.ShapeDtypeStruct((1, n, HEADS, HEAD_DIM), jnp.float32), jax.ShapeDtypeStruct((1, HEADS, 1, n), jnp.float32)
    assert jax.jit(run).lower(*shapes).compile().memory_analysis().temp_size_in_bytes < n * n * 4


def test_tangents_and_second_order_are_linear_too():
    """Second derivatives are JAX's own, through loops whose tiles are recomputed: nothing is stacked over the tiles."""

    def compiled(n):
        x = jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32)
        loss = lambda q: (flash_attention(q, q, q, is_causal=True) ** 2).sum()
        product = lambda q, t: jax.jvp(jax.grad(loss), (q,), (t,))[1]
        return jax.jit(product).lower(x, x).compile().memory_analysis().temp_size_in_bytes

    small, large = compiled(2048), compiled(4096)
    assert large <= 2.1 * small, f"{small} bytes at 2048, {large} at 4096"


@pytest.mark.parametrize("is_causal", [False, True])
def test_in_one_program_a_single_tile_needs_no_more_products_than_the_unfused_computation(is_causal):
    """Two of the forward and four of the backward: what the backward would compute once more is the forward's own."""
    x = jax.ShapeDtypeStruct((1, 256, 1, 16), jnp.float32)

    def run(q, k, v, dout):
        out, pullback = jax.vjp(lambda *a: flash_attention(*a, is_causal=is_causal, implementation="xla"), q, k, v)
        return out, pullback(dout)

    compiled = jax.jit(run).lower(x, x, x, x).compile().as_text()
    assert compiled.count(" dot(") == 6
    assert compiled.count(" exponential(") <= 2, "one of the scores, one of a row's maximum"
