"""The tests of the kernels, with a library that watches its memory and its arithmetic.

    python -m tests.sanitized [arguments of pytest]

The kernels are compiled with the address and the undefined-behaviour sanitizers into a copy of the
package; whatever these find ends the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]
TESTS = [
    *(f"tests/test_native{name}.py" for name in ("", "_basis", "_complex", "_pairs")),
    "tests/test_saved.py",
]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "hatch_build.py", "pyproject.toml"):
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / part)
        library = copy / "src" / "pmaf" / "native" / "libpmaf.so"
        library.unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, str(ROOT / "hatch_build.py"), str(library), *FLAGS], check=True
        )
        compiler = os.environ.get("CXX", "c++")
        found = [
            subprocess.run(
                [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        variables = {
            "PYTHONPATH": str(copy / "src"),
            "LD_PRELOAD": " ".join(found),  # a sanitizer has to be there before Python is
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python never frees all its memory
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        # Memory that the sanitizer holds back is no leak of ours.
        for name in ("test_calls", "test_a_million_calls"):
            command += ["--deselect", f"tests/test_native.py::{name}_do_not_gather_memory"]
        return subprocess.run(
            [*command, *(arguments or TESTS)], cwd=copy, env=os.environ | variables, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
