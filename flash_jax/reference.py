"""The definition, dense and unfused: documentation that runs, and the oracle of the tests.

    s   = scale * q . k                  query head n reads key head n // group
    s   = cap * tanh(s / cap)            with a soft cap
    s   = s + bias
    s   = -inf where not visible         row bounds and predicates of `mask`
    lse = log(sum_j exp(s_j))            natural logarithm; -inf for a row without a visible key
    p   = exp(s - lse)                   0 there
    p   = keep * p / (1 - rate)          with dropout
    out = p . v

Products have the dtype of the inputs and accumulate in `Problem.compute_dtype`; everything between is in that dtype.
O(q_len * kv_len) memory.
"""

import jax
import jax.numpy as jnp

from flash_jax import dropout, visibility
from flash_jax.problem import Operands, Problem

Array = jax.Array


def visible_scores(problem: Problem, operands: Operands) -> Array:
    """Booleans that broadcast to `[batch, num_heads, q_len, kv_len]`: every rule of the mask, and a bias of -inf."""
    seen = visibility.on_all_scores(problem.mask, operands.mask, problem.num_heads, (problem.q_len, problem.kv_len))
    if operands.bias is not None:
        seen &= operands.bias != -jnp.inf
    return jnp.broadcast_to(seen, (problem.batch, problem.num_heads, problem.q_len, problem.kv_len))


def attention(problem: Problem, operands: Operands) -> tuple[Array, Array]:
    """`(out, lse)` as the module docstring says; out `[batch, q_len, num_heads, v_head_dim]`, lse `[batch, q_len, num_heads]`."""
    acc, group = problem.compute_dtype, problem.group
    seen = visible_scores(problem, operands)
    by_kv_head = seen.reshape(problem.batch, problem.num_kv_heads, group * problem.q_len, problem.kv_len).any(2)
    used = by_kv_head.swapaxes(1, 2)[..., None]  # NaN in a key that no query sees must not reach 0 * NaN
    key, value = (jnp.repeat(jnp.where(used, x, jnp.zeros_like(x)), group, axis=2) for x in (operands.key, operands.value))
    einsum = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=acc, precision=jax.lax.Precision.HIGHEST)

    scale = problem.scale if operands.scale is None else operands.scale[:, None, None, None]
    assert scale is not None
    s = einsum("bqhd,bkhd->bhqk", operands.query, key) * scale
    if problem.logits_soft_cap is not None:
        s = problem.logits_soft_cap * jnp.tanh(s / problem.logits_soft_cap)
    if operands.bias is not None:
        s = s + operands.bias.astype(acc)
    s = jnp.where(seen, s, 0)  # a finite stand-in: derivatives of the masked branch must not be NaN
    s_max = jax.lax.stop_gradient(jnp.max(s, -1, initial=jnp.finfo(acc).min, where=seen, keepdims=True))
    exp = jnp.where(seen, jnp.exp(s - jnp.where(seen.any(-1, keepdims=True), s_max, 0)), 0)
    total = exp.sum(-1, keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, s_max + jnp.log(safe))[..., 0]
    p = exp / safe
    if operands.dropout_row_keys is not None:
        kept = dropout.keep(operands.dropout_row_keys[..., None], jnp.arange(problem.kv_len, dtype=jnp.int32), problem.dropout_rate)
        p = jnp.where(kept, p / (1 - problem.dropout_rate), 0)
    out = einsum("bhqk,bkhd->bqhd", p.astype(value.dtype), value)
    return out.astype(operands.query.dtype), lse.swapaxes(1, 2)
