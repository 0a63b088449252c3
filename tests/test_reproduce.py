"""`pmaf reproduce`: its items, its command line, its report in a browser."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pmaf import SphereLeastSquares, solve
from pmaf_lab import cli
from pmaf_lab.experiments import Row
from pmaf_lab.experiments.plots import LIGHT, drawn, picture
from pmaf_lab.paper import published
from pmaf_lab.paper.ied import METHODS
from pmaf_lab.paper.items import REPRODUCTION
from pmaf_lab.paper.less import METHODS as LESS_METHODS

ITEMS = {item.name: item for item in REPRODUCTION.experiments}
CHEAP = ("case-study", "gradient-error")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pmaf", *map(str, arguments)]


def pmaf(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which the cheap items have been run."""
    out = tmp_path_factory.mktemp("reproduce") / "new" / "folder"
    result = pmaf("reproduce", *CHEAP, "--quick", "--out", out)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"Report: {out / 'report.html'}\n")
    return out


@pytest.mark.xdist_group("reproduce")
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    # Enough cells for the signal to arrive among them on a busy machine, too.
    items = ("samples", *CHEAP)
    arguments = ("reproduce", *items, "--quick", "--out", tmp_path)
    planned = sum(len(item.cells("quick")) for item in REPRODUCTION.choose(items))
    cells = tmp_path / "cells"
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore interrupts, and so do the processes they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not list(cells.glob("*/[!.]*.json")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "the same command goes on" in output
    finished = {path: path.stat().st_mtime_ns for path in cells.glob("*/[!.]*.json")}
    assert 1 <= len(finished) < planned
    assert all(json.loads(path.read_text())["status"] == "done" for path in finished)

    assert pmaf("report", tmp_path).returncode == 0  # of what there is
    result = pmaf(*arguments)
    assert result.returncode == 0
    assert f"{len(finished)} found finished" in result.stdout
    assert len(list(cells.glob("*/*.json"))) == planned
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


@pytest.mark.xdist_group("reproduce")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("reproduce", "less-tabel"), "no item 'less-tabel'; choose from case-study, samples"),
        (("reproduce", "--device", "abacus"), "no device 'abacus' here; choose from cpu"),
        (("reproduce", "--device", "cpu:"), "no device 'cpu:' here; choose from cpu"),
        (("reproduce", "--quick", "--out", "FILE"), "choose another folder with --out"),
        (("report", "EMPTY"), "holds no run; make one with: pmaf reproduce --out DIR"),
    ],
    ids=["item", "device", "index", "folder", "report"],
)
def test_bad_input_is_one_line_that_names_the_choices(arguments, expected, tmp_path):
    (tmp_path / "FILE").write_text("")
    places = {"FILE": tmp_path / "FILE", "EMPTY": tmp_path}
    result = pmaf(*(places.get(word, word) for word in arguments))
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.xdist_group("reproduce")
def test_a_missing_gpu_is_said_before_any_work(tmp_path):
    result = pmaf("reproduce", "--device", "cuda", "--out", tmp_path / "out")
    assert "no device 'cuda' here" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.xdist_group("reproduce")
def test_a_folder_with_another_scale_is_refused(folder):
    result = pmaf("reproduce", "case-study", "--full", "--out", folder)
    assert result.returncode == 2
    assert "holds a run with command reproduce, scale quick" in result.stderr


@pytest.mark.xdist_group("reproduce")
def test_info_names_versions():
    result = pmaf("info")
    assert result.returncode == 0
    assert torch.__version__ in result.stdout


@pytest.mark.xdist_group("reproduce")
def test_the_version_is_printed():
    assert pmaf("--version").stdout.strip() == version("pmaf")


