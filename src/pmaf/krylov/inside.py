"""The solution of LESS where `A⁺b` is inside of the sphere, in a Krylov space of two starts.

With `H = AᵀA + νI` factored and `‖H⁻¹g‖ < 1`, the solution has a part along the eigenvector `e` of
the smallest eigenvalue of `H`. Of `e` there may be little or nothing in `g` (the hard case), and
then `H⁻¹g, H⁻²g, …` never meet it. So the space grows from a direction without structure, too. In
it the secular equation is solved, with the eigenvalues of `H` that the space has found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmaf.krylov.inverse import Guess
from pmaf.linalg import sphere
from pmaf.linalg.decompositions import eigh
from pmaf.linalg.gram import Spectrum
from pmaf.linalg.products import (
    dot,
    matvec,
    norm,
    one_if_zero,
    rmatvec,
    solve_factored,
    symmetric_part,
)
from pmaf.linalg.roundings import working_dtype
from pmaf.linalg.secular import secular_root
from pmaf.linalg.symmetric_part import fixed_rows


def guess_inside(
    factor: Tensor, start: Tensor, noise: Tensor, init: Tensor | None, *, limit: int
) -> Guess:
    """Grow the space until the error of `u` is small, by at most `limit` vectors from each start.

    Args:
        factor: `(B, n, n)`, the Cholesky factor of `H`.
        start: `(B, n)`, `H⁻¹g`.
        noise: `(B,)`, the error of the part of `g` along `e`. In the hard case, up to this error,
            both signs of the part of `u` along `e` give a minimum.
        init: `(B, n)`, towards which that sign is chosen; a fixed reference unless given.
    """
    B, n = start.shape
    rows, images = start.new_empty(2, B, 2 * limit, n)
    first, second = fixed_rows[n, start.dtype, start.device]
    given = (norm(start) > 0).unsqueeze(-1)
    following = torch.stack([torch.where(given, start, first), second.expand(B, n)], 1)
    for k in range(1, limit + 1):
        new = slice(2 * k - 2, 2 * k)
        rows[:, new] = _orthonormal(following, rows[:, : 2 * k - 2])
        following = images[:, new] = solve_factored(factor, rows[:, new])
        if k < limit and k % _EVERY:
            continue
        V, W = rows[:, : 2 * k], images[:, : 2 * k]
        u, shift, error = _solve_inside(V, W, start, noise, init)
        if k == limit or bool((error <= _ROUGH).all()):
            steps = torch.full_like(shift, 2 * k, dtype=torch.int64)
            return Guess(u, shift, steps)
    raise AssertionError("limit is at least one")


# A check takes as long as a step. From an error of u below _ROUGH, Newton's method converges in a
# few steps with one factor.
_EVERY, _ROUGH = 6, 0.03


def _orthonormal(x: Tensor, rows: Tensor) -> Tensor:
    """Two rows `(B, 2, n)` made orthogonal to each other and to `rows`, of unit length."""
    for _ in range(2):  # the second time removes what rounding has left
        x = x - (x @ rows.mT) @ rows
        one, other = x.unbind(1)
        one = sphere.project(one)
        x = torch.stack([one, sphere.project(sphere.tangent(one, other))], 1)
    return x


def _solve_inside(
    V: Tensor, W: Tensor, start: Tensor, noise: Tensor, init: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The solution in the space of the rows `V`, whose images are `W = VH⁻¹`.

    Returns `u`, the multiplier minus the factored shift, and an estimate of the error of `u`.
    """
    dtype = working_dtype(V.dtype, V.device)
    values, vectors = eigh(symmetric_part((V @ W.mT).to(dtype)))
    # Those of H ascend where those of H⁻¹ descend.
    values = values.clamp_min(torch.finfo(V.dtype).eps * values[:, -1:]).flip(-1)
    basis = vectors.flip(-1).mT
    inside = matvec(basis, matvec(V, start).to(dtype))
    start, noise, heights = start.to(dtype), noise.to(dtype), values.reciprocal()
    lowest, second = heights[:, 0], heights[:, 1]

    def outside(rows: Tensor, y: Tensor) -> Tensor:
        return rmatvec(rows, y.to(rows.dtype)).to(dtype)

    e, image = (outside(rows, basis[:, 0]) for rows in (V, W))
    angle = norm(image - values[:, :1] * e) / (values[:, 0] - values[:, 1])
    # A product of e with H⁻¹g, which is in the space, has an error of second order in its angle.
    unsure = noise + angle.square() * lowest * norm(start)
    spectrum = Spectrum(basis, heights - heights[:, :1], lowest, True)
    toward = basis[:, 0] * _side(e, init).unsqueeze(-1)
    y, t, *_ = secular_root(spectrum, heights * inside, unsure, toward, torch.finfo(dtype).eps)
    u, shift = outside(V, y), t - lowest
    rest = u + shift.unsqueeze(-1) * outside(W, y) - start
    error = norm(rest) * second / one_if_zero(second - lowest + t)
    return sphere.project(u).to(V.dtype), shift.to(V.dtype), error


def _side(e: Tensor, init: Tensor | None) -> Tensor:
    """The sign of each unit vector `e`, `(B, n)`, towards `init` or a fixed reference, `(B,)`."""
    tolerance = torch.finfo(e.dtype).eps ** 0.5
    side = torch.zeros_like(e[:, 0])
    for reference in (*(() if init is None else (init.to(e.dtype),)), *sphere.references(e)):
        along = dot(e, reference.expand_as(e))
        usable = along.abs() > tolerance * norm(reference)
        side = torch.where((side == 0) & usable, along.sign(), side)
    return torch.where(side == 0, 1, side)
