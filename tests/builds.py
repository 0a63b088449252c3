"""Copies of the package with other kernels than those that are installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pmaf import native

ROOT = Path(__file__).parent.parent
LIBRARY = Path("src", "pmaf", "native", "libpmaf.so")


def package_with(sets: str, folder: Path, *options: str) -> Path:
    """Copy the package, with kernels for `sets` alone, and return where it is imported from."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "tmp*")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    command = [sys.executable, str(ROOT / "hatch_build.py"), str(folder / LIBRARY), *options]
    subprocess.run(command, env=os.environ | {"PMAF_SETS": sets}, check=True)
    return folder / "src"


@functools.cache
def variables_of(setting: str) -> dict[str, str]:
    """The variables of a process with the kernels of an instruction set, or with none for `0`.

    An editable install has the set of the machine alone. Others are compiled, once for all tests
    of a process, with few optimisations, because that takes longer than the tests.
    """
    path = os.pathsep.join(sys.path)
    if setting != "0" and setting not in native.held:
        folder = tempfile.TemporaryDirectory()
        _FOLDERS.append(folder)
        path = os.pathsep.join([str(package_with(setting, Path(folder.name), "-O1")), path])
    return {"PMAF_NATIVE": setting, "PYTHONPATH": path}


_FOLDERS: list[tempfile.TemporaryDirectory] = []  # until the process ends
