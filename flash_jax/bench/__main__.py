"""Benchmarks of attention on this machine, each result checked before it is timed."""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from flash_jax.bench import report
from flash_jax.bench.measure import measure, refusals
from flash_jax.bench.rows import PRESETS, Row
from flash_jax.bench.sides import SIDES, default_sides
from flash_jax.bench.timing import provenance


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="python -m flash_jax.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="what changed between two results files")
    compare.add_argument("old", type=pathlib.Path)
    compare.add_argument("new", type=pathlib.Path)
    mine = commands.add_parser("mine", help="a problem of your own")
    mine.add_argument("--shape", required=True, type=shape, help="batch,q_len,kv_len,num_heads,num_kv_heads,head_dim")
    mine.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    mine.add_argument("--is-causal", action="store_true")
    mine.add_argument("--window", nargs=2, type=int, metavar=("LEFT", "RIGHT"))
    mine.add_argument("--segments", type=int, default=0, help="sequences packed into one")
    mine.add_argument("--density", type=float, help="block-sparse, that fraction of blocks of 128 x 128")
    presets = [commands.add_parser(name, help=f"{(make.__doc__ or 'a preset').splitlines()[0]}") for name, make in PRESETS.items()]
    for command in (mine, *presets):
        command.add_argument(
            "--sides", nargs="+", choices=tuple(SIDES), help="implementations; ours and every peer that is here by default"
        )
        command.add_argument("--only", default="", help="rows whose name contains this")
        command.add_argument("--seconds", type=float, default=6, help="about how long to time each row")
        command.add_argument("--out", type=pathlib.Path, help="results file to write (JSON), with .md and .png of the same name beside it")
    return result


def shape(word: str) -> tuple[int, ...]:
    """Six sizes."""
    sizes = tuple(int(n) for n in word.split(","))
    if len(sizes) != 6 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be batch,q_len,kv_len,num_heads,num_kv_heads,head_dim, six positive integers, got {word!r}")
    return sizes


def _mine(o) -> list[Row]:
    batch, q_len, kv_len, num_heads, num_kv_heads, head_dim = o.shape
    window = tuple(o.window) if o.window else None
    return [Row(batch, q_len, num_heads, head_dim, num_kv_heads, kv_len, o.dtype, o.is_causal, window, o.segments, o.density)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if one of our own results was refused."""
    options = parser()
    o = options.parse_args(arguments)
    if o.command == "compare":
        try:
            sys.stdout.write(report.compare(*(json.loads(path.read_text()) for path in (o.old, o.new))))
        except (OSError, ValueError) as error:
            options.error(str(error))
        return 0
    rows = [row for row in (_mine(o) if o.command == "mine" else PRESETS[o.command]()) if o.only in row.name]
    results = {"preset": o.command, "provenance": provenance(), "rows": []}
    for n, row in enumerate(rows):
        sys.stderr.write(f"[{n + 1}/{len(rows)}] {row.name}\n")
        results["rows"].append(measure(row, o.sides or default_sides(), o.seconds))
        if o.out:
            o.out.write_text(json.dumps(results, indent=1) + "\n")
    text = report.markdown(results)
    sys.stdout.write(text)
    if o.out:
        o.out.with_suffix(".md").write_text(text)
        report.plot(results, o.out.with_suffix(".png"))
    refused = refusals(results)
    sys.stderr.write("".join(f"refused: {sentence}\n" for sentence in refused))
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
