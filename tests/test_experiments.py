"""Cells run alone, are kept when finished, and end in a report; whatever happens to them."""

import gc
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pmaf_lab.experiments import Cell, Collection, Experiment, Figure, Finding, Row, Section, Table
from pmaf_lab.experiments import report as reports
from pmaf_lab.experiments.measure import median_seconds, peak_bytes, seconds
from pmaf_lab.experiments.runner import run
from pmaf_lab.experiments.store import Store, StoreError, write_whole

CPU = torch.device("cpu")


class Toy(Experiment):
    """Cells that end in every way a cell can."""

    name = "toy"
    title = "Toy"
    about = "Ends <badly> & well."
    reduced = "less."

    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        self.folder = folder
        self.kinds = kinds

    def cells(self, scale):
        return [Cell({"kind": kind}) for kind in self.kinds]

    def measure(self, device, *, kind):
        with (self.folder / f"{kind}.count").open("a") as file:
            file.write("x")
        if kind == "raises":
            raise ValueError("no such luck")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "crashes":
            print("last words", flush=True)
            os.abort()
        if kind == "brackets":
            raise ValueError("bad path [/usr/lib] here")
        if kind == "tensor":
            return {"x": torch.ones(2)}
        if kind == "huge":
            torch.empty(1 << 50)
        return {"process": os.getpid(), "large": [0.5] * 100_000}

    def present(self, rows):
        import matplotlib.pyplot as plt

        def draw(theme):
            figure, axes = plt.subplots(figsize=(3, 2))
            axes.plot([1, 2], [1, 2], color=theme.ours)
            plt.close(figure)
            return figure

        lines = [[row.params["kind"], 0.1234 if row.status == "done" else None] for row in rows]
        return Section(
            findings=[Finding("toys <work>", "yes", "no", False)],
            figures=[Figure("toy", "A line.", draw)],
            tables=[
                Table.of("toy", "Toys", [("", "kind"), ("a", "b")], lines, formats={"b": "{:.1f}"})
            ],
        )


def toys(*experiments: Experiment) -> Collection:
    lead = {"quick": "Some <toys>."}
    return Collection("toy", "Toys", lead, "claimed", "paper", experiments)


def counts(folder: Path) -> dict[str, int]:
    return {path.stem: len(path.read_text()) for path in folder.glob("*.count")}


@pytest.fixture
def console():
    return Console(file=io.StringIO())


def test_a_failing_cell_is_recorded_and_the_rest_goes_on(tmp_path, console):
    kinds = ("raises", "killed", "crashes", "huge", "fine", "good")
    store = Store(tmp_path / "out")
    store.begin({"scale": "quick"}, ["pmaf toy"])
    tally = run([Toy(tmp_path, kinds)], "quick", CPU, store, console)
    assert (tally.measured, tally.found, tally.failed) == (6, 0, 3)
    rows = {kind: store.row("toy", Cell({"kind": kind})) for kind in kinds}
    assert rows["fine"].status == rows["good"].status == "done"
    assert "ValueError: no such luck" in rows["raises"].error
    assert "SIGKILL, most likely for want of memory" in rows["killed"].error
    assert "SIGABRT: last words" in rows["crashes"].error
    assert rows["huge"].status == "unreachable"
    assert "out of memory (a single tensor of 4194304.0 GiB)" in rows["huge"].error
    assert rows["fine"].environment["torch"] == torch.__version__

    processes = {rows[kind].values["process"] for kind in ("fine", "good")}
    assert len(processes | {os.getpid()}) == 3

    tally = run([Toy(tmp_path, kinds)], "quick", CPU, store, console)
    assert (tally.measured, tally.found, tally.failed) == (3, 3, 3)
    assert counts(tmp_path) == {
        "raises": 2, "killed": 2, "crashes": 2, "huge": 1, "fine": 1, "good": 1
    }  # fmt: skip


