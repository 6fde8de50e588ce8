"""The programs in the README and the documentation run as they stand, and what they assert holds."""

import json
import pathlib
import re

import pytest

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


# A measured figure and its unit; the decimals that are shown are those that must agree.
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) ?(TFLOP/s|tokens/s|ms|µs|times faster|times slower)(?!\w)")
IN_UNITS = {"TFLOP/s": ("tflops", 1), "tokens/s": ("tokens_per_second", 1), "ms": ("median", 1e3), "µs": ("median", 1e6)}


def leaves(tree, name=None):
    """`(key, number)` of everything in a results file."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, key)
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


def test_each_figure_is_found_in_a_results_file():
    files = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")]
    found = [leaf for data in files for leaf in leaves(data)]
    for page in PAGES:
        if page == "docs/results.md":  # generated as a whole; tests/test_results.py compares it
            continue
        for number, unit in FIGURE.findall(prose(page)):
            key, factor = IN_UNITS.get(unit, ("ratio", 1))
            decimals = len(number.partition(".")[2])
            value = float(number.replace(",", ""))
            near = any(name == key and round(x * factor, decimals) == value for name, x in found)
            assert near or "predict" in _sentence(page, number), f"{page}: {number} {unit} is in no results file"


def _sentence(page, number):
    text = prose(page)
    at = text.index(number)
    return text[max(text.rfind(". ", 0, at), 0) : at + 80]
