"""The suite with the oldest torch that the package declares, and with the newest there is.

    python -m tests.versions [arguments of pytest]

Each version gets an environment of its own in `build/versions`, kept for the next time. Making
one may download gigabytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from rich.console import Console

from tests.portable import Run, conclude, run_suite

ROOT = Path(__file__).parent.parent
# A version of torch asks for a version of sympy, which the constraints pin for another one.
FREE = ("torch", "sympy")


def oldest() -> str:
    """The lower bound on torch in `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [re.fullmatch(r"torch>=([\d.]+).*", line) for line in project["dependencies"]]
    return next(bound[1] for bound in bounds if bound)


def environment(folder: Path, requirement: str) -> str:
    """The interpreter of an environment with this torch, made or brought up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.split("==")[0] not in FREE]
    constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--upgrade"]
    subprocess.run(
        [*install, "--constraint", str(constraints), requirement, "--editable", ".[bench,test]"],
        cwd=ROOT,
        check=True,
    )
    return str(python)


def main(arguments: list[str]) -> int:
    console = Console()
    runs = []
    for name, requirement in (("oldest", f"torch=={oldest()}"), ("newest", "torch")):
        console.rule(f"{name}: {requirement}")
        try:
            python = environment(ROOT / "build" / "versions" / name, requirement)
        except subprocess.CalledProcessError:
            runs.append(Run(f"{name}, not installed", 0, 0, [], complete=False, seconds=0.0))
            continue
        version = [python, "-c", "import torch; print(torch.__version__)"]
        found = subprocess.run(version, capture_output=True, text=True, check=False).stdout.strip()
        runs.append(run_suite(f"{name}, torch {found}", python, {}, arguments, console))
    return conclude(runs, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
