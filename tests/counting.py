"""Counts the tiles that `xla` executes, while a test looks."""

import contextlib
import dataclasses

import jax

from flash_jax import softmax


@dataclasses.dataclass
class Tiles:
    rows: int = 0
    forward: int = 0
    backward: int = 0


@contextlib.contextmanager
def counted_tiles(monkeypatch):
    """Each forward tile calls `softmax.rescale` once, each q tile `softmax.finish`, each backward tile `softmax.dlogits`: they report."""
    tiles = Tiles()

    def reporting(verb, field):
        def report():
            setattr(tiles, field, getattr(tiles, field) + 1)

        def run(*args, **options):
            jax.debug.callback(report)
            return verb(*args, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(softmax, "finish", reporting(softmax.finish, "rows"))
        patch.setattr(softmax, "rescale", reporting(softmax.rescale, "forward"))
        patch.setattr(softmax, "dlogits", reporting(softmax.dlogits, "backward"))
        jax.clear_caches()
        yield tiles
    jax.clear_caches()
