"""The command line."""

from __future__ import annotations

import os
import platform
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import pmaf
from pmaf.errors import require_extra

if TYPE_CHECKING:
    from pmaf.experiments import Experiment, Scale
    from pmaf.experiments.report import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Deep declarative layers for principal matrix features.",
)
console = Console()

_PAPER = ("jinja2", "matplotlib", "numpy", "pandas")
_INTERRUPTED = 130  # what a shell expects after Ctrl-C


def _fail(message: object) -> NoReturn:
    """End with one line that says what was wrong."""
    Console(stderr=True, soft_wrap=True).print(f"pmaf: {message}", style="red", markup=False)
    raise typer.Exit(2)


def _items(names: list[str]) -> list[Experiment]:
    for module in _PAPER:
        require_extra(module, "paper")
    from pmaf.paper.items import ITEMS

    unknown = [name for name in names if name not in ITEMS]
    if unknown:
        raise ValueError(f"there is no item {unknown[0]!r}; choose from {', '.join(ITEMS)}")
    return [item for name, item in ITEMS.items() if not names or name in names]


def _device(name: str) -> torch.device:
    there = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if name.split(":")[0] not in there:
        raise ValueError(f"there is no device {name!r} here; choose from {', '.join(there)}")
    return torch.device(name)


@app.command()
def reproduce(
    items: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ITEM]...", help="What to run; everything unless given."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick/--full", help="Two minutes on two cores, or everything that fits."),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; out/quick or out/full by default.")
    ] = None,
) -> None:
    """Run the paper's experiments again and set our figures beside the paper's.

    Every finished cell is kept: the same command goes on where an interrupted run stopped.
    """
    scale: Scale = "quick" if quick else "full"
    folder = out or Path("out") / scale
    try:
        experiments = _items(items or [])
        where = _device(device)
        for experiment in experiments:
            for module in experiment.needs:
                require_extra(module, "paper")
    except (ValueError, ImportError) as error:
        _fail(error)
    from pmaf.experiments.runner import run
    from pmaf.experiments.store import Store, StoreError

    command = ["pmaf", "reproduce", *(items or []), f"--{scale}"]
    command += [] if device == "cpu" else ["--device", device]
    store = Store(folder)
    try:
        store.begin({"scale": scale, "device": device}, [shlex.join(command)])
        start = time.perf_counter()
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end a run in good order
        tally = run(experiments, scale, where, store, console)
        written = _report(folder)
    except StoreError as error:
        _fail(error)
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. What was finished is in {folder}: the same command goes on from there, "
            f"and [bold]pmaf report {folder}[/] shows it.",
            soft_wrap=True,
        )
        raise typer.Exit(_INTERRUPTED) from None
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    console.print(
        f"{tally.measured} cells measured in {minutes} min {seconds} s"
        + (f", {tally.found} found finished" if tally.found else "")
        + (f", [red]{tally.failed} failed[/]; the report says why" if tally.failed else "")
        + "."
    )
    _show(written)
    if tally.failed:
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `pmaf reproduce`.")],
) -> None:
    """Write the report of the results in a folder again, from the saved rows alone."""
    from pmaf.experiments.store import StoreError

    try:
        _show(_report(folder))
    except (StoreError, ImportError, OSError) as error:
        _fail(error)


def _show(written: Report) -> None:
    """The findings, and where to read on."""
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    table = Table("claim", "paper", "here", "holds", box=box.SIMPLE_HEAD)
    for finding in written.findings:
        cells = (escape(text) for text in (finding.claim, finding.claimed, finding.found))
        table.add_row(*cells, marks[finding.holds])
    console.print(table)
    console.print(f"Report: [bold]{written.page}[/]", soft_wrap=True)


def _report(folder: Path) -> Report:
    items = _items([])
    from pmaf.experiments import report as reports
    from pmaf.experiments.store import Store

    return reports.write(Store(folder), items, console)


@app.command()
def info() -> None:
    """Versions, devices and optional dependencies."""
    from importlib import metadata

    table = Table(show_header=False, box=None)
    table.add_row("pmaf", pmaf.__version__)
    table.add_row("torch", torch.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    table.add_row("devices", ", ".join(["cpu", *gpus]))
    for module in (*_PAPER, "scipy", "transformers"):
        try:
            version = metadata.version(module)
        except metadata.PackageNotFoundError:
            version = "not installed: pip install 'pmaf[paper]'"
        table.add_row(module, version)
    console.print(table)
