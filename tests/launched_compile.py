"""Compile the kernels of `pmaf.launched` for a device that need not be there, and print a table.

    python -m tests.launched_compile [sm_80 sm_90 …]
    python -m tests.launched_compile calls

Nothing runs. Registers are those of a thread, spills the bytes that it moves to memory for lack of
registers, and shared memory is that of a program, in bytes. With `calls` the functions that launch
kernels pass their arguments to Triton, which compiles kernels for these.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pmaf.launched
from pmaf.launched import calls

SIZES = (2, 3, 8, 9, 16, 32)
_REAL = {"float32": "*fp32", "float64": "*fp64"}


class Compiled(NamedTuple):
    """What a device would need for a kernel."""

    registers: int
    spills: int
    shared: int


class Case(NamedTuple):
    """A kernel with the constants that it is compiled with for matrices of one order."""

    name: str
    dtype: str
    n: int
    kernel: Any
    constants: dict[str, Any]


def cases(n: int) -> Iterator[Case]:
    """All kernels for matrices with n columns, with all of their options."""
    modules = pmaf.launched.modules()
    common = {"N": n, "SWEEPS": calls.SWEEPS}
    for dtype in _REAL:
        double = {"SCALED": dtype == "float64"}
        ends = {"K": 1, "LARGEST": True, "KEEP": True, "LEAST": 1e-6}
        gradients = {"HAS_VECTORS": True, "HAS_VALUES": True, "MERGE": 1e-6, "NOISE": 1e-6}
        pairs = modules.eigenvectors
        yield Case(
            "eigenvectors_forward",
            dtype,
            n,
            pairs.eigenvectors_forward,
            {**common, **ends, **double},
        )
        constants = {"N": n, "K": 1, **gradients, **double}
        yield Case("eigenvectors_backward", dtype, n, pairs.eigenvectors_backward, constants)
        if dtype == "float64":
            continue
        rows = {"R": calls.ROWS, "HAS_WEIGHTS": True}
        nulls = modules.null_vectors
        yield Case(
            "null_vectors_forward", dtype, n, nulls.null_vectors_forward, {**common, **ends, **rows}
        )
        constants = {"N": n, "K": 1, **gradients, **rows, "NEEDS_A": True, "NEEDS_WEIGHTS": True}
        yield Case("null_vectors_backward", dtype, n, nulls.null_vectors_backward, constants)
        least = modules.least_squares
        constants = {**common, "R": calls.ROWS, "KEEP": True, "MERGE": 1e-6, "NOISE": 1e-6}
        constants["STEPS"] = calls.STEPS
        yield Case("least_squares_forward", dtype, n, least.least_squares_forward, constants)
        constants = {"N": n, "NEEDS_A": True, "NEEDS_B": True, "TINY": 1e-12}
        yield Case("least_squares_backward", dtype, n, least.least_squares_backward, constants)


def compiled(case: Case, arch: int, block: calls.Block) -> Compiled:
    """Compile one kernel for `sm_{arch}`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    constants = {**case.constants, "P": block.padded, "B": block.matrices}
    pointers = {"kept": "*fp64"}
    numbers = ("A", "b_", "u", "v", "values", "vectors", "weights", "multiplier", "dA", "db", "dw")
    for name in (*numbers, "d_vectors", "d_values"):
        pointers[name] = _REAL[case.dtype]
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32")
        for name in case.kernel.arg_names
    }
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants)
    options = {"num_warps": block.warps, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptxas = get_ptxas(arch).path
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(kernel.asm["ptx"])
        target = re.search(r"\.target (\w+)", kernel.asm["ptx"])[1]  # pyright: ignore
        command = [
            ptxas,
            "-v",
            "-fmad=false",
            f"-arch={target}",
            text,
            "-o",
            text.with_suffix(".o"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", said)[1])  # pyright: ignore
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return Compiled(registers, spills, kernel.metadata.shared)


def table(arch: int) -> Iterator[str]:
    """The lines of a table, one kernel and order each."""
    head = f"{f'sm_{arch}':22} {'dtype':8} {'n':>3} {'matrices':>8} {'warps':>5} "
    yield head + f"{'registers':>9} {'spills':>6} {'shared':>6}"
    for n in SIZES:
        for case in cases(n):
            block = calls.block_of(n)
            found = compiled(case, arch, block)
            yield (
                f"{case.name:22} {case.dtype:8} {n:3} {block.matrices:8} {block.warps:5} "
                f"{found.registers:9} {found.spills:6} {found.shared:6}"
            )


class Absent:
    """The driver of a device that is not there."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled_calls(n: int = 3) -> list[str]:
    """The kernels that Triton compiles for the arguments of all calls."""
    from triton.runtime import driver

    driver.set_active(Absent())
    names = []

    def launch(kernel, grid, *args, **constants):
        kernel.warmup(*args, grid=(grid,), **constants, enable_fp_fusion=False)
        names.append(kernel.__name__)

    pmaf.launched.launch = launch
    A, b, weights = torch.randn(4, 5, n), torch.randn(4, 5), torch.rand(4, 5)
    _, y, kept = calls.eigenvectors(torch.randn(2, 2, n, n), None, True, True)
    calls.eigenvectors_gradient(kept, A.dtype, None, y.unsqueeze(-1))
    calls.eigenvectors(torch.randn(1, n, n, dtype=torch.float64), 2, False, False)
    values, vectors, kept = calls.null_vectors(A, weights, 2, False, True)
    calls.null_vectors_gradient(kept, A, weights, values, vectors)
    u, _, kept = calls.least_squares(A, b, True)
    calls.least_squares_gradient(kept, A, b, u, (True, False))
    return names


if __name__ == "__main__":
    for name in sys.argv[1:] or ["sm_80"]:
        lines = compiled_calls() if name == "calls" else table(int(name.removeprefix("sm_")))
        for line in lines:
            print(line, flush=True)
