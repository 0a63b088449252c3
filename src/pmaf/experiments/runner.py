"""Measure the cells of experiments: one process each, saved as they finish."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from pmaf.experiments.experiment import Cell, Experiment, Row, Scale
from pmaf.experiments.measure import environment, memory
from pmaf.experiments.store import Store


@dataclass(frozen=True)
class Tally:
    """How many cells a run measured, found finished, and could not measure."""

    measured: int = 0
    found: int = 0
    failed: int = 0


def run(
    experiments: Sequence[Experiment],
    scale: Scale,
    device: torch.device,
    store: Store,
    console: Console,
) -> Tally:
    """Measure every cell that is not in the store yet; a failing one does not end the run."""
    measured = found = failed = 0
    with _bars(console) as progress:
        plans = {experiment: experiment.cells(scale) for experiment in experiments}
        cost = sum(cell.cost for cells in plans.values() for cell in cells)
        whole = progress.add_task("all", total=cost, done=0, cells=sum(map(len, plans.values())))
        for experiment, cells in plans.items():
            total = sum(cell.cost for cell in cells)
            bar = progress.add_task(experiment.name, total=total, done=0, cells=len(cells))
            for count, cell in enumerate(cells, 1):
                row = store.row(experiment.name, cell)
                if row is None or row.status == "failed":
                    row = _measure(experiment, cell, device)
                    store.save(experiment.name, cell, row)
                    measured += 1
                else:
                    found += 1
                if row.status == "failed":
                    failed += 1
                    reason = row.error.strip().splitlines()[-1]
                    progress.console.print(
                        f"[bold]{experiment.name}[/] {cell.key} failed: {reason}", style="red"
                    )
                progress.update(bar, advance=cell.cost, done=count)
                progress.update(whole, advance=cell.cost, done=measured + found)
    return Tally(measured, found, failed)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:16}"),
        BarColumn(),
        TextColumn("{task.fields[done]}/{task.fields[cells]}"),
        TimeRemainingColumn(),
        console=console,
    )


def _measure(experiment: Experiment, cell: Cell, device: torch.device) -> Row:
    """Measure one cell in a fresh process, so that neither its memory nor its end is ours."""
    context = _context(experiment)
    ours, theirs = context.Pipe(duplex=False)
    message: dict[str, Any] | None = None
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(prefix="pmaf-") as log:
        process = context.Process(
            target=_work, args=(theirs, log.name, experiment, dict(cell.params), device)
        )
        process.start()
        theirs.close()
        try:
            wait([ours, process.sentinel])
            message = ours.recv() if ours.poll() else None
        except EOFError:
            pass
        finally:
            if message is None:  # it has died, or the run is being interrupted
                _kill(process)
            process.join()
            ours.close()
        if message is None:
            last = log.read().decode(errors="replace").strip().splitlines()[-1:]
            error = ": ".join([_ending(process.exitcode), *last])
            message = {"status": "failed", "error": error}
    return Row(params=dict(cell.params), seconds=time.perf_counter() - start, **message)


def _kill(process: Any) -> None:
    """End a cell and the processes it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # no groups here, or none yet
        process.kill()


def _context(experiment: Experiment) -> Any:
    """Processes forked from a server that has imported what cells need and done nothing else."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    # Torch imports its compiler when an operator of ours is first called.
    context.set_forkserver_preload(
        ["torch._dynamo", type(experiment).__module__, *experiment.needs]
    )
    return context


def _work(
    connection: Connection,
    log: str,
    experiment: Experiment,
    params: dict[str, Any],
    device: torch.device,
) -> None:
    with open(log, "ab", buffering=0) as file:  # libraries talk; the progress bars stay whole
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # an interrupt from the keyboard is for the parent, who ends us and ours
    _limit_memory()
    message: dict[str, Any] = {"environment": environment(device)}
    try:
        message |= {"status": "done", "values": experiment.measure(device, **params)}
    except (MemoryError, torch.OutOfMemoryError) as error:
        message |= {"status": "unreachable", "error": f"out of memory: {error}"}
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            message |= {"status": "unreachable", "error": _shortage(str(error))}
        else:
            message |= {"status": "failed", "error": traceback.format_exc()}
    except Exception:
        message |= {"status": "failed", "error": traceback.format_exc()}
    connection.send(message)
    connection.close()


def _limit_memory() -> None:
    """Fail an allocation that the machine cannot serve, rather than be killed for it."""
    available = memory()
    if available is None:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(0.85 * available)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _shortage(error: str) -> str:
    """The allocator's complaint, in a reader's words."""
    wanted = [int(word) for word in error.replace(",", " ").split() if word.isdigit()]
    size = f" (a single tensor of {max(wanted) / 2**30:.1f} GiB)" if wanted else ""
    return f"out of memory{size}"


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", most likely for want of memory" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code} and no result"
