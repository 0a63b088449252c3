"""The suite as other processors and thread pools would run it.

    python -m tests.portable [arguments of pytest]

Each setting makes torch, MKL or NumPy's BLAS take other instructions or another order of
summation, so that everything rounds differently. What fails here asks for more digits than
the arithmetic has.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

SETTINGS = [
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "MKL_CBWR=COMPATIBLE OPENBLAS_CORETYPE=Prescott",
    "MKL_CBWR=AVX2",
    "OMP_NUM_THREADS=1",
    "OMP_NUM_THREADS=4",
]
SUITE = ["-m", "pytest", "-n", "2", "--dist", "loadgroup", "-m", "not long and not gallery"]


def without_effect(setting: str) -> str:
    """The reason why a setting changes nothing on this processor, or nothing if it does."""
    name, value = setting.split("=", 1)
    if name == "ATEN_CPU_CAPABILITY" and value.upper() == torch.backends.cpu.get_cpu_capability():
        return "torch takes these instructions without it"
    if setting == "OMP_NUM_THREADS=1":
        return "the tests take one thread without it"
    # MKL_CBWR reaches other processors as well.
    if name == "MKL_ENABLE_INSTRUCTIONS" and "GenuineIntel" not in _processor():
        return "processors that are not Intel's ignore it"
    return ""


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    return described.read_text(encoding="utf-8") if described.exists() else platform.processor()


class Run(NamedTuple):
    """One pass of the suite: what it was, how it ended, and the tests that failed."""

    name: str
    passed: int
    skipped: int
    failed: list[str]
    complete: bool
    seconds: float


def run_suite(
    name: str, python: str, environment: dict[str, str], arguments: list[str], console: Console
) -> Run:
    """Run the suite with these variables and with a cache of compiled code for itself.

    The cache does not tell instruction sets apart: what one setting compiled would give
    another wrong numbers.
    """
    console.rule(name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"), **environment}
        ended = subprocess.run(
            [python, *SUITE, "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
            env=os.environ | variables,
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Run(
        name=name,
        passed=len(cases) - len(bad) - skipped,
        skipped=skipped,
        failed=[f"{case.get('classname')}::{case.get('name')}" for case in bad],
        complete=ended.returncode in (0, 1) and bool(cases),
        seconds=time.monotonic() - started,
    )


def conclude(runs: list[Run], console: Console) -> int:
    """Print the table of all runs, and return the exit code."""
    table = Table("", "passed", "failed", "skipped", "minutes", title="The suite elsewhere")
    for run in runs:
        failed = str(len(run.failed)) + ("" if run.complete else ", ended early")
        minutes = f"{run.seconds / 60:.1f}"
        table.add_row(run.name, str(run.passed), failed, str(run.skipped), minutes)
    for run in runs:
        for test in run.failed:
            console.print(f"{run.name}: {test}", style="red", markup=False, highlight=False)
    console.print(table)
    return int(any(run.failed or not run.complete for run in runs))


def main(arguments: list[str]) -> int:
    console = Console()
    runs = []
    for number, setting in enumerate(SETTINGS, 1):
        if reason := without_effect(setting):
            console.print(f"{setting} is left out: {reason}, so that `make test` is this run")
            continue
        environment = dict(part.split("=", 1) for part in setting.split())
        run = run_suite(setting, sys.executable, environment, arguments, console)
        runs.append(run)
        console.print(f"{number} of {len(SETTINGS)} settings: {len(run.failed)} failed")
    return conclude(runs, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
