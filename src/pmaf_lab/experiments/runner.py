"""Measure the cells of experiments: one process each, saved as they finish."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from pmaf import native
from pmaf_lab.experiments.experiment import Cell, Experiment, Row, Scale
from pmaf_lab.experiments.measure import environment, free_memory
from pmaf_lab.experiments.store import Store, StoreError


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
    plans = {
        experiment: [(cell, _finished(store, experiment, cell)) for cell in experiment.cells(scale)]
        for experiment in experiments
    }
    measured = failed = 0
    with _bars(console) as progress:
        whole = _bar(progress, "all", [cell for plan in plans.values() for cell in plan])
        for experiment, plan in plans.items():
            bar = _bar(progress, experiment.name, plan)
            for cell, finished in plan:
                if finished:
                    continue
                for task in (whole, bar):
                    progress.update(task, cell=cell.key)
                row = _measure(experiment, cell, device)
                store.save(experiment.name, cell, row)
                measured += 1
                if row.status == "failed":
                    failed += 1
                    reason = escape(row.error.strip().splitlines()[-1])
                    name = f"[bold]{experiment.name}[/] {escape(cell.key)}"
                    progress.console.print(f"{name} failed: {reason}", style="red", soft_wrap=True)
                for task in (whole, bar):
                    done = progress.tasks[task].fields["done"] + 1
                    progress.update(task, advance=cell.cost, done=done)
            progress.update(bar, cell="")
        progress.update(whole, cell="")
    found = sum(finished for plan in plans.values() for _, finished in plan)
    return Tally(measured, found, failed)


def _finished(store: Store, experiment: Experiment, cell: Cell) -> bool:
    """Whether a cell need not be measured; one whose file is damaged is measured again."""
    try:
        row = store.row(experiment.name, cell)
    except StoreError:
        return False
    return row is not None and row.status != "failed"


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:16}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[done]}/{task.fields[cells]}"),
        _TimeLeft(),
        TextColumn("{task.fields[cell]}", style="dim"),
        console=console,
    )


def _bar(progress: Progress, name: str, plan: Sequence[tuple[Cell, bool]]) -> TaskID:
    """A bar over the cost of the cells there are to measure."""
    cost = sum(cell.cost for cell, finished in plan if not finished)
    found = sum(finished for _, finished in plan)
    return progress.add_task(name, total=cost or None, done=found, cells=len(plan), cell="")


class _TimeLeft(ProgressColumn):
    """From the time the cells so far took for their cost: cells last from moments to minutes."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.elapsed is None or task.total is None:
            return Text("")
        left = round(task.elapsed * (task.total - task.completed) / task.completed)
        return Text(f"{left // 60}:{left % 60:02} left" if left else "", style="cyan")


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
    Thread(target=_outlived, daemon=True).start()
    native.forked_early()  # the server of processes has only imported
    if device.type == "cpu":
        _limit_memory()
    message: dict[str, Any] = {"environment": environment(device)}
    try:
        values = experiment.measure(device, **params)
        json.dumps(values)  # what cannot be saved fails here, where it is recorded
        message |= {"status": "done", "values": values}
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


def _outlived() -> None:
    """End with the run, however it ends."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _limit_memory() -> None:
    """Fail an allocation that the machine cannot serve, rather than be killed for it."""
    available = free_memory()
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
