"""Processes that compile at the same time and are timed one after the other.

Tracing holds Python's lock, so that threads of one process trace no faster than one of them; and what runs beside a compiler is measured
with it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator


def ready() -> None:
    """Say that all is compiled; go on when standard input ends."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


def in_turn(commands: Iterable[list[str]], when_ready: Callable[[], object]) -> Iterator[str]:
    """The lines that each of `commands` prints after its `ready`: all start at once, each is let go when the one before has ended.

    Calls `when_ready` once, when all are ready.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # those that wait leave the memory to the one that runs
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    pipes = [(process.stdin, process.stdout) for process in processes if process.stdin is not None and process.stdout is not None]
    for _, lines in pipes:
        while lines.readline() not in ("ready\n", ""):  # "" where the process has ended
            pass
    when_ready()
    for go, lines in pipes:
        go.close()
        with lines:
            yield from lines
    for process in processes:
        process.wait()
