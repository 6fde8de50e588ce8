"""Dropout bits, defined once: a function of (key, batch, head, query position, key position) alone.

Only 32-bit wrapping multiply, add, xor and shift occur, so every implementation, tile size and device computes the same
bits, in the forward and in the backward. A row key is made outside the kernels, one uint32 for each (batch, head, query);
a kernel mixes it with the key position. The mixer is a bijection of the key position for each row key.
"""

import jax
import jax.numpy as jnp

from flash_jax.problem import as_array, static_float

Array = jax.Array

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, odd: spreads consecutive positions
_MULTIPLY_1 = 0x7FEB352D  # multipliers of a low-bias 32-bit mixer found by exhaustive search (Wellons, hash-prospector)
_MULTIPLY_2 = 0x846CA68B


def _u32(x) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _mix(row_key: Array, position: Array) -> Array:
    """The per-score mixer; `row_key` enters twice, so that two rows are not shifted copies of one stream."""
    x = row_key ^ (position * jnp.uint32(_GOLDEN))
    x = x ^ (x >> 16)
    x = x * jnp.uint32(_MULTIPLY_1)
    x = x ^ (x >> 15)
    x = x + row_key
    x = x * jnp.uint32(_MULTIPLY_2)
    return x ^ (x >> 16)


def threshold(rate: float) -> int:
    """A score is kept iff its bits are at least this: `rate * 2^32`, below 2^32."""
    return min(int(rate * 2**32), 2**32 - 1)


def keep(row_keys: Array, kv_ids: Array, rate: float) -> Array:
    """Which scores stay: booleans of the broadcast shape of `row_keys` (uint32) and `kv_ids` (int32 positions)."""
    return _mix(row_keys, kv_ids.astype(jnp.uint32)) >= jnp.uint32(threshold(rate))


def row_keys(key: Array, batch: int, num_heads: int, q_ids: Array) -> Array:
    """uint32 `[batch, num_heads, q_len]` from a PRNG key, typed or raw, and positions `q_ids`: `[1 | batch, q_len]`."""
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    state = jnp.uint32(_GOLDEN)
    for n in range(words.shape[-1]):
        state = _mix(state, _u32(words[..., n]))
    batch_ids = jnp.arange(batch, dtype=jnp.uint32)[:, None, None]
    head_ids = jnp.arange(num_heads, dtype=jnp.uint32)[:, None]
    return _mix(_mix(_mix(state, batch_ids), head_ids), _u32(q_ids)[:, None, :])


def check_rate(name: str, rate) -> float:
    """A probability of dropping."""
    rate = static_float(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be in [0, 1), got {rate}.")
    return rate


def check_key(name: str, key) -> Array:
    """One PRNG key, typed or raw."""
    key = as_array(name, key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != 0 if typed else (key.dtype != jnp.uint32 or key.ndim != 1 or key.size == 0):
        raise ValueError(f"{name} must be one PRNG key, as jax.random.key makes it, got {key.dtype}{list(key.shape)}.")
    return key
