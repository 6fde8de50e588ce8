"""The programs in the README and the documentation run as they stand, and what they assert holds."""

import json
import pathlib
import re

import pytest

import flash_jax
from flash_jax.dispatch import NAMES

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
PROGRAMS = {page: re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}


@pytest.mark.parametrize("page", [page for page, programs in PROGRAMS.items() if programs])
def test_programs(page):
    namespace = {"__name__": page}
    for program in PROGRAMS[page]:  # a page is one program in several pieces
        exec(compile(program, page, "exec"), namespace)


def test_every_implementation_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/implementations.md").read_text(), re.MULTILINE)
    assert set(NAMES) <= set(rows)


def test_the_version_is_one():
    """The package is built with the module's."""
    assert f"\nversion: {flash_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert flash_jax.__version__ in re.findall("^## .*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]


# A figure and its unit, or two with "to" between them; the decimals that are shown are those that must agree.
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = "TFLOP/s|tokens/s|ms|µs|s|seconds|minutes|times|x|%|kB|MB|GB|KiB|MiB|GiB|TB/s|GB/s|k cycles|cycles"
FIGURE = re.compile(rf"(?<![\w.])({NUMBER})(?: to ({NUMBER}))?[\s-]({UNIT})(?![\w/])")
BYTES = {"kB": 1e-3, "MB": 1e-6, "GB": 1e-9, "KiB": 2.0**-10, "MiB": 2.0**-20, "GiB": 2.0**-30}
IN_UNITS = {  # keys of results files, and what their numbers are to be multiplied by
    "TFLOP/s": {"tflops": 1},
    "tokens/s": {"tokens_per_second": 1},
    "ms": {"median": 1e3, "kernels": 1e3},
    "µs": {"median": 1e6, "kernels": 1e6},
    "s": {"trace": 1, "compile": 1, "took": 1},
    "seconds": {"trace": 1, "compile": 1, "took": 1},
    "times": {"ratio": 1},
    "x": {"ratio": 1},
    "cycles": {"kernel": 1, "with_xla_ops": 1},
    "%": {"mxu_percent": 1},
    "k cycles": {"kernel": 1e-3, "with_xla_ops": 1e-3},
    **{
        unit: dict.fromkeys(("memory", "residuals", "read", "written"), factor)
        | dict.fromkeys(("asked", "asked_miss", "crossed", "crossed_miss", "to_sms"), 32 * factor)  # sectors
        for unit, factor in BYTES.items()
    },
}
# What no results file has, and no program on the page: where it comes from.
SOURCES = json.loads((ROOT / "tests" / "figures.json").read_text())


def leaves(tree, name=None):
    """`(key, number)` of everything in a results file; how long the run took is called `took`."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, "took" if name == "provenance" and key == "seconds" else key)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value, name)
    elif isinstance(tree, (int, float)):
        yield name, tree


def prose(page):
    """A page without its programs, its generated parts, and its tables of datasheets and of the paper, which name their source."""
    text = (ROOT / page).read_text()
    for left_out in (r"^```.*?^```$", r"<!-- generated: .*?<!-- end -->", r"^\|.*?$"):
        text = re.sub(left_out, "", text, flags=re.MULTILINE | re.DOTALL if "?^" in left_out or "<!" in left_out else re.MULTILINE)
    return text


def figures(page):
    """`(number, unit)` of each figure in a page's prose."""
    for first, second, unit in FIGURE.findall(prose(page)):
        yield from ((number, unit) for number in (first, second) if number)


@pytest.fixture(scope="module")
def measured():
    """The numbers of all results files, by their key."""
    found = {}
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        for key, number in leaves(json.loads(path.read_text())):
            found.setdefault(key, []).append(number)
    return found


def computed(page):
    """Numbers in the programs of a page, which run above."""
    return [float(x.replace("_", "")) for x in re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?", "".join(PROGRAMS[page]))]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/results.md"])  # tests/test_results.py compares that one
def test_each_figure_has_a_source(page, measured):
    """A results file, a program on the page, or what `figures.json` names."""
    elsewhere = dict(SOURCES.get(page, {}))
    for number, unit in figures(page):
        value, decimals = float(number.replace(",", "")), len(number.partition(".")[2])
        in_files = ((x, factor) for key, factor in IN_UNITS.get(unit, {}).items() for x in measured.get(key, ()))
        in_programs = ((x, factor) for x in computed(page) for factor in (1, {"%": 100, **BYTES}.get(unit, 1)))
        near = any(round(x * factor, decimals) == value for x, factor in (*in_programs, *in_files))
        named = elsewhere.pop(f"{number} {unit}", None) or SOURCES.get(page, {}).get(f"{number} {unit}")
        assert near or named, f"{page}: {number} {unit} is in no results file"
    assert not elsewhere, f"{page} has no such figures: tests/figures.json is out of date"
