"""Deliberate bugs, one at a time, and whether the tests see them.

    python -m tests.mutants [--only WORD] [--jobs 2]

The table of bugs is `tests/bugs.py`. A bug that no test sees is a line that nothing checks: it
asks for a test, or the line is of no use. The text that a bug replaces has to be there exactly
once, so that the table changes with the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.table import Table

from tests.bugs import BUGS, Bug

ROOT = Path(__file__).parent.parent
PARTS = ("src", "tests", "docs", "hatch_build.py", "pyproject.toml", "README.md")
# Seconds after which a run is taken for an endless loop, which is a bug that shows.
PATIENCE = 300
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Verdict:
    """What became of a bug: "killed", "survived", or "argued" if it may survive."""

    bug: Bug
    outcome: str
    seconds: float


class Copy:
    """A copy of the repository to put bugs into.

    The runs write no bytecode: it is told from other bytecode by the second in which the source
    was written, and its length, which two bugs may have in common.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "_build")
        for part in PARTS:
            source, target = ROOT / part, folder / part
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy2(source, target)
        variables = {
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        self.environment = os.environ | variables
        program = "import pmaf; print(pmaf.__file__)"
        ended = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        if not Path(ended.stdout.strip()).is_relative_to(folder):
            raise RuntimeError(f"the tests would import {ended.stdout.strip()}, not the copy")

    def test(self, tests: list[str], patience: float | None, jobs: int = 0) -> int | None:
        """The exit code of pytest; None if it took too long. With jobs it shows its progress."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not long and not gallery"]
        show = jobs > 0
        options += ["-n", str(jobs), "--dist", "loadgroup"] if jobs > 1 else []
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.folder,
            env=self.environment,
            stdout=None if show else subprocess.DEVNULL,
            stderr=None if show else subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return run.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if run.poll() is None:  # with the processes that the tests have started
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()

    def judge(self, bug: Bug) -> Verdict:
        """Put the bug in, run its tests, and take it out again."""
        path = self.folder / "src" / "pmaf" / bug.file
        before = path.read_text(encoding="utf-8")
        started = time.monotonic()
        path.write_text(mutated(before, bug), encoding="utf-8")
        try:
            code = self.test(list(bug.paths), PATIENCE)
        finally:
            path.write_text(before, encoding="utf-8")
        if code is not None and code > FAILED:
            raise RuntimeError(f"{bug.name!r}: pytest ended with {code}, which is not a verdict")
        survived = code == PASSED
        outcome = ("argued" if bug.argued else "survived") if survived else "killed"
        return Verdict(bug, outcome, time.monotonic() - started)


def mutated(source: str, bug: Bug) -> str:
    """The source with the bug; an error if its text has changed or it is no program."""
    count = source.count(bug.old)
    if count != 1:
        raise ValueError(f"{bug.name!r}: {bug.old!r} is {count} times in {bug.file}, not once")
    changed = source.replace(bug.old, bug.new)
    ast.parse(changed, bug.file)
    return changed


def check_table(bugs: list[Bug]) -> None:
    """Every bug of the table can be put in, and no two have one name."""
    for bug in bugs:
        mutated((ROOT / "src" / "pmaf" / bug.file).read_text(encoding="utf-8"), bug)
    names = [bug.name for bug in bugs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"more than one bug is called {twice}")


def hunt(bugs: list[Bug], jobs: int, folder: Path, console: Console) -> list[Verdict]:
    """The verdicts on all bugs, of which each is printed as it comes."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    first = Copy(folder / "0")
    tests = sorted({path for bug in bugs for path in bug.paths})
    console.print(f"{len(tests)} tests without any bug")
    if first.test(tests, None, jobs) != PASSED:
        raise SystemExit("the tests fail without any bug; nothing can be said about bugs")
    copies.put(first)
    for number in range(1, jobs):
        copies.put(Copy(folder / str(number)))
    done = 0

    def judge(bug: Bug) -> Verdict:
        nonlocal done
        copy = copies.get()
        try:
            verdict = copy.judge(bug)
        finally:
            copies.put(copy)
        done += 1
        line = f"{done} of {len(bugs)}: {verdict.outcome}, {verdict.seconds:.0f} s: {bug.name}"
        style = "red" if verdict.outcome == "survived" else None
        console.print(line, style=style, markup=False, highlight=False)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(judge, bugs))


def conclude(verdicts: list[Verdict], console: Console) -> int:
    """Print what there is to say about the verdicts, and return the exit code."""
    for outcome in ("argued", "survived"):
        for verdict in verdicts:
            if verdict.outcome == outcome:
                line = f"{outcome}: {verdict.bug.name} ({verdict.bug.file})"
                console.print(
                    f"{line}: {verdict.bug.argued}" if verdict.bug.argued else line,
                    markup=False,
                    highlight=False,
                )
    needless = [v.bug.name for v in verdicts if v.outcome == "killed" and v.bug.argued]
    for name in needless:
        console.print(f"killed, and argued for in vain: {name}", markup=False, highlight=False)
    table = Table("file", "killed", "survived", "argued", title="Bugs and what became of them")
    outcomes = ("killed", "survived", "argued")
    for file in sorted({verdict.bug.file for verdict in verdicts}):
        found = [verdict.outcome for verdict in verdicts if verdict.bug.file == file]
        table.add_row(file, *(str(found.count(outcome)) for outcome in outcomes))
    found = [verdict.outcome for verdict in verdicts]
    table.add_section()
    table.add_row("all", *(str(found.count(outcome)) for outcome in outcomes))
    console.print(table)
    return int("survived" in found)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", default="", metavar="WORD", help="bugs with this in their name")
    parser.add_argument("--jobs", default=1, type=int, metavar="N", help="bugs at the same time")
    options = parser.parse_args(arguments)
    check_table(BUGS)
    bugs = [bug for bug in BUGS if options.only in bug.name]
    if not bugs:
        parser.error(f"no bug has {options.only!r} in its name")
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = hunt(bugs, options.jobs, Path(folder), console)
    return conclude(verdicts, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
