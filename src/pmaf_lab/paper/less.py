"""Least squares on the sphere as the paper evaluates it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pmaf.errors import require_extra
from pmaf.layers.least_squares import SphereLeastSquares
from pmaf.linalg.products import norm
from pmaf.metrics import mean_relative_error
from pmaf.solvers import Backtracking, ProjectedGradient, TangentDecay

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy as np

# The rows of the appendix table, under the paper's names. The published rules are the
# defaults of `ProjectedGradient`; where they differ from the paper's text, its docstring
# and those of the searches say so.
METHODS: dict[str, ProjectedGradient] = {
    "PGD": ProjectedGradient(tangent=False),
    "PGD+DW": ProjectedGradient(tangent=False, direction_weight=True),
    "PGD+RM": ProjectedGradient(),
    "PGD+RM+BLSOne": ProjectedGradient(step="unit", search=Backtracking()),
    "PGD+RM+BLSOne+DW": ProjectedGradient(
        step="unit", search=Backtracking(), direction_weight=True
    ),
    "PGD+RM+BLS": ProjectedGradient(search=Backtracking()),
    "PGD+RM+BLS+DW": ProjectedGradient(search=Backtracking(), direction_weight=True),
    "PGD+RM+TWD": ProjectedGradient(search=TangentDecay()),
    "PGD+RM+TWD+DW": ProjectedGradient(search=TangentDecay(), direction_weight=True),
}


def example() -> SphereLeastSquares:
    """The 2×2 problem of the paper's case study."""
    A = torch.tensor([[0.569525, -1.254572], [0.414020, 0.124439]])
    b = torch.tensor([-1.583332, -0.286124])
    return SphereLeastSquares(A, b)


def problems(m: int, n: int, seeds: Iterable[int] = range(1000)) -> SphereLeastSquares:
    """The paper's Gaussian problems of one size, one per seed, as one batch."""
    As, bs = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        As.append(torch.randn(m, n, generator=generator))
        bs.append(torch.randn(m, 1, generator=generator).squeeze(-1))
    return SphereLeastSquares(torch.stack(As), torch.stack(bs))


def is_inner(problem: SphereLeastSquares) -> Tensor:
    """Which problems have their unconstrained solution inside the sphere."""
    return norm(problem.unconstrained()) < problem.radius


def scipy_points(problem: SphereLeastSquares, workers: int = 1) -> Tensor:
    """What SciPy's SLSQP reaches from the same start, put on the sphere, in float64.

    Args:
        problem: One batch of problems.
        workers: Processes that share them.
    """
    require_extra("scipy", "paper")
    starts = ProjectedGradient().start(problem).u
    single = list(zip(*(x.double().numpy() for x in (problem.matrix, problem.b, starts))))
    points = _shared(single, workers) if workers > 1 else [_slsqp(*x) for x in single]
    return torch.stack([torch.from_numpy(x) for x in points])


def _shared(single: list[Any], workers: int) -> list[np.ndarray]:
    """The same by several processes, each with every `workers`-th problem."""
    # For NumPy's products: every worker would have as many threads as there are cores.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    context = get_context("spawn")
    running = []
    for k in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, single[k::workers]), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    points: list[Any] = [None] * len(single)
    for k, (process, ours) in enumerate(running):
        points[k::workers] = ours.recv()
        process.join()
    return points


def _work(connection: Connection, single: list[Any]) -> None:
    connection.send([_slsqp(*arrays) for arrays in single])


def _slsqp(A: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    import numpy as np
    from scipy.optimize import NonlinearConstraint, minimize

    def objective(x: np.ndarray) -> float:
        r = A @ x - b
        return float(0.5 * (r @ r))

    def differences(x: np.ndarray) -> np.ndarray:
        # The forward differences SLSQP takes when it is given no gradient, in one product
        # instead of n.
        step = (x + np.sqrt(np.finfo(float).eps)) - x
        r = A @ x - b
        moved = r[:, None] + A * step
        return 0.5 * (np.einsum("ij,ij->j", moved, moved) - r @ r) / step

    sphere = NonlinearConstraint(lambda x: float(x @ x), 1, 1)
    x = minimize(objective, start, method="SLSQP", jac=differences, constraints=sphere).x
    return x / np.linalg.norm(x)


@dataclass(frozen=True)
class Row:
    """One row of the appendix table."""

    failed_inner: int
    failed_outer: int
    improved: int
    mean_relative_error: float


def table_row(
    objective: Tensor, iterations: Tensor, inner: Tensor, reference: Tensor, limit: int = 100
) -> Row:
    """The paper's four figures for one method on a batch of problems.

    A run has failed when it took `limit` steps. It has improved on the reference when
    its objective is no larger, up to six significant digits of the reference.

    Args:
        objective: `(N,)`, what the method reached.
        iterations: `(N,)`.
        inner: `(N,)`, which problems have their unconstrained solution in the sphere.
        reference: `(N,)`, what SciPy reached.
    """
    objective, reference = objective.double(), reference.double()
    failed = iterations >= limit
    slack = 10.0 ** (torch.floor(reference.log10() + 1) - _DIGITS)
    return Row(
        failed_inner=int((failed & inner).sum()),
        failed_outer=int((failed & ~inner).sum()),
        improved=int(((objective < reference) | ((objective - reference).abs() < slack)).sum()),
        mean_relative_error=float(mean_relative_error(objective, reference)),
    )


_DIGITS = 6


def path(problem: SphereLeastSquares, method: ProjectedGradient) -> Tensor:
    """The iterates of one unbatched problem, before and after each projection, `(t, n)`."""
    state = method.start(problem)
    points = [state.u]
    inner = is_inner(problem) if method.direction_weight else None
    for _ in range(method.max_iterations):
        state, done = method.advance(problem, state, inner)
        points += [state.moved, state.u]
        if bool(done) or not math.isfinite(float(state.objective)):
            break
    return torch.stack(points)
