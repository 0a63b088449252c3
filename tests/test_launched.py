"""Kernels of one launch a pass, in Triton's interpreter on a CPU.

Triton is not among the packages that tests install, because torch for a CPU does not come with it:
`pip install --no-deps triton==3.9.0` adds it. These tests run in a process of
their own, for the variables that Triton reads when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is missing: pip install --no-deps triton==3.9.0",
)


def said(*command: str, **variables: str) -> str:
    """What a process of Python prints, which has to succeed."""
    others = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        env={**others, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr[-4000:]
    return ended.stdout


def test_kernels_in_the_interpreter():
    pytest_of_cases = ("pytest", "-p", "no:cacheprovider", "tests/launched_cases.py")
    passed = said(*pytest_of_cases, TRITON_INTERPRET="1", PMAF_LAUNCHED="interpret")
    assert "passed" in passed
    assert "skipped" not in passed


def test_kernels_compile_for_the_arguments_of_calls():
    """For a device that is not there; nothing runs."""
    assert len(said("tests.launched_compile", "calls").splitlines()) == 7


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_kernel_spills_registers(arch):
    head, *lines = said("tests.launched_compile", arch).splitlines()
    assert len(lines) == 48
    column = head.split().index("spills")
    assert all(line.split()[column] == "0" for line in lines), lines
