"""Compiles the kernels of `pmaf.native` while the package is built, if there is a compiler.

Without a compiler, or with one that fails, the package is built without the kernels: everything
works, more slowly. The variables CXX and CXXFLAGS are those of other builds.
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
# Each instruction set, and what a compiler needs to be told of it.
SETS = {"baseline": []}
X86 = platform.machine().lower() in ("x86_64", "amd64")
if X86:
    SETS["avx2"] = ["-march=x86-64-v3"]
    SETS["avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]


def compiler() -> list[str] | None:
    """The command of the C++ compiler; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def build(target: Path, extra: list[str]) -> str:
    """Compile the library, whole or not at all, and return what became of it."""
    command = compiler()
    if command is None:
        return "there is no C++ compiler"
    sources = NATIVE / "kernels"
    command += [*OPTIONS, *shlex.split(os.environ.get("CXXFLAGS", "")), *extra]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in ("library", *SETS)]
        library = ["-DPMAF_X86"] if X86 else []
        calls = [[*library, "-c", str(sources / "library.cpp")]]
        calls += [
            [*flags, f"-DPMAF_SET={name}", "-c", str(sources / "kernels.cpp")]
            for name, flags in SETS.items()
        ]
        calls = [[*command, *call, "-o", str(x)] for call, x in zip(calls, objects)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ended = list(pool.map(_run, calls))
        linked = Path(folder) / LIBRARY
        link = [*command, "-shared", *map(str, objects), "-o", str(linked), "-ldl", "-pthread"]
        ended.append(_run(link) if not any(ended) else "")
        wrong = next((text for text in ended if text), "")
        if wrong:
            return f"the compiler failed:\n{wrong}"
        os.replace(linked, target)
    return ""


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
        reason = reason or build(target, [])
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
