"""Every Python snippet of the README and the docs runs, links lead somewhere, names are listed."""

import re
import tomllib
from pathlib import Path

import pytest

import pmaf
from tests.bugs import BUGS
from tests.mutants import check_table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = sorted([*ROOT.glob("*.md"), *PAGES[1:], *(ROOT / ".github").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
PUBLIC = (pmaf, pmaf.solvers, pmaf.gradients, pmaf.operators)
NAMES = [f"{module.__name__}.{name}" for module in PUBLIC for name in module.__all__]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page):
    names: dict[str, object] = {}
    for code in SNIPPET.findall(page.read_text(encoding="utf-8")):
        exec(compile(code, str(page), "exec"), names)


def test_the_readme_has_snippets():
    assert SNIPPET.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def anchor(heading: str) -> str:
    """The name that Git servers and MyST give to a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return words.replace(" ", "-")


def test_completion_offers_what_is_public():
    assert {name for name in dir(pmaf) if not name.startswith("_")} == set(pmaf.__all__)


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in filter(None, (part for found in LINK.findall(text) for part in found)):
        if target.startswith(("https://", "http://")) or target == "gallery/index.rst":
            continue  # the gallery is written by `make docs`
        path, _, name = target.partition("#")
        there = page.parent / path if path else page
        assert there.is_file(), f"{page.name} links to {target}, which does not exist"
        if name:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert name in map(anchor, headings), f"{page.name}: no heading for {target}"


def test_the_release_is_the_same_everywhere():
    changes, cited = (
        (ROOT / x).read_text(encoding="utf-8") for x in ("CHANGELOG.md", "CITATION.cff")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    titles = re.findall(r"^## (.*)$", changes, re.MULTILINE)
    released = re.search(r"^date-released: (\S+)$", cited, re.MULTILINE)
    assert released is not None
    assert titles[:2] == ["Unreleased", f"{pmaf.__version__} — {released[1]}"]
    assert re.search(rf"^version: {re.escape(pmaf.__version__)}$", cited, re.MULTILINE)
    assert [author["name"] for author in project["authors"]] == re.findall(
        r'^  - name: "(.*)"$', cited, re.MULTILINE
    )
    assert re.search(rf"^license: {project['license']}$", cited, re.MULTILINE)


def test_the_readme_is_short_and_wrapped():
    """Tables keep their lines."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 105
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long, f"wrap at 120 characters: {long[0]}"


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    for page in PAGES[1:]:
        assert page.stem == "index" or page.stem in index, (
            f"docs/index.md does not list {page.name}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_reference(name):
    module, _, last = name.rpartition(".")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.rst")]
    directives = rf"^\.\. auto(?:class|function|module):: (?:{re.escape(name)}|{last})\b"
    assert any(re.search(directives, page, re.MULTILINE) for page in pages) or (
        module == "pmaf" and last in ("gradients", "operators", "solvers")
    ), f"{name} is on no page of docs/api"


def test_every_deliberate_bug_still_has_its_place():
    """`make mutants` takes long; that its table fits the code is seen at once."""
    check_table(BUGS)
