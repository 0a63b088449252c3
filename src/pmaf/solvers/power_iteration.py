"""One eigenvector by repeated products with the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_at_least, require_finite_number, require_tolerance
from pmaf.linalg.decompositions import eigenvalues
from pmaf.linalg.loop import iterate
from pmaf.linalg.products import dot, matvec, norm
from pmaf.linalg.roundings import STILL, given_or
from pmaf.solvers.base import Course, Eigenvectors, Outcome, Solver
from pmaf.solvers.report import norm_of, orthonormal, outcome, stands, start_block


class _Vector(NamedTuple):
    u: Tensor  # (*, n)


@dataclass(frozen=True)
class Iteration(Solver):
    """The options of iterations that multiply by the matrix until nothing moves."""

    unrollable = True

    iterations: int = 1000
    tolerance: float | None = None
    stop: bool = True
    shift: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("iterations", self.iterations, 1)
        require_tolerance("tolerance", self.tolerance)
        if self.shift is not None:
            require_finite_number("shift", self.shift)

    def course(self, problem: Any) -> Course:
        return Course("products with A, until nothing moves")

    def advice(self) -> str:
        return "raise iterations, or use Auto(), which copes with small gaps"


@dataclass(frozen=True)
class PowerIteration(Iteration):
    """`u ← (A + shift·I)u`, normalised, until `u` no longer changes.

    Args:
        iterations: limit on the products.
        tolerance: stop when no entry of `u` moves by more; a few eps unless given.
        stop: False runs all iterations, as the paper's timings do.
        shift: added to every eigenvalue so that the algebraically largest is also the
            largest in modulus. Estimated from a short Krylov sequence unless given; zero
            for the paper's rows. Nonsymmetric matrices are never shifted by default.

    >>> import torch, pmaf
    >>> A = torch.diag(torch.tensor([3.0, 1.0, 2.0]))
    >>> pmaf.ied(A, solver=pmaf.solvers.PowerIteration(iterations=200)).values.round(decimals=3)
    tensor(3.)
    """

    solves = (Eigenvectors,)

    def solve(
        self, problem: Eigenvectors, *, init: Tensor | None = None, report: bool = True
    ) -> Outcome:
        if problem.width != 1:
            raise ValueError(
                f"PowerIteration() finds one eigenvector, not k={problem.width}; "
                "use SimultaneousIteration(), Lanczos() or Dense()"
            )
        M = problem.operand()
        size = norm_of(M.detach())
        start = start_block(problem, init, 1)
        shift = choose_shift(problem, M.detach(), self.shift)
        tolerance = given_or(self.tolerance, STILL, M.dtype)

        def product(u: Tensor) -> Tensor:
            # On the CPU a row times a matrix is several times faster than a matrix times a column.
            image = (u.unsqueeze(-2) @ (M if problem.symmetric else M.mT)).squeeze(-2)
            return image if self.shift == 0 else image + shift.unsqueeze(-1) * u

        def step(state: _Vector) -> tuple[_Vector, Tensor]:
            u = product(state.u)
            length = norm(u).unsqueeze(-1)
            u = torch.where(length > 0, u / _safe(length), state.u)
            # A negative eigenvalue flips the iterate in every step; this restores its sign.
            u = torch.where((dot(u, state.u) < 0).unsqueeze(-1), -u, u)
            still = (u - state.u).abs().amax(-1) <= tolerance
            return _Vector(u), still & self.stop

        def straight(state: _Vector) -> _Vector:
            # This iterate is not compared with the last one, so its sign does not matter.
            u = product(state.u)
            return _Vector(u / norm(u).unsqueeze(-1))

        u = start.squeeze(-1)
        active = torch.ones(problem.batch_shape, dtype=torch.bool, device=M.device)
        run = iterate(
            step,
            _Vector(u / norm(u).unsqueeze(-1)),
            active=active,
            max_iterations=self.iterations,
            straight=None if self.stop else straight,
        )
        u = run.state.u
        image = matvec(M, u)
        value = dot(u, image)
        residual = (norm(image - value.unsqueeze(-1) * u) / size).detach()
        return outcome(
            problem,
            value.unsqueeze(-1),
            u.unsqueeze(-1),
            residual=residual,
            iterations=run.iterations,
            converged=stands(run.finished, residual, tolerance),
            report=report,
        )


def choose_shift(problem: Eigenvectors, M: Tensor, shift: float | None) -> Tensor:
    """The given shift, or one that makes the algebraically largest eigenvalues dominant."""
    batch = problem.batch_shape
    if shift is not None or not problem.symmetric:
        return torch.full(batch, shift or 0.0, dtype=M.dtype, device=M.device)
    steps = min(_PROBE, problem.n)
    basis = orthonormal(start_block(problem, None, 1))
    for _ in range(steps - 1):
        following = M @ basis[..., -1:]
        for _ in range(2):
            following = following - basis @ (basis.mT @ following)
        size = torch.linalg.vector_norm(following, dim=-2, keepdim=True)
        basis = torch.cat([basis, following / _safe(size)], -1)
    values = eigenvalues(basis.mT @ (M @ basis))
    low, high = values[..., 0], values[..., -1]
    # One dominant vector needs λ_max + σ > |λ_min + σ|; several are safe with λ_min + σ > 0.
    least = -(low + high) / 2 if problem.width == 1 else -low
    return (least + _MARGIN * (high - low)).clamp_min(0)


# _PROBE Krylov steps estimate both ends of the spectrum with an error well below _MARGIN.
_PROBE = 12
_MARGIN = 0.1


def _safe(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.ones_like(x))
