"""Mask functions: evaluated on tiles inside the kernels, and by XLA on all scores at once for the kinds of tiles.

What a function reads of captured arrays by row or by key alone has become an operand before (`hoist`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flash_jax import schedule, visibility
from flash_jax.backends.functions import hoist, why_not
from flash_jax.problem import Operands, Problem
from flash_jax.visibility import MaskFunction

__all__ = ["as_words", "evaluate", "hoist", "kinds", "why_not"]

Array = jax.Array


def as_words(function: MaskFunction, arrays: tuple[Array, ...], sizes: dict[str, int]) -> tuple[Array, ...]:
    """A function's operands as a kernel reads them: four bytes an element, padded to `sizes` by kind."""

    def word(kind, x):
        x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
        return jnp.pad(x, [(0, 0), (0, sizes[kind] - x.shape[1])]) if kind in sizes else x

    return tuple(map(word, function.kinds, arrays))


def evaluate(function: MaskFunction, shape: tuple[int, ...], *arguments) -> Array:
    """The function on a tile in a kernel, booleans `shape`; arguments are scalars or of that shape: batch, head, q_id, kv_id, operands."""
    full = lambda x: x if jnp.shape(x) == shape else lax.broadcast_in_dim(jnp.asarray(x), shape, [])

    def bind(equation, inputs):
        inputs = list(map(full, inputs))
        name = equation.primitive.name
        return [_round(name, *inputs)] if name in ("floor", "ceil") else visibility.bind(equation, inputs)

    dtypes = [v.aval.dtype for v in function.jaxpr.invars]
    typed = [full(x) != 0 if dtype == jnp.bool_ else full(x) for x, dtype in zip(arguments, dtypes, strict=True)]
    (visible,) = visibility.evaluate(function.jaxpr, typed, bind)
    return full(visible)


def _round(towards: str, x: Array) -> Array:
    """`floor` and `ceil`, which the kernels' compiler does not know."""
    near = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return near - (near > x).astype(x.dtype) if towards == "floor" else near + (near < x).astype(x.dtype)


def _everywhere(problem: Problem, operands: Operands, n: int, q_pad: int, kv_pad: int) -> Array:
    """Function n on all scores, booleans `[1 | batch, 1 | num_heads, q_pad, kv_pad]`: to be reduced at once, not to be kept."""
    function, arrays = problem.mask.functions[n], operands.mask.functions[n]
    q_ids, kv_ids = (jnp.arange(n, dtype=jnp.int32) for n in (q_pad, kv_pad))
    padded = as_words(function, arrays, {"query": q_pad, "key": kv_pad})
    padded = tuple(x.astype(given.dtype) for x, given in zip(padded, arrays, strict=True))
    seen = visibility.by_function_on_all_heads(function, operands.mask.batch_ids, problem.num_heads, q_ids, kv_ids, padded)
    return seen & (q_ids < problem.q_len)[:, None] & (kv_ids < problem.kv_len)


def kinds(problem: Problem, operands: Operands, n: int, block_q: int, block_kv: int) -> Array:
    """int8 kinds of function n, `[1 | batch, 1 | num_heads, num_q_tiles, num_kv_tiles]`: O(tiles) memory, O(scores) work."""
    tiles = [schedule.num_tiles(length, block) for length, block in ((problem.q_len, block_q), (problem.kv_len, block_kv))]
    seen = _everywhere(problem, operands, n, tiles[0] * block_q, tiles[1] * block_kv)
    count = seen.reshape(*seen.shape[:2], tiles[0], block_q, tiles[1], block_kv).sum((3, 5), dtype=jnp.int32)
    inside = lambda length, block, number: np.minimum(block, length - np.arange(number) * block)
    scores = inside(problem.q_len, block_q, tiles[0])[:, None] * inside(problem.kv_len, block_kv, tiles[1])
    return schedule.classify(count > 0, count == scores)
