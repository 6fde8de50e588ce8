"""Tables of configurations: one JSON file for each kind of card, an entry for each kernel, JAX version and head dims.

An entry: `{"kernel", "jax", "head_dim", "v_head_dim", "config", "results"}`. `jax` is major.minor, because the compiler that comes with
it decides what spills; `config` holds the fields of the kernel's own `Config`; `results` says where it was measured and checked.
The backward has one configuration for each head dim, which the kernels are written for: its entries record where that one was checked.
"""

import functools
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax

_PACKAGED = pathlib.Path(__file__).parent / "tables"


class Key(NamedTuple):
    """What an entry is for. kernel: such as "hopper forward"; head dims as the kernel has them, padded."""

    kernel: str
    head_dim: int
    v_head_dim: int
    jax: str = ".".join(jax.__version__.split(".")[:2])


def user_folder() -> pathlib.Path:
    """Where a search keeps its tables: `FLASH_JAX_TUNING`, or `flash_jax/tuning` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("FLASH_JAX_TUNING") or pathlib.Path(cache) / "flash_jax" / "tuning")


def lookup(device_kind: str, key: Key) -> tuple[dict[str, Any], str] | None:
    """A card's configuration, as fields, and where its results are; the user's own before the package's."""
    for folder in (user_folder(), _PACKAGED):
        found = _entries(_path(folder, device_kind)).get(key)
        if found is not None:
            return found["config"], found["results"]
    return None


def store(device_kind: str, key: Key, config: dict[str, Any], results: str) -> pathlib.Path:
    """Put an entry in the user's table in place of an older one with the same key, and return the file."""
    path = _path(user_folder(), device_kind)
    entries = dict(_entries(path)) | {key: key._asdict() | {"config": config, "results": results}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"device": device_kind, "entries": list(entries.values())}, indent=1) + "\n")
    _entries.cache_clear()
    return path


def _path(folder: pathlib.Path, device_kind: str) -> pathlib.Path:
    return folder / f"{device_kind.replace(' ', '_').replace('/', '_')}.json"


@functools.cache
def _entries(path: pathlib.Path) -> dict[Key, dict[str, Any]]:
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text())["entries"]
        return {Key(**{field: entry[field] for field in Key._fields}): entry for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of flash_jax.tuning ({error}); repair it or delete it.") from error
