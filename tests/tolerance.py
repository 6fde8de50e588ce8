"""The one tolerance for what is compared with the definition, and one for two results of ours that should be the same."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_as_exact_as_unfused(name: str, got, unfused, expected, dtype) -> None:
    """The error of `got` is at most twice that of the unfused computation in the same dtype, plus 8 roundings of the largest value.

    Errors are in the max norm against `expected`, computed in float64. Where `expected` is infinite, `got` must be the same infinity.
    """
    got, unfused, expected = (np.asarray(x, np.float64) for x in (got, unfused, expected))
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=name)
    got, unfused, expected = got[finite], unfused[finite], expected[finite]
    if not expected.size:
        return
    error = lambda x: np.abs(x - expected).max()
    allowed = 2 * error(unfused) + 8 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
    assert error(got) <= allowed, f"{name}: error {error(got):.3g}, allowed {allowed:.3g}"


def close(a, b, tolerance=2e-5) -> None:
    """Trees of float32 results of two ways to say the same, which may differ in the order of sums: by `tolerance` of the largest value.

    An lse of -inf is no largest value, which would allow everything: infinities must be the same.
    """

    def check(x, y):
        largest = np.abs(y, where=np.isfinite(y), out=np.zeros(np.shape(y))).max(initial=1.0)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)

    jax.tree.map(check, a, b)
