"""A report of the rows in a folder: HTML, Markdown, CSV, PNG and PDF."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.progress import track

from pmaf_lab.experiments.experiment import (
    Cell,
    Collection,
    Experiment,
    Figure,
    Finding,
    Row,
    Section,
    Table,
)
from pmaf_lab.experiments.plots import DARK, LIGHT, drawn, picture
from pmaf_lab.experiments.store import Store, StoreError, write_whole

NOTHING = "–"


@dataclass(frozen=True)
class Chapter:
    """An experiment, the rows there are of it, and what they say."""

    experiment: Experiment
    section: Section
    planned: int
    waiting: int
    missing: Sequence[Row]


@dataclass(frozen=True)
class Report:
    """Where the page is, and what it begins with."""

    page: Path
    findings: Table


def write(store: Store, collection: Collection, console: Console) -> Report:
    """Write the report of a folder into it."""
    about = store.about()
    chapters: list[Chapter] = []
    environments: list[Mapping[str, Any]] = []
    for experiment in collection.experiments:
        cells = experiment.cells(about["scale"])
        rows = [row for cell in cells if (row := _row(store, experiment, cell)) is not None]
        if not rows:
            continue
        missing = [row for row in rows if row.status != "done"]
        waiting = len(cells) - len(rows)
        section = _section(experiment, rows)
        chapters.append(Chapter(experiment, section, len(cells), waiting, missing))
        environments += [row.environment for row in rows if row.environment]
    pictures: dict[str, dict[str, Any]] = {}
    figures = [figure for chapter in chapters for figure in chapter.section.figures]
    for figure in track(figures, f"{'figures':16}", console=console):
        pictures[figure.name] = _draw(figure, store.folder / "figures")
    findings = [finding for chapter in chapters for finding in chapter.section.findings]
    tables = [table for chapter in chapters for table in chapter.section.tables]
    glance = findings_table(findings, collection.source)
    for table in [glance, *tables]:
        write_whole(store.folder / "tables" / f"{table.name}.csv", flat(table.frame))
        write_whole(store.folder / "tables" / f"{table.name}.md", markdown(table) + "\n")
    loader = PackageLoader("pmaf_lab.experiments")
    templates = Environment(
        loader=loader,
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = templates.get_template("report.html.jinja").render(
        about=about,
        collection=collection,
        chapters=chapters,
        environments=_distinct(environments),
        pictures=pictures,
        table=web_table,
        mark=_mark,
        state=_state,
        reason=reason,
    )
    path = store.folder / "report.html"
    write_whole(path, page)
    write_whole(store.folder / "report.md", _plain(about, collection, chapters, glance))
    return Report(path, glance)


def _row(store: Store, experiment: Experiment, cell: Cell) -> Row | None:
    """The row of a cell; if its file is damaged, as if it had not been measured."""
    try:
        return store.row(experiment.name, cell)
    except StoreError:
        return None


def _section(experiment: Experiment, rows: Sequence[Row]) -> Section:
    """What an experiment says; one that cannot say it does not silence the others."""
    try:
        return experiment.present(rows)
    except Exception as error:
        return Section(notes=[f"This cannot be shown: {type(error).__name__}: {error}"])


def _draw(figure: Figure, folder: Path) -> dict[str, Any]:
    """Draw a figure in both themes, save it, and return it ready to put into a page."""
    inline: dict[str, Any] = {}
    for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
        with drawn(theme):
            drawing = figure.draw(theme)
            content = picture(drawing, "png")
            write_whole(folder / f"{figure.name}{suffix}.png", content)
            inline[theme.name] = base64.b64encode(content).decode()
            inline["inches"] = drawing.get_size_inches()[0]
            if theme is LIGHT:
                write_whole(folder / f"{figure.name}.pdf", picture(drawing, "pdf"))
    return inline


def _distinct(environments: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(items) for items in dict.fromkeys(tuple(e.items()) for e in environments)]


def reason(row: Row) -> str:
    """Which cell has no value, and why, in a line."""
    words = " ".join(str(value) for value in row.params.values())
    return f"{words}: {row.error.strip().splitlines()[-1] if row.error else 'no reason given'}"


def formatted(table: Table) -> pd.DataFrame:
    """The frame with every number written out."""
    frame = table.frame.astype(object)
    for column in frame.columns:
        form = table.formats.get(column, table.formats.get(column[-1]))
        frame[column] = [_write(value, form) for value in frame[column]]
    return frame


def _write(value: Any, form: str | None) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return NOTHING
    if isinstance(value, str):
        return value
    if isinstance(value, float) and form is None:
        return f"{value:g}"
    return form.format(value) if form else str(value)


def web_table(table: Table) -> str:
    """A table as HTML, headed by its column groups."""
    frame = formatted(table)
    if all(group == "" for group, _ in frame.columns):
        frame.columns = [label for _, label in frame.columns]
    page = frame.to_html(index=False, border=0, classes="figures", justify="unset")
    return re.sub(r"<tr>((?:\s*<td>[^<]*</td>)?\s*<td>[^<]*\bours\b)", r'<tr class="ours">\1', page)


def flat(frame: pd.DataFrame) -> str:
    """A table as CSV, raw numbers, one header line."""
    named = frame.set_axis([_head(column) for column in frame.columns], axis=1)
    return named.to_csv(index=False)


def markdown(table: Table) -> str:
    """A table as Markdown."""
    frame = formatted(table)
    right = "|".join([":--", *["--:"] * (len(frame.columns) - 1)])
    lines = [" | ".join(_head(column) for column in frame.columns), right]
    lines += [" | ".join(map(str, row)) for row in frame.itertuples(index=False)]
    return "\n".join(f"| {line} |" if line is not right else f"|{line}|" for line in lines)


def _head(column: tuple[str, str]) -> str:
    return " ".join(part for part in column if part)


def _state(chapter: Chapter, scale: str) -> list[str]:
    """How much of an experiment the report is made of."""
    state = []
    if scale == "quick" and chapter.experiment.reduced:
        state.append(f"Quick run: {chapter.experiment.reduced}")
    if chapter.waiting:
        state.append(
            f"Not finished: {chapter.waiting} of {chapter.planned} cells are not measured yet; the "
            "same command goes on."
        )
    return state


def _mark(finding: Finding) -> str:
    return {True: "yes", False: "no", None: NOTHING}[finding.holds]


def findings_table(findings: Sequence[Finding], source: str) -> Table:
    """The findings as a table."""
    columns = [("", label) for label in ("claim", source, "here", "holds")]
    lines = [[f.claim, f.claimed, f.found, _mark(f)] for f in findings]
    return Table.of("findings", "At a glance", columns, lines)


def _plain(
    about: Mapping[str, Any], collection: Collection, chapters: Sequence[Chapter], glance: Table
) -> str:
    """The report as Markdown, with the figures as links."""
    lines = [f"# {collection.title}", "", collection.lead[about["scale"]], ""]
    lines += [f"Made by `{command}`." for command in about["commands"]]
    lines += ["", markdown(glance), ""]
    for chapter in chapters:
        lines += [f"## {chapter.experiment.title}", "", chapter.experiment.about, ""]
        lines += [f"{state}\n" for state in _state(chapter, about["scale"])]
        lines += [f"{note}\n" for note in chapter.section.notes]
        for figure in chapter.section.figures:
            lines += [f"![{figure.caption}](figures/{figure.name}.png)", ""]
        for table in chapter.section.tables:
            lines += [f"### {table.title}", "", markdown(table), ""]
            lines += [table.note, ""] if table.note else []
        if chapter.missing:
            lines += ["Not measured:", "", *(f"- {reason(row)}" for row in chapter.missing), ""]
    return "\n".join(lines)
