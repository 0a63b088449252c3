"""Every Python snippet of the README and the docs runs, page by page."""

import re
from pathlib import Path

import pytest

from tests.bugs import BUGS
from tests.mutants import check_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page):
    names: dict[str, object] = {}
    for code in SNIPPET.findall(page.read_text(encoding="utf-8")):
        exec(compile(code, str(page), "exec"), names)


def test_the_readme_has_snippets():
    assert SNIPPET.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_deliberate_bug_still_has_its_place():
    """`make mutants` takes long; that its table fits the code is seen at once."""
    check_table(BUGS)
