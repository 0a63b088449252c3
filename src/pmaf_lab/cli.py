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
from pmaf import native
from pmaf.errors import require_extra

if TYPE_CHECKING:
    from pmaf_lab.experiments import Collection, Experiment, Scale
    from pmaf_lab.experiments.report import Report
    from pmaf_lab.experiments.store import Store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Deep declarative layers for principal matrix features.",
)
console = Console()

_REPORT = ("jinja2", "matplotlib", "numpy", "pandas")
_INTERRUPTED = 130  # what a shell expects after Ctrl-C


def _fail(message: object) -> NoReturn:
    """End with one line that says what was wrong."""
    Console(stderr=True, soft_wrap=True).print(f"pmaf: {message}", style="red", markup=False)
    raise typer.Exit(2)


def _collection(command: str) -> Collection:
    for module in _REPORT:
        require_extra(module, command if command == "bench" else "paper")
    if command == "bench":
        from pmaf_lab.bench import BENCHMARKS

        return BENCHMARKS
    from pmaf_lab.paper.items import REPRODUCTION

    return REPRODUCTION


def _device(name: str) -> torch.device:
    there = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    full = "cuda:0" if name == "cuda" else name
    if full not in there:
        raise ValueError(f"there is no device {name!r} here; choose from {', '.join(there)}")
    return torch.device(full)


_Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ITEM]...",
        help="What to run; everything unless given. An unknown name shows the list.",
    ),
]
_Quick = Annotated[
    bool, typer.Option("--quick/--full", help="A few minutes, or everything that fits.")
]
_Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
_Out = Annotated[
    Path | None, typer.Option(help="Folder for the results; out/COMMAND-SCALE by default.")
]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(pmaf.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def reproduce(
    items: _Items = None, quick: _Quick = False, device: _Device = "cpu", out: _Out = None
) -> None:
    """Run the paper's experiments again and set our figures beside the paper's.

    Every finished cell is kept: the same command goes on where an interrupted run stopped.
    """
    _run("reproduce", items or [], "quick" if quick else "full", device, out)


@app.command()
def bench(
    items: _Items = None,
    quick: _Quick = False,
    device: _Device = "cpu",
    out: _Out = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="A file for the numbers that pages show, such as docs/figures.json."),
    ] = None,
) -> None:
    """Race the default settings against everything a user would pick instead.

    Every finished cell is kept: the same command goes on where an interrupted run stopped.
    """
    _run("bench", items or [], "quick" if quick else "full", device, out, figures)


def _run(
    command: str,
    items: list[str],
    scale: Scale,
    device: str,
    out: Path | None,
    figures: Path | None = None,
) -> None:
    folder = out or Path("out") / f"{command}-{scale}"
    try:
        collection = _collection(command)
        experiments = collection.choose(items)
        where = _device(device)
        for module in (module for experiment in experiments for module in experiment.needs):
            require_extra(module, collection.extra)
    except (ValueError, ImportError) as error:
        _fail(error)
    from pmaf_lab.experiments.runner import run
    from pmaf_lab.experiments.store import Store, StoreError
    from pmaf_lab.figures.record import FigureError

    words = ["pmaf", command, *items, f"--{scale}"]
    words += [] if device == "cpu" else ["--device", device]
    words += [] if out is None else ["--out", str(out)]
    store = Store(folder)
    try:
        store.begin({"command": command, "scale": scale, "device": str(where)}, [shlex.join(words)])
        start = time.perf_counter()
        for name in ("SIGTERM", "SIGHUP"):  # end a run in good order, as Ctrl-C does
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.default_int_handler)
        tally = run(experiments, scale, where, store, console)
        written = _report(folder)
        kept = [] if figures is None else _keep(experiments, store, figures)
    except (StoreError, FigureError) as error:
        _fail(error)
    except KeyboardInterrupt:
        name = escape(str(folder))
        console.print(
            f"\nStopped. What was finished is in {name}: the same command goes on from there, and "
            f"[bold]pmaf report {name}[/] shows it.",
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
    for line in kept:
        console.print(line, soft_wrap=True, highlight=False)
    if tally.failed:
        raise typer.Exit(1)


def _keep(experiments: list[Experiment], store: Store, path: Path) -> list[str]:
    """Put the numbers of finished experiments into a file for pages; returns what to say of it.

    Pictures of the same run take the place of those in the folder `images` beside the file.
    """
    from pmaf_lab.figures.record import FigureError, Record, entry_of

    about = store.about()
    scale = about["scale"]
    record, said = Record.read(path), []
    for experiment in experiments:
        rows = [store.row(experiment.name, cell) for cell in experiment.cells(scale)]
        command = f"pmaf {about['command']} {experiment.name} --{scale}"
        try:
            entry = entry_of(experiment, [row for row in rows if row is not None], command, scale)
        except FigureError as error:
            said.append(f"Not in {escape(str(path))}: {error}.")
            continue
        record = record.with_entry(experiment.name, entry)
        said.append(f"{experiment.name} is in {escape(str(path))}.")
        for picture in sorted((store.folder / "figures").glob(f"{experiment.name}*.png")):
            there = path.parent / "images" / picture.name
            if there.is_file():
                there.write_bytes(picture.read_bytes())
    record.write(path)
    return [*said, "Fill the pages from it: python -m pmaf_lab.figures"]


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
) -> None:
    """Write the report of the results in a folder again, from the saved rows alone."""
    from pmaf_lab.experiments.store import StoreError

    try:
        _show(_report(folder))
    except (StoreError, ImportError, OSError) as error:
        _fail(error)


def _report(folder: Path) -> Report:
    from pmaf_lab.experiments.store import Store

    store = Store(folder)
    collection = _collection(store.about()["command"])
    from pmaf_lab.experiments import report as reports

    return reports.write(store, collection, console)


def _show(written: Report) -> None:
    """The findings, and where to read on."""
    frame = written.findings.frame
    table = Table(*(label for _, label in frame.columns), box=box.SIMPLE_HEAD)
    colours = {"yes": "green", "no": "red"}
    for *words, holds in frame.itertuples(index=False):
        colour = colours.get(holds, "default")
        table.add_row(*map(escape, words), f"[{colour}]{holds}[/]")
    console.print(table)
    console.print(f"Report: [bold]{escape(str(written.page))}[/]", soft_wrap=True)


@app.command()
def info() -> None:
    """Versions, devices and optional dependencies."""
    from importlib import metadata

    table = Table(show_header=False, box=None)
    table.add_row("pmaf", pmaf.__version__)
    table.add_row("torch", torch.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("kernels", native.about)
    table.add_row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    table.add_row("devices", ", ".join(["cpu", *gpus]))
    for module in (*_REPORT, "scipy", "transformers"):
        try:
            version = metadata.version(module)
        except metadata.PackageNotFoundError:
            version = "not installed: pip install 'pmaf[paper]'"
        table.add_row(module, escape(version))
    console.print(table)
