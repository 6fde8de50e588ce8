"""Shapes broadcast inside the library, whatever `jax.numpy_rank_promotion` demands of the code around a call."""

import functools
from collections.abc import Callable

import jax


def promoting[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """`function`, traced with ranks promoted."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.numpy_rank_promotion("allow"):
            return function(*args, **kwargs)

    return run
