"""Compiles the kernels of `pmaf.native` while the package is built, if there is a compiler.

Without a compiler, or with one that fails, the package is built without the kernels: everything
works, more slowly. The variables CXX and CXXFLAGS are those of other builds. An editable install
holds the instruction set of this machine alone, everything else holds all of them, unless PMAF_SETS
says otherwise: `own`, `all`, or names with commas, such as `baseline,avx2`.

    python hatch_build.py [file [options of the compiler]]
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # pyright: ignore[reportAssignmentType]

NATIVE = Path(__file__).parent / "src" / "pmaf" / "native"
LIBRARY = "libpmaf.so"
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"]
OPTIONS += ["-fno-trapping-math", "-Wall", "-Wextra", "-Wno-uninitialized"]
OPTIONS += ["-Wno-maybe-uninitialized"]  # GCC 12 warns of its own headers
# Each instruction set, and what a compiler needs to be told of it, from the least to the best.
SETS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS["avx2"] = ["-march=x86-64-v3"]
    SETS["avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
# Macros of a compiler that was told to compile for this machine, where the machine has the set.
SIGNS = {"avx2": {"__AVX2__", "__FMA__"}}
SIGNS["avx512"] = SIGNS["avx2"] | {f"__AVX512{part}__" for part in ("F", "DQ", "VL", "BW", "CD")}
# The files that are compiled once for each set, and options for each. Those that take longest come
# first, so that no core is left without work at the end. All but the last are written with vectors:
# a compiler that looks for more takes half as long again, and the kernels are not faster.
WRITTEN = ["-fno-tree-vectorize"]
UNITS = {
    "hermitian": WRITTEN,
    "less": WRITTEN,
    "eigenvectors_backward": WRITTEN,
    "eigenvectors": WRITTEN,
    "posed": [],
}


def compiler() -> list[str] | None:
    """The command of the C++ compiler; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def own_set(command: list[str]) -> str:
    """The best instruction set of this machine that the compiler knows."""
    call = [*command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        found = subprocess.run(call, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        found = []
    macros = set(found)
    return [name for name in SETS if SIGNS.get(name, set()) <= macros][-1]


def chosen_sets(command: list[str], default: str) -> list[str]:
    """The instruction sets that are to be compiled."""
    named = os.environ.get("PMAF_SETS") or default
    if named == "all":
        return list(SETS)
    names = [own_set(command)] if named == "own" else named.split(",")
    if unknown := [name for name in names if name not in SETS]:
        raise ValueError(
            f"PMAF_SETS={named}: {unknown[0]!r} is no instruction set of this kind of processor; "
            f"give own, all, or some of {', '.join(SETS)}, with commas"
        )
    return [name for name in SETS if name in names]


def build(target: Path, extra: list[str], default: str = "all") -> str:
    """Compile the library, whole or not at all, and return what became of it."""
    command = compiler()
    if command is None:
        return "there is no C++ compiler"
    sets = chosen_sets(command, default)
    sources = NATIVE / "kernels"
    command += [*OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        calls = [
            [*flags, *SETS[name], f"-DPMAF_SET={name}", str(sources / f"{unit}.cpp"), unit + name]
            for unit, flags in UNITS.items()
            for name in sets
        ]
        calls.append([f"-DPMAF_HOLDS_{name}" for name in sets])
        calls[-1] += [str(sources / "library.cpp"), "library"]
        calls = [[*command, "-c", *call, "-o", f"{folder}/{x}.o"] for *call, x in calls]
        with ThreadPoolExecutor(_cores()) as pool:
            ended = list(pool.map(_run, calls))
        # The linker takes the first of several copies of a function of the standard library, which
        # has to be one that every processor can run.
        order = ["library", *(unit + name for name in sets for unit in UNITS)]
        objects = [f"{folder}/{name}.o" for name in order]
        linked = Path(folder) / LIBRARY
        link = [*command, "-shared", *objects, "-o", str(linked), "-ldl", "-pthread"]
        ended.append(_run(link) if not any(ended) else "")
        wrong = next((text for text in ended if text), "")
        if wrong:
            return f"the compiler failed:\n{wrong}"
        os.replace(linked, target)
    return ""


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run(call: list[str]) -> str:
    """The output of a command that failed, or nothing."""
    try:
        ended = subprocess.run(call, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return "" if ended.returncode == 0 else ended.stderr or f"exit code {ended.returncode}"


class CustomBuildHook(BuildHookInterface):  # pyright: ignore[reportGeneralTypeIssues]
    """Adds the library to a wheel, or leaves it beside the sources of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        target = NATIVE / LIBRARY
        target.unlink(missing_ok=True)
        reason = "" if sys.platform != "win32" else "it has not been tried on Windows"
        default = "own" if version == "editable" else "all"
        reason = reason or build(target, [], default)
        if reason:
            self.app.display_warning(f"pmaf is built without compiled kernels: {reason}")
            return
        # The library knows neither Python nor torch: one wheel serves every version of both.
        tag = next(iter(_tags()))
        build_data.update(pure_python=False, tag=f"py3-none-{tag}")
        build_data["artifacts"].append(f"src/pmaf/native/{LIBRARY}")


def _tags() -> list[str]:
    from packaging.tags import platform_tags

    return list(platform_tags())


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else NATIVE / LIBRARY
    reason = build(target.absolute(), sys.argv[2:])
    sys.exit(reason or None)
