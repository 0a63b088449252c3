"""The measured numbers of the pages come from `docs/figures.json`, which `pmaf bench` writes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pmaf_lab import cli
from pmaf_lab.bench import BENCHMARKS
from pmaf_lab.bench.calls import CALLS, THEIRS, CallsRace
from pmaf_lab.bench.matrix_free import ByProducts
from pmaf_lab.bench.memory import MemoryRace
from pmaf_lab.bench.race import Race
from pmaf_lab.bench.traces import Traces
from pmaf_lab.experiments import Row
from pmaf_lab.experiments.store import Store
from pmaf_lab.figures.pages import fill, filled, names, pages, without_marks
from pmaf_lab.figures.record import (
    Entry,
    FigureError,
    Name,
    Place,
    Record,
    entry_of,
    three_digits,
    two_digits,
)
from pmaf_lab.figures.tables import _EIGEN, _LESS, _OTHERS, TABLES

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "figures.json"
PAGES = pages(ROOT)
RACES = {experiment.name: experiment for experiment in BENCHMARKS.experiments}


def rows_of(experiment, scale="full", environment=None):
    """A row of every cell, as if everybody had taken part: the others take k times as long."""
    rows = []
    for cell in experiment.cells(scale):
        if isinstance(experiment, MemoryRace):
            values = {"forward": 1.0, "backward": 2.0}
        elif isinstance(experiment, Race):
            values = {
                name: {
                    "forward": 0.25 * (1 + k),
                    "backward": 0.5 * (1 + k) if competitor.differentiable else None,
                    **dict.fromkeys(experiment.errors, 1e-6),
                }
                for k, (name, competitor) in enumerate(experiment.competitors.items())
            }
        elif isinstance(experiment, CallsRace):
            times = {"forward": 0.25, "backward": 0.5}
            both = {"ours": times, THEIRS: {"forward": 0.5, "backward": 1.0}}
            values = dict.fromkeys(CALLS[cell.params["call"]].source.families, both)
        elif isinstance(experiment, Traces):
            times = {"forward": 0.25, "backward": 0.5}
            values = {"first": 2.0, "eager": times, "compiled": times}
        else:
            names = ("products", "products warm", "products backward")
            ours = {"forward": 0.5, "backward": 0.75, **dict.fromkeys(names, 9), "residual": 1e-7}
            others = {name: {"forward": 1.0, "residual": 1e-6} for name in experiment.others}
            values = {"ours": ours, **others, "peak": 5_000_000_000, "leaf": 1_000_000_000}
        rows.append(Row(cell.params, "done", values, environment=environment or {"threads": 2}))
    return rows


@pytest.fixture(scope="module")
def everything() -> Record:
    """What a run of all races on an ideal machine would leave behind."""
    return Record(
        {name: entry_of(race, rows_of(race), name, "full") for name, race in RACES.items()}
    )


# The pages.


def test_the_pages_are_those_that_the_file_makes():
    assert fill(ROOT, Record.read(FILE), write=False) == [], "run: python -m pmaf_lab.figures"


def test_the_file_is_of_complete_runs_of_races_that_there_are():
    record = Record.read(FILE)
    assert record.text() == FILE.read_text(encoding="utf-8")
    for name, entry in record.entries.items():
        assert entry.scale == "full"
        assert entry.command == f"pmaf bench {name} --full"
        assert entry.environment["threads"] >= 1
        cells = [Row(cell.params, "done") for cell in RACES[name].cells("full")]
        assert set(entry.rows) <= {place_of(RACES[name], row) for row in cells}


def place_of(experiment, row):
    if isinstance(experiment, MemoryRace):
        return Place(row.params["competitor"], "×".join(map(str, row.params["shape"])))
    if isinstance(experiment, ByProducts):
        return Place(row.params["family"], experiment.label(row.params["size"]))
    return Place(row.params["family"], "×".join(map(str, row.params["shape"])))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_of_a_page_is_one_that_is_measured(page, everything):
    for name in names(page.read_text(encoding="utf-8")):
        assert everything.number(name) != "–", f"no race measures {name!r}"


def test_the_tables_of_the_pages_are_whole_after_all_races(everything):
    marked = [name for page in PAGES for name in re.findall(r"<!-- table: (.*) -->", text_of(page))]
    assert sorted(marked) == sorted(TABLES)
    for name, make in TABLES.items():
        table = make(everything)
        assert "Not measured" not in table
        # PageRank has one competitor alone.
        lines = [line for line in table.splitlines() if "PageRank" not in line]
        assert not [line for line in lines if "–" in line], name
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1


def test_the_families_of_the_tables_are_those_of_the_races():
    for part in (*_EIGEN, *_LESS):
        race = RACES[part.race]
        assert part.family in race.families
        assert list(race.competitors)[1] == part.baseline
    assert set(_OTHERS) == {*RACES["graphs"].families, *RACES["pca"].families}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


NUMBER = r"(?:\d[\d,.]*\d|\d|two|three|four|five|six|seven|eight|nine|ten)"
MEASURED = {
    "a ratio": rf"{NUMBER} times as (?:long|fast|slow)|{NUMBER} times (?:faster|slower)",
    "a factor": r"\d ?× ?(?:faster|slower|less|more|as )|\d\.\d+×(?!\d)",
    "a time": r"\b\d[\d,.]* ?(?:µs|ms)\b|\b\d[\d,.]* s\b",
}
# Whoever runs these sees the numbers. Those of `pmaf bench` come from the file.
COMMAND = re.compile(r"`(?:pmaf reproduce|python benchmarks/|pytest |python -m tests)|`--quick`")
COMPUTED = "none was measured"


DECIMAL = re.compile(r"(?<![\w.,-])\d+\.\d+(?![\w-])")


def suspicious(text: str) -> list[str]:
    """What looks measured in a page, and neither comes from the file nor names its command.

    The command stands in the same paragraph, or in an earlier one below the same heading.
    """
    text = re.sub(r"^```.*?^```$", "", without_marks(text), flags=re.MULTILINE | re.DOTALL)
    found, section = [], ""
    for block in re.split(r"\n\s*\n", text):
        section = block if block.lstrip().startswith("#") else f"{section} {block}"
        if block.startswith("    ") or COMPUTED in " ".join(block.split()):
            continue
        plain = re.sub(r"`[^`]*`", "", " ".join(block.split()))
        looks = [match[0] for form in MEASURED.values() for match in re.finditer(form, plain)]
        raced = "pmaf bench" in (section if block.startswith("|") else block)
        if raced and not COMMAND.search(block):
            looks += DECIMAL.findall(plain)
        elif COMMAND.search(section):
            continue
        found += [f"{look!r} in: {plain[:80]}" for look in looks]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_number_that_looks_measured_comes_from_the_file_or_names_its_command(page):
    assert suspicious(text_of(page)) == []


@pytest.mark.parametrize(
    "text",
    [
        "It takes 1.6 times as long for one matrix.",
        "up to nine times as long as `lstsq`",
        "Both passes are 5.2× faster.",
        "at 5×128: 6.46×.",
        "A graph takes 0.66 s forward.",
        "One call takes 12 µs.",
        "One run of `pmaf bench pairs` gave 4.0 at 64×32.",
        "| a | b |\n|---|---|\n| 1×8 | 1.9 ms |",
        "`pmaf reproduce` runs it.\n\n## Another\n\nIt takes 3 ms.",
        "    pmaf bench ied\n\nIt takes 0.06 to 0.76 times as long.",
        "    pmaf bench ied\n\nRatios:\n\n| n | 8 |\n|--|--|\n| paper | 1.72 |",
        "<!-- figure: a/b/c/d -->3<!-- /figure --> and 4 times as long",
    ],
)
def test_what_looks_measured_is_seen(text):
    assert suspicious(f"# Page\n\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "It takes <!-- figure: ied-users/1×8/eigh both/least -->1.6<!-- /figure --> times as long.",
        "<!-- table: pairs -->\n\n| 1×8 | 1.9 ms |\n\n<!-- /table -->",
        "`python benchmarks/under_load.py` shows two times as long.",
        "`pmaf reproduce ied-cost --quick` gave:\n\n| a |\n|--|\n| 3.3 ms |",
        "It helps for 3×3 to 16×16 matrices with gaps of 1e-4 in `float32`.",
        "    pmaf bench    # 3 s",
        "It would take 0.6 s; these numbers are computed, and none was measured.",
    ],
)
def test_what_is_not_measured_is_left_alone(text):
    assert suspicious(f"# Page\n\n{text}\n") == []


# The file.

CELLS = {
    Place("a", "1×8"): {"x": 2.0, "y off": True, "y both": 3.0},
    Place("b", "1×8"): {"x": 4.0, "y both": 5.0},
    Place("c d", "1×8"): {"x": 12.0},
    Place("a", "1000×8"): {"x": 0.5},
    Place("c d", "1000×8"): {"x": 3e-7},
}
SMALL = Record(
    {"race": Entry("pmaf bench race --full", "full", {"threads": 2, "torch": "9"}, CELLS)}
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("race/1×8/x/a", "2"),
        ("race/1×8/x/c d", "12"),
        ("race/1×8/x/least", "2"),
        ("race/1×8/x/median", "4"),
        ("race/1×8/x/most", "12"),
        ("race/1*/x/most/least", "0.5"),
        ("race/1*/x/most/most", "12"),
        ("race/1000×8/x/least", "3e-07"),
        ("race/1×8/y both/a", "3 ≠"),
        ("race/1×8/y both/b", "5"),
        ("race/1×8/y both/c d", "–"),
        ("race/7×8/x/a", "–"),
        ("other/1×8/x/a", "–"),
        ("race/environment", "2 threads, torch 9"),
    ],
)
def test_a_number_is_found_by_its_name(name, text):
    assert SMALL.number(name) == text


@pytest.mark.parametrize("name", ["race", "race/1×8/x", "race/1×8/x/a/best", "race/1/2/3/4/5"])
def test_a_wrong_name_is_said(name):
    with pytest.raises(FigureError, match=r"is not the name of a number: write RACE/SIZE"):
        SMALL.number(name)


def test_several_sizes_need_a_statistic():
    with pytest.raises(FigureError, match="matches 2 sizes; end it with /least"):
        SMALL.number("race/1*/x/a")


def test_digits():
    found = [1.649, 15.3, 246.9, 0.0663, 2e-8, 0.0, 12345.0]
    assert [two_digits(x) for x in found] == ["1.6", "15", "250", "0.066", "2e-08", "0", "12,000"]
    assert [three_digits(x) for x in found[:3]] == ["1.65", "15.3", "247"]


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "figures.json"
    SMALL.write(path)
    again = Record.read(path)
    assert again.entries == SMALL.entries
    assert json.loads(path.read_text())["race"]["rows"]["c d 1×8"] == {"x": 12.0}
    assert Record.read(tmp_path / "none").entries == {}


@pytest.mark.parametrize("text", ["", "[]", '{"race": {}}', '{"race": 3}'])
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(FigureError, match="is not a file of figures"):
        Record.read(path)


def test_the_numbers_of_a_race_are_seconds_multiples_and_errors():
    race = RACES["less"]
    entry = entry_of(race, rows_of(race), "x", "full")
    row = entry.rows[Place("hard", "5×2048×1024")]
    assert row["ours forward"] == 0.25
    assert row["ours backward"] == 0.5
    assert row["lstsq forward"] == row["lstsq both"] == 2
    assert row["SLSQP forward"] == 8
    assert "SLSQP both" not in row
    assert row["ours gradient error"] == 1e-6
    assert "Cholesky gradient error" not in row


def test_a_competitor_that_is_wrong_or_absent_is_marked():
    race = RACES["ied"]
    rows = rows_of(race)
    values = dict(rows[0].values)
    values["lobpcg"] = values["lobpcg"] | {"gradient error": 0.5}
    values["xitorch"] = {"skipped": "xitorch is not installed"}
    numbers = race.measured(replace(rows[0], values=values)).numbers
    assert numbers["lobpcg off"] is True
    assert not [name for name in numbers if name.startswith("xitorch")]
    assert [name for name in numbers if name.endswith("off")] == ["lobpcg off"]


def test_only_complete_races_of_one_environment_are_recorded():
    race = RACES["pairs"]
    rows = rows_of(race)
    assert len(entry_of(race, rows, "x", "full").rows) == len(rows)
    failed = replace(rows[0], status="failed", values={}, error="Oops")
    for part in (rows[1:], [failed, *rows[1:]]):
        with pytest.raises(FigureError, match="1 cells of pairs are missing or failed"):
            entry_of(race, part, "x", "full")
    too_large = replace(rows[0], status="unreachable", values={})
    assert len(entry_of(race, [too_large, *rows[1:]], "x", "full").rows) == len(rows) - 1
    moved = replace(rows[0], environment={"threads": 1})
    with pytest.raises(FigureError, match="not all measured in the same environment"):
        entry_of(race, [moved, *rows[1:]], "x", "full")


# Filling.


def test_a_page_is_filled_and_stays_so():
    text = "# A\n\nIt is <!-- figure: race/1×8/x/a -->–<!-- /figure --> times as long.\n\n"
    text += "<!-- table: pairs -->\n<!-- /table -->\n\nEnd.\n"
    once = filled(text, SMALL, "page")
    assert "<!-- figure: race/1×8/x/a -->2<!-- /figure --> times" in once
    assert "<!-- table: pairs -->\n\n*Not measured yet: `pmaf bench pairs --figures" in once
    assert filled(once, SMALL, "page") == once


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a <!-- figure: race/1×8/x/a -->2 times", "a mark has no end"),
        ("a <!-- table: pairs --> b <!-- /table -->", "a mark has no end"),
        ("a\n  <!-- figure: race/1×8/x/a -->2<!-- /figure -->", "a line begins with a mark"),
        ("<!-- table: nothing -->\n<!-- /table -->", "no table 'nothing'; choose from"),
        ("a <!-- figure: race -->2<!-- /figure -->", "is not the name of a number"),
    ],
)
def test_a_broken_mark_is_said(text, error):
    with pytest.raises(FigureError, match=error):
        filled(text, SMALL, "page")


def test_the_command_fills_and_checks(tmp_path):
    (tmp_path / "docs").mkdir()
    SMALL.write(tmp_path / "docs" / "figures.json")
    page = tmp_path / "README.md"
    page.write_text("It is <!-- figure: race/1×8/x/b -->9<!-- /figure -->.\n", encoding="utf-8")

    def run(*arguments):
        command = [sys.executable, "-m", "pmaf_lab.figures", *arguments, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    differs = run("--check")
    assert (differs.returncode, differs.stdout) == (1, f"{page} differs\n")
    assert ">9<" in page.read_text(encoding="utf-8")
    done = run()
    assert (done.returncode, done.stdout) == (0, f"{page} filled\n")
    assert ">4<" in page.read_text(encoding="utf-8")
    assert run("--check").returncode == 0
    page.write_text("<!-- figure: race/1×8/x/b -->", encoding="utf-8")
    assert run().returncode == 2


@pytest.mark.xdist_group("reproduce")
def test_a_run_puts_its_rows_into_the_file_and_keeps_the_others(tmp_path, monkeypatch):
    """The smallest race, quickly; then a page from it."""
    file = tmp_path / "docs" / "figures.json"
    SMALL.write(file)
    (tmp_path / "docs" / "images").mkdir()
    picture = tmp_path / "docs" / "images" / "hermitian.png"
    picture.write_bytes(b"old")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    arguments = ["bench", "hermitian", "--quick", "--out", str(out), "--figures", str(file)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    record = Record.read(file)
    assert record.entries["race"] == SMALL.entries["race"]
    entry = record.entries["hermitian"]
    assert entry.command == "pmaf bench hermitian --quick"
    assert entry.scale == "quick"
    assert {"processor", "threads", "torch"} <= set(entry.environment)
    assert set(entry.rows) == {Place("noise", "500×6")}
    assert picture.read_bytes() == b"old"  # no picture of the run has this name
    table = TABLES["hermitian"](record)
    assert table.splitlines()[0] == "| batch×n | noise |"
    assert re.fullmatch(r"\| 500×6 \| \d+\.\d+ \|", table.splitlines()[-1])

    (out / "figures" / "hermitian.png").write_bytes(b"new")
    said = cli._keep(BENCHMARKS.choose(["hermitian"]), Store(out), file)
    assert picture.read_bytes() == b"new"
    assert said[0] == f"hermitian is in {file}."


def test_a_pattern_of_sizes_has_a_statistic_and_a_size_has_none():
    for page in PAGES:
        for name in map(Name.of, names(text_of(page))):
            if name.column == "environment":
                continue
            race = RACES[name.race]
            rows = [Row(cell.params, "done") for cell in race.cells("full")]
            sizes = {place_of(race, row).size for row in rows}
            matching = [size for size in sizes if fnmatchcase(size, name.sizes)]
            assert len(matching) > 1 if name.over else len(matching) == 1
