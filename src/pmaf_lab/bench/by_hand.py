"""What people write with `torch.linalg` today, for each layer and each of its options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pmaf_lab.bench.race import Result

# A sign from numbers that choose it: none of them changes a vector to zero.
Towards = Callable[[Tensor], Tensor]


# Eigenvectors.


def eigenpairs(
    A: Tensor, k: int | None = None, *, largest: bool = True, skip: int = 0, flip: bool = True
) -> Result:
    """One or k eigenpairs of `eigh`, the requested end first unless `flip` is False."""
    values, vectors = torch.linalg.eigh(A)
    return _sliced(values, vectors, k, largest, skip, flip)


def _sliced(
    values: Tensor, vectors: Tensor, k: int | None, largest: bool, skip: int, flip: bool
) -> Result:
    """From all eigenpairs, ascending."""
    if k is None:
        i = -1 - skip if largest else skip
        return values[..., i], vectors[..., i]
    if not largest:
        return values[..., skip : skip + k], vectors[..., skip : skip + k]
    n = values.shape[-1]
    values, vectors = values[..., n - skip - k : n - skip], vectors[..., n - skip - k : n - skip]
    return (values.flip(-1), vectors.flip(-1)) if flip else (values, vectors)


def towards(reference: Tensor | int | str) -> Towards:
    """A sign for each vector in the last dimension."""

    def by(y: Tensor) -> Tensor:
        if isinstance(reference, Tensor):
            along = (y * reference).sum(-1, keepdim=True)
        elif isinstance(reference, int):
            along = y[..., reference : reference + 1]
        else:
            along = y.gather(-1, y.detach().abs().argmax(-1, keepdim=True))
        return torch.where(along < 0, -y, y)

    return by


def signed(A: Tensor, reference: Tensor | int | str, k: int | None = None) -> Result:
    """`eigenpairs` with a sign."""
    values, vectors = eigenpairs(A, k)
    by = towards(reference)
    return values, by(vectors) if k is None else by(vectors.mT).mT


def general(A: Tensor) -> Result:
    """The eigenpair of largest real part of a matrix that is not symmetric."""
    values, vectors = torch.linalg.eig(A)
    top = values.real.argmax(-1, keepdim=True)
    y = vectors.take_along_dim(top.unsqueeze(-2), -1).squeeze(-1)
    y = (y * y.sum(-1, keepdim=True).conj()).real  # of any phase
    return values.real.take_along_dim(top, -1).squeeze(-1), y / y.norm(dim=-1, keepdim=True)


def pairs(A: Tensor, M: Tensor, k: int | None = None, *, skip: int = 0) -> Result:
    """By Cholesky's factor of `M`."""
    L = torch.linalg.cholesky(M)
    left = torch.linalg.solve_triangular(L, A, upper=False)
    C = torch.linalg.solve_triangular(L, left.mH, upper=False)
    values, vectors = eigenpairs(C, 1 if k is None else k, skip=skip)
    vectors = torch.linalg.solve_triangular(L.mH, vectors, upper=True)
    return (values[..., 0], vectors[..., 0]) if k is None else (values, vectors)


def diagonal_pairs(A: Tensor, d: Tensor, *, skip: int = 0) -> Result:
    """By the roots of the diagonal of `M`."""
    root = d.rsqrt()
    values, vectors = eigenpairs(root.unsqueeze(-1) * A * root.unsqueeze(-2), skip=skip)
    return values, root * vectors


def function_of(
    A: Tensor, function: Callable[[Tensor], Tensor], k: int | None = None
) -> tuple[Tensor]:
    """A function of the spectrum, of all eigenpairs or of the k top ones."""
    values, vectors = torch.linalg.eigh(A)
    if k is not None:
        values, vectors = values[..., -k:], vectors[..., -k:]
    return (vectors * function(values).unsqueeze(-2) @ vectors.mH,)


# Singular vectors.


def null_vectors(A: Tensor, k: int | None = None) -> tuple[Tensor]:
    """The last rows of `Vh`."""
    Vh = torch.linalg.svd(A).Vh
    return (Vh[..., -1, :].conj() if k is None else Vh[..., -k:, :].flip(-2).mH,)


