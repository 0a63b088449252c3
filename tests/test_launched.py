"""Kernels of one launch a pass, in Triton's interpreter on a CPU.

Triton is not among the packages that tests install, because torch for a CPU does not come with it:
`pip install --no-deps --constraint constraints.txt triton` adds it. These tests run in a process of
their own, for the variables that Triton reads when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

ENVIRONMENT = {"TRITON_INTERPRET": "1", "PMAF_LAUNCHED": "interpret"}


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is missing: pip install --no-deps --constraint constraints.txt triton",
)
def test_kernels_in_the_interpreter():
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/launched_cases.py"],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-20000:]
