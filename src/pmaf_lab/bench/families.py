"""The matrices the benchmarks run on: easy, hard, and as applications have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf_lab.paper.ied import matrices

Eigen = Callable[[int, int, torch.Generator], Tensor]
Squares = Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor]]


def _symmetric(A: Tensor) -> Tensor:
    """Without what rounding left of asymmetry."""
    return 0.5 * (A + A.mT)


def _gap(size: float) -> Eigen:
    """A top eigenvalue 1 and the others between `1 − size` and −1/2."""

    def build(batch: int, n: int, generator: torch.Generator) -> Tensor:
        Q = torch.linalg.qr(torch.randn(batch, n, n, generator=generator)).Q
        values = torch.cat([torch.ones(1), torch.linspace(1 - size, -0.5, n - 1)])
        return _symmetric((Q * values) @ Q.mT)

    return build


def _wishart(aspect: float) -> Eigen:
    """The covariance of `aspect · n` standard normal samples."""

    def build(batch: int, n: int, generator: torch.Generator) -> Tensor:
        X = torch.randn(batch, max(1, int(aspect * n)), n, generator=generator)
        return _symmetric(X.mT @ X / X.shape[-2])

    return build


def _goe(batch: int, n: int, generator: torch.Generator) -> Tensor:
    X = torch.randn(batch, n, n, generator=generator) / (2 * n) ** 0.5
    return X + X.mT


def _spiked(batch: int, n: int, generator: torch.Generator) -> Tensor:
    """Noise with one direction three times as long as the noise's edge."""
    x = torch.nn.functional.normalize(torch.randn(batch, n, 1, generator=generator), dim=-2)
    return _symmetric(_goe(batch, n, generator) + 6 * x @ x.mT)


def _laplacian(batch: int, n: int, generator: torch.Generator) -> Tensor:
    """Of random graphs with eight neighbours a node on average, if there are so many nodes."""
    W = (torch.rand(batch, n, n, generator=generator) < min(0.5, 8 / n)).float().triu(1)
    W = W + W.mT
    return torch.diag_embed(W.sum(-1)) - W


EIGEN: dict[str, Eigen] = {
    "paper": lambda batch, n, generator: matrices(n, batch=batch),
    "wishart": _wishart(4),
    "wishart-deficient": _wishart(0.25),
    "goe": _goe,
    "spiked": _spiked,
    "gap-0.3": _gap(0.3),
    "gap-1e-2": _gap(1e-2),
    "gap-1e-4": _gap(1e-4),
    "laplacian": _laplacian,
}


def _stochastic(batch: int, n: int, generator: torch.Generator) -> Tensor:
    """Random walks with restart on random graphs of eight links a node, by columns."""
    W = (torch.rand(batch, n, n, generator=generator) < min(0.5, 8 / n)).float()
    W = W + torch.roll(torch.eye(n), 1, 0)  # nobody is without a link
    return 0.85 * W / W.sum(-2, keepdim=True) + 0.15 / n


def _spiked_general(batch: int, n: int, generator: torch.Generator) -> Tensor:
    """Noise in a disk of radius one, and one eigenvalue near three."""
    x = torch.nn.functional.normalize(torch.randn(batch, n, 1, generator=generator), dim=-2)
    noise = torch.randn(batch, n, n, generator=generator) / n**0.5
    return noise + 3 * x @ (x + 0.1 * torch.randn(x.shape, generator=generator)).mT


# Not symmetric, with a real eigenvalue ahead of all others.
GENERAL: dict[str, Eigen] = {
    "paper": lambda batch, n, generator: matrices(n, batch=batch, symmetric=False),
    "stochastic": _stochastic,
    "spiked": _spiked_general,
}


def _scaled(length: float) -> Squares:
    """Standard normal A, and b such that ‖A⁺b‖ is about `length`."""

    def build(batch: int, m: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        A = torch.randn(batch, m, n, generator=generator)
        x = torch.nn.functional.normalize(torch.randn(batch, n, 1, generator=generator), dim=-2)
        noise = 0.1 * torch.randn(batch, m, generator=generator)
        return A, (length * (A @ x)).squeeze(-1) + noise

    return build


def _ill_conditioned(
    batch: int, m: int, n: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Singular values from 1 down to 1e-3."""
    A, b = _scaled(2.0)(batch, m, n, generator)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U * torch.logspace(0, -3, S.shape[-1]) @ Vh, b


def _hard(batch: int, m: int, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """b without a part along the smallest singular vector, and short: the hard case."""
    A, b = _scaled(0.3)(batch, m, n, generator)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    last = U[..., -1]
    return (U * S.unsqueeze(-2)) @ Vh, b - (b * last).sum(-1, keepdim=True) * last


SQUARES: dict[str, Squares] = {
    "inner": _scaled(0.3),
    "outer": _scaled(3.0),
    "ill-conditioned": _ill_conditioned,
    "hard": _hard,
}