def test_the_report_is_made_of_the_rows_alone(tmp_path, console):
    store = Store(tmp_path)
    store.begin({"scale": "quick", "device": "cpu"}, ["pmaf toy", "pmaf toy", "pmaf <again>"])
    for kind, status in (("fine", "done"), ("raises", "failed")):
        row = Row({"kind": kind}, status, error="" if status == "done" else "Trace\nOops: <x>")
        store.save("toy", Cell({"kind": kind}), row)
    toy = Toy(tmp_path, ("fine", "raises", "waits"))
    page = reports.write(store, toys(toy), console).page
    assert not counts(tmp_path)
    text = page.read_text()
    assert (tmp_path / "tables" / "findings.csv").exists()
    for expected in (
        "Ends &lt;badly&gt; &amp; well.",
        "toys &lt;work&gt;",
        "raises: Oops: &lt;x&gt;",
        "<code>pmaf toy</code>, <code>pmaf &lt;again&gt;</code>",
        "Not measured: 1 of 3 cells",
        "Not finished: 1 of 3 cells are not measured yet",
        "Quick run: less.",
        "Some &lt;toys&gt;.",
    ):
        assert expected in text
    assert "0.1<" in text
    assert "0.1234" in (tmp_path / "tables" / "toy.csv").read_text()
    assert (tmp_path / "tables" / "toy.md").read_text().splitlines()[0] == "| kind | a b |"
    assert (tmp_path / "figures" / "toy.pdf").read_bytes().startswith(b"%PDF")
    for name in ("toy.png", "toy-dark.png"):
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")
    assert 'src="http' not in text
    assert "<script" not in text
    assert reports.write(store, toys(toy), console).page.read_text() == text


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StoreError, match=r"disk full.* make room or choose another folder"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_folder_holds_one_kind_of_run(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="holds no run"):
        store.about()
    store.begin({"scale": "quick", "device": "cpu"}, ["one"])
    store.begin({"scale": "quick", "device": "cpu"}, ["two", "one"])
    assert store.about()["commands"] == ["one", "two"]
    with pytest.raises(StoreError, match="scale quick, device cpu, not scale full, device cpu"):
        store.begin({"scale": "full", "device": "cpu"}, ["three"])


def test_a_damaged_row_is_measured_again(tmp_path, console):
    store, cell = Store(tmp_path), Cell({"kind": "fine"})
    store.save("toy", cell, Row({"kind": "fine"}, "done"))
    assert store.row("toy", cell) == Row({"kind": "fine"}, "done")
    store.path("toy", cell).write_text(json.dumps({"params": {}})[:-4])
    with pytest.raises(StoreError, match=r"fine\.json cannot be read"):
        store.row("toy", cell)
    store.begin({"scale": "quick"}, [])
    toy = Toy(tmp_path, ("fine",))
    assert "Not finished" not in reports.write(store, toys(toy), console).page.read_text()
    assert run([toy], "quick", CPU, store, console).measured == 1
    assert store.row("toy", cell).status == "done"


def test_words_with_brackets_break_nothing(tmp_path, console):
    store = Store(tmp_path / "out[/x]")
    store.begin({"scale": "quick"}, [])
    toy = Toy(tmp_path, ("brackets", "fine"))
    assert run([toy], "quick", CPU, store, console).measured == 2
    assert "bad path [/usr/lib] here" in console.file.getvalue()


def test_what_cannot_be_saved_is_recorded(tmp_path, console):
    store = Store(tmp_path)
    toy = Toy(tmp_path, ("tensor",))
    assert run([toy], "quick", CPU, store, console).failed == 1
    assert "not JSON serializable" in store.row("toy", Cell({"kind": "tensor"})).error


def test_an_experiment_that_cannot_present_does_not_silence_the_others(tmp_path, console):
    class Broken(Toy):
        name = "broken"
        title = "Broken"

        def present(self, rows):
            raise KeyError("gone")

    store = Store(tmp_path)
    store.begin({"scale": "quick"}, [])
    for name in ("toy", "broken"):
        store.save(name, Cell({"kind": "fine"}), Row({"kind": "fine"}, "done"))
    both = toys(Broken(tmp_path, ("fine",)), Toy(tmp_path, ("fine",)))
    text = reports.write(store, both, console).page.read_text()
    assert "This cannot be shown: KeyError" in text
    assert "toys &lt;work&gt;" in text


def test_cells_have_names_a_file_can_have():
    assert Cell({"size": [2, 3], "method": "PGD+RM", "x": "a/b c"}).key == "-2--3-_PGD+RM_a-b-c"


def test_peak_memory_counts_what_is_held_at_once():
    def run():
        x = torch.ones(1000)
        y = x + 1
        del x
        return y * 2

    assert 8000 <= peak_bytes(run, CPU) < 9000


def test_the_median_takes_at_least_one_call():
    calls = []
    assert median_seconds(lambda: calls.append(1), CPU, budget=0) >= 0
    assert len(calls) == 1
    median_seconds(lambda: calls.append(1), CPU, budget=1e9, repeats=5)
    assert len(calls) == 6


def test_garbage_is_not_collected_while_a_call_is_timed():
    states = []
    assert seconds(lambda: states.append(gc.isenabled()), CPU) >= 0
    assert states == [False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        seconds(lambda: 1 / 0, CPU)
    assert gc.isenabled()