def test_info_names_the_extra_of_what_is_missing(monkeypatch, capsys):
    """rich takes words in brackets for markup, unless they are escaped."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setattr(cli, "console", Console(width=200))
    cli.info()
    assert "scipy         not installed: pip install 'pmaf[paper]'" in capsys.readouterr().out


@pytest.mark.xdist_group("reproduce")
def test_the_report_is_made_from_the_saved_rows_alone(folder):
    before = (folder / "report.html").read_text()
    for path in ("report.html", "figures", "tables"):
        found = folder / path
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    assert pmaf("report", folder).returncode == 0
    assert (folder / "report.html").read_text() == before
    assert "pmaf reproduce case-study gradient-error --quick" in before
    assert (folder / "figures" / "case-study.pdf").exists()
    assert "IED" in (folder / "report.md").read_text()


@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("scale", ["quick", "full"])
def test_every_item_says_what_it_measures(name, scale):
    item = ITEMS[name]
    cells = item.cells(scale)
    assert len({cell.key for cell in cells}) == len(cells) > 0
    assert all(json.loads(json.dumps(cell.params)) == dict(cell.params) for cell in cells)
    assert item.title
    assert item.about.endswith(".")


def test_the_table_of_less_is_shown_while_blocks_are_missing():
    item = ITEMS["less-table"]
    rows = []
    for cell in item.cells("full"):
        p = cell.params
        numbers = [1.0 + k for k in range(p["count"])]
        values = {"inner": [True] * p["count"], "iterations": [3] * p["count"]}
        values |= {"objective": numbers, "exact_objective": numbers}
        if p["method"] == "ours":
            values["least"] = numbers
        if not (p["method"] == "ours" and p["first"] == 300):
            rows.append(Row(p, "done", values))
    section = item.present(rows)
    assert len(section.tables) == 3
    assert "900 to 1,000" in section.tables[-1].note


def consistent(m, n, count, noise):
    """Problems that a float64 vector on the sphere solves nearly exactly."""
    generator = torch.Generator().manual_seed(m)
    A = torch.randn(count, m, n, generator=generator)
    u = torch.nn.functional.normalize(torch.randn(count, n, 1, generator=generator).double(), dim=1)
    off = noise * torch.randn(count, m, generator=generator)
    return SphereLeastSquares(A, (A.double() @ u).squeeze(-1).float() + off)


@pytest.mark.parametrize("noise", [1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize(("m", "n"), [(2, 2), (64, 32)])
def test_what_the_dtype_cannot_hold_is_not_above_the_minimum(m, n, noise, monkeypatch):
    """The minima are so small that rounding the exact minimiser exceeds them by far."""
    problem = consistent(m, n, 50, noise)
    monkeypatch.setattr("pmaf_lab.paper.less.problems", lambda *_: problem)
    exact = SphereLeastSquares(problem.matrix.double(), problem.b.double())
    best = solve(exact).value
    least = exact.objective(best)
    rounded = exact.objective(best.float().double())
    assert (rounded > (1 + 1e-5) * least).any()

    item = ITEMS["less-table"]
    params = {"m": m, "n": n, "method": "ours", "first": 0, "count": 50}
    found = item.measure(torch.device("cpu"), **params)
    assert (torch.tensor(found["least"], dtype=torch.float64) >= least).all()

    def above(values):
        rows = [Row(params, "done", found | {"exact_objective": values.tolist()})]
        rows += [Row(params | {"method": "SciPy"}, "done", found)]
        ((name, *_), *_, (_, *_, count)) = item.present(rows).tables[0].frame.to_numpy().tolist()
        assert name == "SciPy"
        return count

    assert above(rounded) == 0
    if n == 2:  # without kernels, larger problems are solved in float32
        assert above(torch.tensor(found["exact_objective"], dtype=torch.float64)) == 0
    # A vector that is away from the minimiser by many roundings is above, on every problem.
    move = torch.randn(best.shape, generator=torch.Generator().manual_seed(0)).double()
    move = move - (move * best).sum(-1, keepdim=True) * best
    away = best + 1e-3 * torch.nn.functional.normalize(move, dim=-1)
    assert above(exact.objective(away)) == 1000


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_presents_what_there_is_even_if_that_is_nothing(name):
    item = ITEMS[name]
    failed = [Row(cell.params, "failed", error="Oops") for cell in item.cells("quick")]
    for rows in ([], failed, failed[:1]):
        section = item.present(rows)
        for figure in section.figures:
            with drawn(LIGHT):
                assert picture(figure.draw(LIGHT), "png")


def test_the_papers_figures_are_all_there():
    costs = published.table("ied_costs")
    for matrix in ("symmetric", "nonsymmetric"):
        for quantity, device, sizes in (
            ("time", "cpu", 4),
            ("time", "gpu", 6),
            ("memory", "gpu", 6),
        ):
            part = costs[
                (costs.matrix == matrix) & (costs.quantity == quantity) & (costs.device == device)
            ]
            assert len(part) == 12 * sizes
            assert set(part.method) == set(METHODS)
            # The paper ran out of memory for IFT-J at 1024.
            gaps = part[part.forward.isna()]
            assert set(gaps.n) <= {1024}
            assert set(gaps.method) <= {"PI-IFT-J", "SI-IFT-J"}
    table = published.table("less_table")
    assert len(table) == 27
    assert set(table.method) == set(LESS_METHODS)
    speedup = published.table("less_backward").set_index(["m", "method"]).seconds
    assert math.isclose(speedup[8, "AutoDiff"] / speedup[8, "LESS"], 444)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FRAME = """<!doctype html><iframe id="page" src="report.html" width="{width}" height="900"></iframe>
<pre id="found"></pre><script>
addEventListener("load", () => {{
  const page = document.getElementById("page").contentDocument;
  const inside = (e) => e.closest(".scroll") || e.closest("details:not([open])");
  const wide = [...page.body.querySelectorAll("*")]
    .filter((e) => !inside(e) && e.getBoundingClientRect().right > {width} + 1)
    .map((e) => e.tagName + ": " + e.textContent.slice(0, 40));
  const images = [...page.images].map((i) => i.complete && i.naturalWidth > 100);
  document.getElementById("found").textContent = JSON.stringify({{
    scroll: page.documentElement.scrollWidth, wide, images,
    size: parseFloat(getComputedStyle(page.querySelector("td")).fontSize)}});
}});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.xdist_group("reproduce")
@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "desktop"])
def test_the_report_fits_the_screen(folder, width, tmp_path):
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(width=width))
    result = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--allow-file-access-from-files", f"--user-data-dir={tmp_path}",
            f"--window-size={width + 50},1000", "--virtual-time-budget=10000", "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(result.stdout.split('<pre id="found">')[1].split("</pre>")[0])
    assert found["wide"] == []
    assert found["scroll"] <= width
    assert found["images"] == [True, True]
    assert found["size"] >= 12
