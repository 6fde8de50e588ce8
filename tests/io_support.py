"""What the tests of the IO model share: small problems, and an algorithm's traffic by array."""

import collections

from flash_jax import io_model

F16, F32 = 2, 4


def problem(q_len, kv_len=None, **options):
    return io_model.make_problem(q_len, kv_len, **({"head_dim": 4, "dtype": "float16"} | options))


def by_array(cost, kernel=None):
    """`{array: (read, written)}` of one kernel, or of all."""
    totals = collections.defaultdict(lambda: [0, 0])
    for k in cost.kernels:
        if kernel in (None, k.name):
            for t in k.traffic:
                totals[t.array][0] += t.read
                totals[t.array][1] += t.written
    return {name: tuple(moved) for name, moved in totals.items()}


def elements(cost):
    return cost.hbm / F16
