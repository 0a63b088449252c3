"""Implicit eigen decomposition as the paper evaluates it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.errors import require_extra
from pmaf.gradients import DDN, IFT, Gradient, Unroll
from pmaf.layers.eigenvectors import Eigenpairs
from pmaf.layers.ied import ied
from pmaf.solvers import Dense, PowerIteration, SimultaneousIteration, Solver

# A hundred iterations without a stopping test, no shift, and all n columns for SI.
PI = PowerIteration(iterations=100, stop=False, shift=0.0)
SI = SimultaneousIteration(iterations=100, stop=False, shift=0.0, full=True)


class Method(NamedTuple):
    """A solver and a gradient rule: one row of the computational tables."""

    solver: Solver
    gradient: Gradient

    def __call__(self, A: Tensor, symmetric: bool = True) -> Eigenpairs:
        """The principal eigenpair of `A`, `(*, n, n)`.

        "AutoDiff" is `eigh` even where `A` is not symmetric, as in the paper; here it
        sees the symmetric part.
        """
        symmetric = symmetric or isinstance(self.solver, Dense)
        return ied(A, symmetric=symmetric, solver=self.solver, gradient=self.gradient)


# "AutoDiff" is eigh, unrolled with its own derivative; "J" builds tensors by autodiff,
# "E" exploits their structure.
METHODS: dict[str, Method] = {
    "AutoDiff-unroll": Method(Dense(), Unroll()),
    "AutoDiff-DDN-E": Method(Dense(), DDN()),
    "PI-unroll": Method(PI, Unroll()),
    "PI-DDN-J": Method(PI, DDN(exploit=False)),
    "PI-IFT-J": Method(PI, IFT(exploit=False)),
    "PI-DDN-E": Method(PI, DDN()),
    "PI-IFT-E": Method(PI, IFT()),
    "SI-unroll": Method(SI, Unroll()),
    "SI-DDN-J": Method(SI, DDN(exploit=False)),
    "SI-IFT-J": Method(SI, IFT(exploit=False)),
    "SI-DDN-E": Method(SI, DDN()),
    "SI-IFT-E": Method(SI, IFT()),
}


def matrices(
    n: int,
    seed: int = 0,
    *,
    symmetric: bool = True,
    distribution: str = "gaussian",
    batch: int = 5,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The paper's random matrices, `(batch, n, n)`, entrywise nonnegative.

    Args:
        distribution: "gaussian", "uniform", "vonmises" or "choice".
    """
    require_extra("numpy", "paper")
    import numpy as np

    random = np.random.RandomState(seed)
    shape = (batch, n, n)
    draws = {
        "gaussian": lambda: random.randn(*shape),
        "uniform": lambda: random.uniform(size=shape),
        "vonmises": lambda: random.vonmises(0, 1, size=shape),
        "choice": lambda: random.choice(10, size=shape).astype(np.float64),
    }
    if distribution not in draws:
        raise ValueError(f"distribution must be one of {', '.join(draws)}; got {distribution!r}")
    A = torch.from_numpy(np.abs(draws[distribution]())).to(dtype)
    return A + A.mT if symmetric else A
