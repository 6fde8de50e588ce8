"""Benchmarks of attention on this machine, each result checked before it is timed."""

import argparse
import contextlib
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flash_jax.bench import compiled, progress, report, turns
from flash_jax.bench.measure import measure, refusals
from flash_jax.bench.presets import PRESETS
from flash_jax.bench.rows import Row, equal_segments
from flash_jax.bench.sides import SIDES, default_sides
from flash_jax.bench.timing import gpu, provenance


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="python -m flash_jax.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="what changed between two results files")
    compare.add_argument("old", type=pathlib.Path)
    compare.add_argument("new", type=pathlib.Path)
    mine = commands.add_parser("mine", help="a problem of your own")
    mine.add_argument("--shape", required=True, type=shape, help="batch,q_len,kv_len,num_heads,num_kv_heads,head_dim")
    mine.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="%(default)s by default")
    mine.add_argument("--is-causal", action="store_true")
    mine.add_argument("--window", nargs=2, type=_number(int, "an integer from 0 up", lambda n: n >= 0), metavar=("LEFT", "RIGHT"))
    mine.add_argument("--segments", type=_number(int, "an integer from 1 up", lambda n: n >= 1), help="that many sequences packed into one")
    mine.add_argument(
        "--density", type=_number(float, "above 0 and at most 1", lambda x: 0 < x <= 1), help="fraction of blocks of 128 x 128"
    )
    mine.add_argument("--bias", action="store_true", help="[1, heads, q_len, kv_len], with its gradient")
    mine.add_argument("--dropout", type=_number(float, "from 0 to below 1", lambda x: 0 <= x < 1), default=0.0)
    mine.set_defaults(processes=1, part=None, wait=False)
    presets = [commands.add_parser(name, help=make.__doc__) for name, make in PRESETS.items()]
    for command in presets:
        command.add_argument("--also", nargs="+", default=[], choices=tuple(PRESETS), help="further presets in the same run")
        command.add_argument("--only", nargs="+", default=[""], help="rows whose name contains one of these words")
        several = _number(int, "an integer from 1 up", lambda n: n >= 1)
        command.add_argument("--processes", type=several, default=1, help="that many compile at once; they are timed in turn")
        command.add_argument("--part", type=int, help=argparse.SUPPRESS)  # which of them this is: rows as JSON on standard output
        command.add_argument("--wait", action="store_true", help="when all is compiled, wait until standard input ends")
    for command in (mine, *presets):
        command.add_argument(
            "--sides", nargs="+", choices=tuple(SIDES), help="implementations; ours and every peer that is here by default"
        )
        seconds = _number(float, "above 0 and finite", lambda x: 0 < x < math.inf)
        command.add_argument("--seconds", type=seconds, default=6, help="about how long to time each row, %(default)s by default")
        command.add_argument(
            "--out",
            type=results_file,
            help="results file to write, .json; .md and .png of the same name go beside it. Without it nothing is kept",
        )
    return result


