"""How far a run is, and how long the rest will take, on standard error."""

import sys

WIDTH = 24


def show(what: str, done: int, total: int, elapsed: float, left: float) -> None:
    """A bar, in place of the one before where a terminal shows it."""
    filled = WIDTH * done // total
    bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done} of {total} {what}, {_clock(elapsed)}, about {_clock(left)} left"
    _write(bar, stays=done == total)


def say(text: str) -> None:
    """A line that stays, in place of the bar."""
    _write(text, stays=True)


def _write(text: str, stays: bool) -> None:
    terminal = sys.stderr.isatty()
    sys.stderr.write(("\r\033[K" if terminal else "") + text + ("\n" if stays or not terminal else ""))
    sys.stderr.flush()


def _clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
