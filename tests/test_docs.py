"""The programs in the README and the documentation run as they stand, and what they assert holds."""

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
