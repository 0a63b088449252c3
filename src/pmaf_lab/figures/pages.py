"""Pages whose numbers come from a record.

A number stands between `<!-- figure: NAME -->` and `<!-- /figure -->`, a table between the lines
`<!-- table: NAME -->` and `<!-- /table -->`. Both are comments, which no viewer shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pmaf_lab.figures.record import FigureError, Record
from pmaf_lab.figures.tables import TABLES

FIGURE = re.compile(r"(<!-- figure: (?P<name>[^>]*?) -->)(?P<text>[^<]*)(<!-- /figure -->)")
TABLE = re.compile(
    r"(^<!-- table: (?P<name>[^>]*?) -->\n)(?P<text>.*?)(^<!-- /table -->$)",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- /?(?:figure|table)\b")
# A comment at the beginning of a line ends a paragraph of Markdown.
_BROKEN = re.compile(r"^\s*<!-- /?figure\b", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """The pages of a repository that have numbers."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def names(text: str) -> Iterator[str]:
    """Of the numbers of a page."""
    return (match["name"] for match in FIGURE.finditer(text))


def filled(text: str, record: Record, where: str) -> str:
    """A page with the numbers of a record.

    Raises:
        FigureError: If a mark is not whole, or names nothing that there is.
    """
    found = len(FIGURE.findall(text)) + len(TABLE.findall(text))
    if 2 * found != len(_MARK.findall(text)):
        raise FigureError(f"{where}: a mark has no end, or a number in it that spans lines")
    if _BROKEN.search(text):
        raise FigureError(f"{where}: a line begins with a mark, which ends the paragraph there")

    def number(match: re.Match[str]) -> str:
        return match[1] + record.number(match["name"]) + match[4]

    def table(match: re.Match[str]) -> str:
        make = TABLES.get(match["name"])
        if make is None:
            known = ", ".join(TABLES)
            raise FigureError(f"{where}: no table {match['name']!r}; choose from {known}")
        # A blank line after the mark, because a comment and what follows it are one block.
        return f"{match[1]}\n{make(record)}\n\n{match[4]}"

    return TABLE.sub(table, FIGURE.sub(number, text))


def without_marks(text: str) -> str:
    """A page without its numbers and tables."""
    return TABLE.sub("", FIGURE.sub("", text))


def fill(root: Path, record: Record, write: bool) -> list[Path]:
    """Fill the pages of a repository; returns those that were not as they should be."""
    changed = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        new = filled(text, record, page.name)
        if new != text:
            changed.append(page)
            if write:
                page.write_text(new, encoding="utf-8")
    return changed
