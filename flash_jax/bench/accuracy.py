"""Which results have a speed at all: out and the gradients of one group of heads, against the dense definition.

A result is refused if its relative error in the root mean square exceeds twice that of the unfused computation in the same dtype plus
eps / 16. A mean is used, not a maximum: in bfloat16 the largest error of a correct result is far above 1 % of the values, its mean is not.
A factor common to all values hides in neither: `slope`, the factor that fits the result to the reference, must be 1 within 0.002.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flash_jax import api, reference
from flash_jax.bench.rows import DIFFERENTIATED, Arrays, Row

NAMES = {"out": "out", "query": "dq", "key": "dk", "value": "dv", "bias": "dbias"}
SLOPE = 0.002


class Reference:
    """The results expected of a row, and the error of the unfused computation in its dtype. Compiles at once, without arrays."""

    def __init__(self, row: Row):
        self.row = row
        self.wide = jnp.float64 if row.dtype == "float32" and jax.default_backend() != "tpu" else jnp.float32
        arrays = jax.eval_shape(row.draw)
        with jax.enable_x64(self.wide == jnp.float64), jax.default_matmul_precision("highest"):
            lowered = [
                jax.jit(lambda x, dtype=dtype: self._dense(_cast(row.part(x), dtype))).lower(arrays) for dtype in (self.wide, row.dtype)
            ]
        quick = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None  # runs once: not worth a search
        self._run = [x.compile(compiler_options=quick) for x in lowered]
        self.expected: dict[str, np.ndarray] = {}
        self.allowed: dict[str, float] = {}

    def _dense(self, arrays: Arrays) -> Arrays:
        given = {name: x for name, x in arrays.items() if name != "dout"}

        def attention(wanted):
            request = api.prepare(**self.row.words({**given, **wanted}))
            return reference.attention(request.problem, request.operands)[0]

        out, pullback = jax.vjp(attention, {name: x for name, x in given.items() if name in DIFFERENTIATED})
        return {"out": out} | (pullback(arrays["dout"])[0] if "backward" in self.row.phases else {})

    def expect(self, arrays: Arrays) -> None:
        """Compute what is right for `arrays`."""
        with jax.enable_x64(self.wide == jnp.float64):
            wide, narrow = (run(arrays) for run in self._run)
            self.expected = {name: np.asarray(x, np.float64) for name, x in wide.items()}
        eps = float(jnp.finfo(self.row.dtype).eps)
        self.allowed = {name: 2 * _error(np.asarray(x, np.float64), self.expected[name]) + eps / 16 for name, x in narrow.items()}

    def check(self, results: Arrays) -> tuple[dict[str, float], str | None]:
        """The relative errors of `{"out": out, "query": dq, ...}`, and a sentence if they are refused."""
        errors, reason = {}, None
        for key, x in self.row.part(results).items():
            name, x, expected, allowed = NAMES[key], np.asarray(x, np.float64), self.expected[key], self.allowed[key]
            errors[name] = _error(x, expected)
            slope = float((x * expected).sum() / (expected * expected).sum())
            if not errors[name] <= allowed:
                reason = reason or f"{name}: relative error {errors[name]:.3g}, allowed {allowed:.3g}"
            if not abs(slope - 1) <= SLOPE:
                reason = reason or f"{name}: {slope:.4f} times the expected values"
        return errors, reason


def _cast(arrays: Arrays, dtype) -> Arrays:
    """Floating arrays in `dtype`."""
    return {name: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for name, x in arrays.items()}


def _error(x: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((x - expected) ** 2).sum() / (expected**2).sum()))
