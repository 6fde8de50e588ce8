"""By which implementations: functions of (query, key, value), by name, for a row."""

import functools
import importlib.util
from collections.abc import Callable

import jax

from flash_jax.api import flash_attention
from flash_jax.bench.rows import Row
from flash_jax.dispatch import NAMES

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _ours(row: Row, implementation: str | None = None) -> Attention:
    return functools.partial(flash_attention, implementation=implementation, **row.options(row.batch))


def _jax_nn(row: Row, implementation: str = "xla") -> Attention:
    return functools.partial(jax.nn.dot_product_attention, implementation=implementation, **row.peer_options())


def _tokamax(row: Row) -> Attention:
    import tokamax  # pyright: ignore[reportMissingImports]

    return functools.partial(tokamax.dot_product_attention, **row.peer_options())


SIDES: dict[str, Callable[[Row], Attention]] = {
    "flash_jax": _ours,  # what implementation=None chooses
    **{f"flash_jax:{name}": functools.partial(_ours, implementation=name) for name in NAMES},
    "jax.nn": _jax_nn,
    "jax.nn:cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "tokamax": _tokamax,
}


def default_sides() -> list[str]:
    """Ours and every peer that this machine may run."""
    peers = ["jax.nn"] + ["jax.nn:cudnn"] * (jax.default_backend() == "gpu")
    return ["flash_jax", *peers] + ["tokamax"] * (importlib.util.find_spec("tokamax") is not None)
