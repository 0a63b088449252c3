"""Newton's method for least squares on the sphere with the factor of one bordered matrix.

The factor of `K = AᵀA + μI + σuuᵀ` serves the steps and the certificate: `AᵀA + μI` is positive
definite exactly if `K` is and `σuᵀK⁻¹u < 1`. The rank-one term changes nothing in directions
orthogonal to `u`, where the steps are taken, and keeps `K` regular where `AᵀA + μI` is nearly
singular along `u`.

Rounding of `AᵀA` must not decide about the certificate. Where a bound of it is not below the gap,
large matrices take a sharper proof, by products with `A` (`linalg/definite.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.krylov.inverse import LARGE, solve_row
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import cholesky_in_place
from pmaf.linalg.definite import is_definite
from pmaf.linalg.products import dot, matvec, norm, rmatvec, solve_factored
from pmaf.linalg.roundings import NOISE
from pmaf.runtime.log import took
from pmaf.solvers.secular import TOO_STEEP
from pmaf.tangent.factor import gram_product


class Point(NamedTuple):
    u: Tensor
    mu: Tensor


class Step(NamedTuple):
    """The point after a Newton step, and what is known about it."""

    u: Tensor
    mu: Tensor
    residual: Tensor  # before the step
    factor: Tensor
    near: Tensor  # whether another step may help
    done: Tensor  # whether `u` is the global minimum, so that no other step is needed


# A Newton step of length eps**CLOSE is the last, because its square is far below eps. With the
# factor of an earlier point each step is shorter than the one before by some factor only, and the
# last is one of length eps**_SMALL. At most _AGAIN such steps are taken.
CLOSE, _SMALL, _AGAIN = 0.6, 0.75, 6


def newton(
    A: Tensor, b: Tensor, g: Tensor, gram: Tensor, mean: Tensor, start: Point, rounding: float
) -> Step:
    """Newton steps on the optimality conditions with one factor, their residual taken from `A`.

    One step is taken, and several with large matrices, whose factor takes longer than many steps.
    """
    u, mu = start
    n, eps = A.shape[-1], torch.finfo(u.dtype).eps
    large = n >= LARGE
    # σ is about as large as the eigenvalues of AᵀA that matter. If it were larger, an error of u
    # would weigh more than they do.
    border = torch.where(mu < 0, -mu, mean) if large else mean
    factor, regular = bordered_factor(gram, border, u, mu)
    force, residual = force_at(A, b, g, mean, u)
    step, nu, along = _step(factor, u, mu, force)
    size = norm(step)
    # 1/(uᵀ(AᵀA + μI)⁻¹u) is at least the gap. If it is above `noise`, which bounds the effect of
    # rounding in AᵀA and Aᵀb, then AᵀA + μI is definite.
    curvature = (1 - border * along) / along
    noise = 2 * NOISE * eps * ((n * mean).sqrt() * norm(b) + n * mean)
    near = regular & (along > 0) & (size < 0.5)
    near = near if large else near & (curvature > 0)
    # If |ν| is at most `noise`, then AᵀA + (μ + ν)I is definite as well, up to rounding.
    sure = (curvature > noise) & (nu.abs() <= noise)
    small = size <= eps**CLOSE
    v, mu = sphere.project(u + step), mu + nu
    for _ in range(_AGAIN if large else 0):
        left = near & ~small
        if not left.any():
            break
        force, _ = force_at(A, b, g, mean, v)
        step, nu, _ = _step(factor, v, mu, force)
        shorter = norm(step) <= 0.5 * size
        taken = left & shorter
        v = torch.where(taken.unsqueeze(-1), sphere.project(v + step), v)
        mu, size = torch.where(taken, mu + nu, mu), torch.where(left, norm(step), size)
        # A step that is not shorter than the one before consists of rounding errors.
        small = small | (left & (size <= eps ** torch.where(shorter, _SMALL, CLOSE)))
        near = near & (~left | shorter | small)
        sure = sure & ~left
    doubtful = near & small & ~sure
    if large and doubtful.any():
        took("less: probes")
        definite, curvature, q = _is_definite(A, mu, border, u, factor)
        noise = gap_noise(b, mean, mu, rounding)
        sure = sure | (doubtful & definite & (curvature >= -noise))
        # A stationary point on the wrong side of the smallest eigenvector, to which q is parallel:
        # the minimum is about its mirror image.
        turned = doubtful & definite & (curvature < -noise)
        mirrored = v - 2 * dot(v, q).unsqueeze(-1) / dot(q, q).unsqueeze(-1) * q
        v = torch.where(turned.unsqueeze(-1), sphere.project(mirrored), v)
    return Step(v, mu, residual, factor, near, near & sure & small)


def _step(factor: Tensor, u: Tensor, mu: Tensor, force: Tensor) -> tuple[Tensor, ...]:
    """The step of `u`, which is tangent, that of `μ`, and `uᵀK⁻¹u`."""
    rest = force - mu.unsqueeze(-1) * u
    p, q = solve_factored(factor, torch.stack([rest, u], -2)).unbind(-2)
    along = dot(u, q)
    nu = dot(u, p) / along
    return p - nu.unsqueeze(-1) * q, nu, along


def _is_definite(
    A: Tensor, mu: Tensor, border: Tensor, u: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether `K = AᵀA + μI + σuuᵀ` is definite, `1/(uᵀK⁻¹u) − σ`, and about `K⁻¹u`.

    `factor` is that of a matrix near `K`; products with `A` decide. If `K` is definite and the
    second result is negative, it is at most the least eigenvalue of `AᵀA + μI`.
    """
    weighted, row = (border.unsqueeze(-1) * u).unsqueeze(-2), u.unsqueeze(-2)

    def product(rows: Tensor) -> Tensor:
        return gram_product(A, mu, rows) + (rows @ row.mT) @ weighted

    q = solve_row(factor, u)
    image, inner = matvec(A, q), dot(u, q)
    # uᵀK⁻¹u is at least 2uᵀq − qᵀKq for every q, and equal up to the square of its error.
    form = dot(image, image) + mu * dot(q, q) + border * inner.square()
    return is_definite(product, factor), 1 / (2 * inner - form) - border, q


def gap_noise(b: Tensor, mean: Tensor, mu: Tensor, rounding: float) -> Tensor:
    """The change of the gap near `μ = −λ_min` when `A` and `b` are rounded."""
    return NOISE * rounding * mu.abs().sqrt() * (mean.sqrt() + norm(b))


def force_at(A: Tensor, b: Tensor, g: Tensor, mean: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`Aᵀ(b − Au)`, and the norm of its tangent part relative to `‖A‖² + ‖Aᵀb‖`."""
    force = rmatvec(A, b - matvec(A, u))
    return force, norm(sphere.tangent(u, force)) / (A.shape[-1] * mean + norm(g))


def bordered_factor(gram: Tensor, border: Tensor, u: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of `K`, and whether it is accurate enough to be used."""
    K = torch.baddbmm(gram.mT, (border.unsqueeze(-1) * u).unsqueeze(-1), u.unsqueeze(-2)).mT
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(mu.unsqueeze(-1))
    top = diagonal.amax(-1)
    factor, info = cholesky_in_place(K)
    pivot = factor.diagonal(dim1=-2, dim2=-1).amin(-1)
    return factor, (info == 0) & (pivot.square() * TOO_STEEP >= top)