def _number(kind: Callable[[str], Any], allowed: str, is_allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an option that takes some numbers only."""

    def parse(word: str):
        with contextlib.suppress(ValueError):
            if is_allowed(number := kind(word)):
                return number
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {word!r}")

    return parse


def shape(word: str) -> tuple[int, ...]:
    """Six sizes."""
    sizes = tuple(int(n) if n.strip().isdecimal() else 0 for n in word.split(","))
    if len(sizes) != 6 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be batch,q_len,kv_len,num_heads,num_kv_heads,head_dim, six positive integers, got {word!r}")
    num_heads, num_kv_heads, head_dim = sizes[3:]
    if num_heads % num_kv_heads or head_dim > 512:
        raise argparse.ArgumentTypeError(f"must have num_heads a multiple of num_kv_heads and head_dim at most 512, got {word!r}")
    return sizes


def results_file(word: str) -> pathlib.Path:
    """A path that ends in .json, in a folder that is there."""
    path = pathlib.Path(word)
    if path.suffix != ".json":
        path = path.with_name(f"{path.name}.json")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a folder that exists, got {word!r}")
    return path


def _rows(o) -> list[Row]:
    """Raises ValueError for options that do not fit together."""
    if o.command != "mine":
        rows = {row.name: row for preset in (o.command, *o.also) for row in PRESETS[preset]()}
        chosen = [row for name, row in rows.items() if any(word in name for word in o.only)]
        if not chosen:
            raise ValueError(f"argument --only: must occur in the name of a row, got {' '.join(o.only)}; the rows are {', '.join(rows)}")
        return chosen
    batch, q_len, kv_len, num_heads, num_kv_heads, head_dim = o.shape
    if o.segments and (q_len != kv_len or o.segments > q_len):
        raise ValueError(f"argument --segments: must be at most q_len, and q_len equal kv_len, got {o.segments} for {q_len} and {kv_len}")
    window = tuple(o.window) if o.window else None
    segments = equal_segments(q_len, o.segments) if o.segments else ()
    sizes = (batch, q_len, num_heads, head_dim, num_kv_heads, kv_len)
    return [Row(*sizes, o.dtype, o.is_causal, window, segments, o.density, o.bias, o.dropout)]


def _measured(chosen: list[Row], o) -> Iterator[dict]:
    """The record of each row: all are compiled before any is timed."""
    rows = compiled.start(chosen, {name: SIDES[name] for name in o.sides or default_sides(chosen)})
    began = time.monotonic()
    for n, row in enumerate(rows, 1):
        row.wait()
        elapsed = time.monotonic() - began
        progress.show("rows compiled", n, len(rows), elapsed, elapsed / n * (len(rows) - n) + o.seconds * len(rows))
    if o.wait or o.part is not None:
        turns.ready()
    while rows:
        yield measure(rows.pop(0), o.seconds)  # its executables and arrays go with it


def _in_processes(arguments: list[str], o) -> Iterator[dict]:
    """The same from processes, each with a share of the rows."""
    command = [sys.executable, "-m", "flash_jax.bench", *arguments, "--part"]
    lines = turns.in_turn(([*command, str(n)] for n in range(o.processes)), turns.ready if o.wait else lambda: None)
    return (json.loads(line) for line in lines if line.startswith("{"))


def _collected(records: Iterator[dict], chosen: list[Row], o, began: float) -> dict:
    """The results, in the order of the rows; shown and saved as they come."""
    order = {row.name: n for n, row in enumerate(chosen)}
    results = {"preset": o.command, "provenance": {}, "rows": []}
    first = math.nan
    for n, record in enumerate(records, 1):
        now = time.monotonic()
        first = now if n == 1 else first
        results["provenance"] = results["provenance"] or provenance()
        results["rows"] = sorted([*results["rows"], record], key=lambda record: order[record["row"]])
        progress.say(report.line(record))
        each = (now - first) / (n - 1) if n > 1 else o.seconds
        progress.show("rows timed", n, len(chosen), now - began, each * (len(chosen) - n))
        if o.out:
            report.save(results, o.out)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if one of our own results was refused, a row has none, or a side that was asked for has none in any row."""
    began = time.monotonic()
    options = parser()
    o = options.parse_args(arguments)
    if o.command == "compare":
        try:
            sys.stdout.write(report.compare(*(json.loads(path.read_text()) for path in (o.old, o.new))))
        except (OSError, ValueError) as error:
            options.error(str(error))
        return 0
    try:
        chosen = _rows(o)
    except ValueError as error:
        options.error(str(error))
    if o.part is not None:
        for record in _measured(chosen[o.part :: o.processes], o):
            sys.stdout.write(json.dumps(record) + "\n")
            sys.stdout.flush()
        return 0
    records = _in_processes(list(arguments or sys.argv[1:]), o) if o.processes > 1 else _measured(chosen, o)
    results = _collected(records, chosen, o, began)
    missing = {row.name for row in chosen} - {record["row"] for record in results["rows"]}
    if missing:
        sys.stderr.write(f"{', '.join(sorted(missing))}: the process that had these rows ended without a result; its message is above\n")
    if not results["rows"]:
        return 1
    results["provenance"] |= {"gpu_after": gpu(), "seconds": round(time.monotonic() - began)}
    text = report.markdown(results)
    sys.stdout.write(text)
    if o.out:
        report.save(results, o.out)
        o.out.with_suffix(".md").write_text(text)
        report.plot(results, o.out.with_suffix(".png"))
    refused = refusals(results)
    sys.stderr.write("".join(f"refused: {sentence}\n" for sentence in refused))
    absent = [side for side in o.sides or () if all("refused" in record["sides"].get(side, ["refused"]) for record in results["rows"])]
    sys.stderr.write("".join(f"{side}: refused in every row; the table says why\n" for side in absent))
    return int(bool(refused or missing or absent))


if __name__ == "__main__":
    sys.exit(main())