def triplets(A: Tensor, k: int | None = None, *, largest: bool = True) -> Result:
    """Of the reduced decomposition."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    if k is None:
        i = 0 if largest else -1
        return U[..., i], S[..., i], Vh[..., i, :].conj()
    if largest:
        return U[..., :k], S[..., :k], Vh[..., :k, :].mH
    return U[..., -k:].flip(-1), S[..., -k:].flip(-1), Vh[..., -k:, :].flip(-2).mH


def pooled(X: Tensor) -> tuple[Tensor]:
    """The top eigenvector of the second moments, towards the mean."""
    y = torch.linalg.eigh(X.mT @ X).eigenvectors[..., -1]
    return (towards(X.detach().mean(-2))(y),)


# Least squares on the sphere.

# Newton's steps on the secular equation. They increase monotonically from a bound on the left; so
# many reach rounding for the families of the races.
STEPS = {torch.float32: 5, torch.float64: 8}
# Where the minimiser is shorter than this short of the radius, it lacks a part along the smallest
# eigenvector (the hard case).
_SHORT = 0.999


class _OnSphere(torch.autograd.Function):
    """`min ½‖Au − b‖²` over `‖u‖ = 1` by `eigh` of `AᴴA`, and the implicit function theorem."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, b: Tensor, ball: bool) -> Tensor:
        values, V = torch.linalg.eigh(A.mH @ A)
        g = (V.mH @ (A.mH @ b.unsqueeze(-1))).squeeze(-1)
        eps = values.shape[-1] * torch.finfo(values.dtype).eps
        top = values[..., -1:].abs()
        # Of what is zero but for rounding, the quotients below would be anything.
        there = (values > eps * top) & (g.abs() > eps / 2 * g.abs().amax(-1, keepdim=True))
        g = torch.where(there, g, 0)
        size = g.abs()
        floor = eps * top
        lower = floor - values[..., :1]
        mu = torch.maximum((size - values).amax(-1, keepdim=True), lower)
        for _ in range(STEPS[values.dtype]):
            d = values + mu
            squares = (size / d).square()
            n2 = squares.sum(-1, keepdim=True)
            n = n2.sqrt()
            mu = torch.maximum(mu + (n - 1) * n2 / (squares / d).sum(-1, keepdim=True), lower)
        d = values + mu
        y = g / d
        n2 = y.abs().square().sum(-1, keepdim=True)
        # What is missing goes along the smallest eigenvector, elsewhere rounding is removed.
        missing = (1 - n2).clamp_min(0).sqrt() * (n2 < _SHORT)
        y = torch.cat([y[..., :1] + missing, y[..., 1:]], -1)
        y = y / y.abs().square().sum(-1, keepdim=True).sqrt()
        if ball:
            free = g / values.clamp_min(floor)
            inside = free.abs().square().sum(-1, keepdim=True) <= 1
            y, d = torch.where(inside, free, y), torch.where(inside, values.clamp_min(floor), d)
        else:
            inside = None
        u = (V @ y.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(A, b, V, d, y, u)
        ctx.inside = inside
        return u

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None]:
        A, b, V, d, y, u = ctx.saved_tensors
        v = (V.mH @ outputs[0].unsqueeze(-1)).squeeze(-1)
        p, q = v / d, y / d
        share = (q.conj() * v).real.sum(-1, keepdim=True) / (q.conj() * y).real.sum(
            -1, keepdim=True
        )
        if ctx.inside is not None:
            share = torch.where(ctx.inside, 0, share)
        z = V @ (p - share * q).unsqueeze(-1)
        u = u.unsqueeze(-1)
        r, Az = A @ u - b.unsqueeze(-1), A @ z
        return -(r @ z.mH + Az @ u.mH), Az.squeeze(-1), None


def least_squares(
    A: Tensor,
    b: Tensor,
    *,
    radius: float | Tensor = 1.0,
    ball: bool = False,
    M: Tensor | None = None,
    diagonal: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor]:
    """On the unit sphere, to which the options are changes of variables.

    `diagonal` is that of a diagonal `M`.
    """
    L = root = None
    if weights is not None:
        half = weights.sqrt()
        A, b = half.unsqueeze(-1) * A, half * b
    if M is not None:
        L = torch.linalg.cholesky(M)
        A = torch.linalg.solve_triangular(L, A.mT, upper=False).mT
    if diagonal is not None:
        root = diagonal.rsqrt()
        A = A * root.unsqueeze(-2)
    unit = isinstance(radius, float) and radius == 1.0
    if not unit:
        radius = radius.unsqueeze(-1) if isinstance(radius, Tensor) else radius
        b = b / radius
    u: Any = _OnSphere.apply(A, b, ball)
    if not unit:
        u = radius * u
    if root is not None:
        u = root * u
    if L is not None:
        u = torch.linalg.solve_triangular(L.mT, u.unsqueeze(-1), upper=True).squeeze(-1)
    return (u,)


# Dtypes that torch.linalg does not have.


def in_float32(solve: Callable[..., Result]) -> Callable[..., Result]:
    """Of bfloat16: there and back."""

    @functools.wraps(solve)
    def wide(*inputs: Tensor) -> Result:
        return tuple(x.to(inputs[0].dtype) for x in solve(*(x.float() for x in inputs)))

    return wide
