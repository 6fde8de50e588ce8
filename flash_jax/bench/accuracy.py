"""Which results have a speed at all: out, dq, dk and dv of one batch entry and one group of heads, against the dense definition.

A result is refused if its relative error in the root mean square exceeds twice that of the unfused computation in the same dtype plus
eps / 16. A mean is used, not a maximum: in bfloat16 the largest error of a correct result is far above 1 % of the values, its mean is not.
A factor common to all values hides in neither: `slope`, the factor that fits the result to the reference, must be 1 within 0.002.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import api, reference
from flash_jax.bench.rows import Row

NAMES = ("out", "dq", "dk", "dv")
SLOPE = 0.002


class Reference:
    """The results expected of a row, and the error of the unfused computation in its dtype."""

    def __init__(self, row: Row, arrays: tuple[jax.Array, ...]):
        group = row.num_heads // (row.num_kv_heads or row.num_heads)
        self.heads = (group, 1, 1, group)
        part = self.part(arrays, self.heads)
        options = row.options(1)

        def run(*arrays):
            *qkv, dout = arrays

            def attention(query, key, value):
                request = api._prepare(query=query, key=key, value=value, **options)
                return reference.attention(request.problem, request.operands)[0]

            out, pullback = jax.vjp(attention, *qkv)
            return out, *pullback(dout)

        with jax.enable_x64(jax.default_backend() != "tpu"), jax.default_matmul_precision("highest"):
            wide = jnp.float32 if jax.default_backend() == "tpu" else jnp.float64
            self.expected = [np.asarray(x) for x in jax.jit(run)(*(x.astype(wide) for x in part))]
        unfused = [np.asarray(x, np.float64) for x in jax.jit(run)(*part)]
        eps = float(jnp.finfo(row.dtype).eps)
        self.allowed = [2 * _error(a, b) + eps / 16 for a, b in zip(unfused, self.expected, strict=True)]

    @staticmethod
    def part(arrays, heads) -> list[jax.Array]:
        """The first batch entry and the first `heads` heads of each array."""
        return [x[:1, :, :n] for x, n in zip(arrays, heads, strict=True)]

    def check(self, results: tuple[jax.Array, ...]) -> tuple[dict[str, float], str | None]:
        """The relative errors of `(out, dq, dk, dv)`, and a sentence if they are refused."""
        group = self.heads[0]
        got = [np.asarray(x, np.float64) for x in self.part(results, (group, group, 1, 1))]
        errors, reason = {}, None
        for name, x, expected, allowed in zip(NAMES, got, self.expected, self.allowed, strict=True):
            errors[name] = _error(x, expected)
            slope = float((x * expected).sum() / (expected * expected).sum())
            if not errors[name] <= allowed:
                reason = reason or f"{name}: relative error {errors[name]:.3g}, allowed {allowed:.3g}"
            if not abs(slope - 1) <= SLOPE:
                reason = reason or f"{name}: {slope:.4f} times the expected values"
        return errors, reason


def _error(x: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((x - expected) ** 2).sum() / (expected**2).sum()))
