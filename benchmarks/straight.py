"""Straight-line programs on the CPU: beside the layers without kernels, and compiled by inductor.

    PMAF_NATIVE=0 python benchmarks/straight.py            # ratios of times, medians of several
    PMAF_NATIVE=0 python benchmarks/straight.py --compile  # the kernels that inductor makes of one

The programs are for other devices; on those nothing was measured. A ratio below one says that the
program takes less time than the layer does without compiled kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pmaf
from pmaf.straight import eigenvectors, least_squares
from pmaf.straight.form import Form
from pmaf.straight.least_squares import Data, Kind, Method

ROUNDS = 15


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    """The median of the first over that of the second, which take turns."""
    one(), other()
    both = [(seconds(one), seconds(other)) for _ in range(ROUNDS)]
    first, second = (statistics.median(x) for x in zip(*both))
    return first / second


def of_least_squares(B: int, m: int, n: int) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """Both passes by a program, by the layer, and their arguments."""
    kind = Kind(torch.float64, Method.PROMOTED, False, False, 1.0)
    needs = (True, True, False, False, False)

    def straight(A: Tensor, b: Tensor, v: Tensor) -> Any:
        data = Data(A, b)
        found = least_squares.minimum(data, kind)
        grads = least_squares.gradients(data, kind, found.kept, v, needs)
        return found.u, grads[0], grads[1], found.evidence.numbers

    def layer(A: Tensor, b: Tensor, v: Tensor) -> Any:
        leaves = A.detach().requires_grad_(), b.detach().requires_grad_()
        return torch.autograd.grad(pmaf.less(*leaves), leaves, v)

    return straight, layer, (drawn(B, m, n), drawn(B, m, seed=1), drawn(B, n, seed=2))


def of_eigenvectors(B: int, n: int) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    form = Form(1, largest=True, signed=True)

    def straight(A: Tensor, v: Tensor) -> Any:
        found = eigenvectors.of_matrix(A, form)
        every = found.every_row, found.every_value
        (dA,) = eigenvectors.pull_matrix(found.rows, found.values, *every, v, None, form)
        return found.rows, dA, found.evidence.numbers

    def layer(A: Tensor, v: Tensor) -> Any:
        leaf = A.detach().requires_grad_()
        return torch.autograd.grad(pmaf.ied(leaf).vectors, leaf, v.squeeze(-2))

    A = drawn(B, n, n)
    return straight, layer, (A + A.mT, drawn(B, 1, n, seed=1))


CASES = {
    "less 64×8×5": lambda: of_least_squares(64, 8, 5),
    "less 1000×8×9": lambda: of_least_squares(1000, 8, 9),
    "less 256×64×32": lambda: of_least_squares(256, 64, 32),
    "less 64×128×64": lambda: of_least_squares(64, 128, 64),
    "ied 64×8×8": lambda: of_eigenvectors(64, 8),
    "ied 1000×9×9": lambda: of_eigenvectors(1000, 9),
    "ied 64×32×32": lambda: of_eigenvectors(64, 32),
}


def compiled(name: str, function: Callable[..., Any], given: Any) -> str:
    """How many kernels inductor makes of a program, and its time over that of eager mode."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    fused = torch.compile(function, fullgraph=True)
    fused(*given)
    count = metrics.generated_kernel_count
    operations = 0

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal operations
            operations += not func.is_view
            return func(*args, **(kwargs or {}))

    with Counted():
        function(*given)
    times = ratio(lambda: fused(*given), lambda: function(*given))
    return f"| {name} | {operations} | {count} | {times:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile the programs by inductor")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.compile:
        print("| both passes | operations of ATen | kernels of inductor | time over eager |")
        print("|---|---|---|---|")
        for name in ("less 256×64×32", "less 1000×8×9", "ied 64×32×32"):
            straight, _, tensors = CASES[name]()
            print(compiled(name, straight, tensors), flush=True)
        return
    print("| both passes | program over layer |\n|---|---|")
    for name, make in CASES.items():
        straight, layer, tensors = make()
        found = ratio(lambda: straight(*tensors), lambda: layer(*tensors))  # noqa: B023
        print(f"| {name} | {found:.2f} |", flush=True)


if __name__ == "__main__":
    main()
