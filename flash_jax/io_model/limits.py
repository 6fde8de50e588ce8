"""The paper's asymptotic forms: element counts of one head without their constants."""

from flash_jax.problem import Problem


def theta_standard(problem: Problem) -> float:
    """Theorem 2: `N d + N^2`, the HBM accesses of Algorithm 0 up to a constant. With N much larger than d, `N^2`."""
    n, s, d = problem.q_len, problem.kv_len, max(problem.head_dim, problem.v_head_dim)
    return (n + s) * d / 2 + n * s


def theta_flash(problem: Problem, sram: int, density: float = 1.0) -> float:
    """Theorem 2 and Proposition 4: `N^2 d^2 / M` times `density`, plus `N d` where that is below 1; M elements fill `sram` bytes.

    Holds for `d <= M <= N d`, see `theta_holds`; outside, all of K and V fits and the traffic is that of reading everything once, `N d`.
    """
    n, s, d = problem.q_len, problem.kv_len, max(problem.head_dim, problem.v_head_dim)
    linear = (n + s) * d / 2 if density < 1 else 0.0
    return linear + density * n * s * d * d / (sram / problem.dtype.itemsize)


def theta_holds(problem: Problem, sram: int) -> bool:
    """The condition of Theorem 2: `d <= M <= N d`."""
    d, elements = max(problem.head_dim, problem.v_head_dim), sram / problem.dtype.itemsize
    return d <= elements <= problem.kv_len * d
