"""A Flax linen transformer learns to repeat what it has read, with the attention of `flash_jax.nn.linen`.

Its first layer is Flax's own `MultiHeadDotProductAttention` with our `attention_fn`, its second our `GroupedQueryAttention`: two
query heads a key head, rotary positions, learned sinks. A sequence is random symbols, then the same ones again.

python examples/linen_transformer.py
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from flash_jax.nn.linen import GroupedQueryAttention, attention_fn

VOCABULARY, HALF, BATCH, FEATURES = 32, 8, 64, 64
LENGTH = 2 * HALF


class Transformer(nn.Module):
    """int32 `[batch, len]`, standing at positions from `start` on -> logits `[batch, len, VOCABULARY]`."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens, start=0):
        positions = self.param("positions", nn.initializers.normal(0.5), (LENGTH, FEATURES))
        x = nn.Embed(VOCABULARY, FEATURES)(tokens) + jax.lax.dynamic_slice_in_dim(positions, start, tokens.shape[1])
        # Flax's module says nothing of causality, save through the mask of its cache; ours is told once.
        causal = functools.partial(attention_fn, is_causal=not self.decode)
        x += nn.MultiHeadDotProductAttention(4, attention_fn=causal, decode=self.decode)(nn.LayerNorm()(x))
        options: dict[str, Any] = {"num_kv_heads": 2, "is_causal": True, "rope_theta": 10000.0, "use_sinks": True, "decode": self.decode}
        x += GroupedQueryAttention(4, **options)(nn.LayerNorm()(x))
        x += nn.Dense(FEATURES)(nn.gelu(nn.Dense(4 * FEATURES)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def sequences(key):
    symbols = jax.random.randint(key, (BATCH, HALF), 0, VOCABULARY)
    return jnp.concatenate([symbols, symbols], axis=1)


def loss_of(params, tokens):
    """Of the second half, the only one that can be known."""
    logits: Any = Transformer().apply({"params": params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, HALF - 1 : -1], tokens[:, HALF:]).mean()


def main(steps: int) -> None:
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 5e-3, 10, steps))
    tokens = sequences(jax.random.key(0))
    params = Transformer().init(jax.random.key(1), tokens)["params"]

    @jax.jit
    def step(params, state, key):
        loss, gradients = jax.value_and_grad(loss_of)(params, sequences(key))
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    bar = tqdm(range(steps), unit="step", dynamic_ncols=True)
    for n in bar:
        params, state, loss = step(params, state, jax.random.key(100 + n))
        losses.append(float(loss))
        bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a symbol (guessing: {jnp.log(VOCABULARY):.3f})")

    decoder = Transformer(decode=True)
    cache = decoder.init(jax.random.key(0), tokens)["cache"]

    @jax.jit
    def advance(cache, symbol, start):
        logits, variables = decoder.apply({"params": params, "cache": cache}, symbol, start, mutable=["cache"])
        return variables["cache"], logits

    symbol, guesses = tokens[:, :1], []
    for n in range(LENGTH - 1):  # the first half is read, the second written, one symbol at a time from the caches
        cache, logits = advance(cache, symbol, n)
        if n + 1 < HALF:
            symbol = tokens[:, n + 1 : n + 2]
        else:
            symbol = jnp.argmax(logits, axis=-1)
            guesses.append(symbol)
    written = jnp.concatenate(guesses, axis=1)
    print(f"read    {tokens[0, :HALF].tolist()}\nwritten {written[0].tolist()}")
    print(f"{float((written == tokens[:, HALF:]).mean()):.1%} of {written.size} symbols right (guessing: {1 / VOCABULARY:.1%})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps")
    main(80 if parser.parse_args().short else 200)
