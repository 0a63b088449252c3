"""The eigenbasis of a layer's Hessian, and the tangent-space solve it makes cheap.

Both layers end at a point `y` on the sphere where a symmetric matrix `H`, positive
semidefinite at a global solution, describes the curvature. Forward refinement and
backward differentiation need the same thing of it: the solution `z` of

    P H P z = P v,   yᵀz = 0,   P = I − yyᵀ.

`H` itself may be singular (the hard case of LESS; always for an eigenvector) while
this system is not, so nothing here divides by the smallest eigenvalue of `H`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pmaf.linalg.eigh import eigh
from pmaf.linalg.products import dot, matvec, rmatvec


class Spectrum(NamedTuple):
    """Eigenvectors and eigenvalues of `AᵀA`, measured upwards from the smallest.

    Writing the eigenvalues as `floor + spread` keeps the digits of the small
    differences that decide nearly degenerate problems. When `A` is wide the basis
    spans its row space only, and the eigenvalue of all the rest is the floor, zero.
    """

    basis: Tensor  # (*, p, n) with p = min(m, n); one orthonormal eigenvector a row
    spread: Tensor  # (*, p), none negative; zero throughout the smallest eigenspace
    floor: Tensor  # (*,)
    exact: bool  # whether it comes from A itself, not from a rounded Gram matrix

    @property
    def complete(self) -> bool:
        """Whether the basis spans the whole space."""
        return self.basis.shape[-1] == self.basis.shape[-2]

    @property
    def top(self) -> Tensor:
        """The largest eigenvalue, `(*,)`."""
        return self.floor + self.spread.amax(-1)

    @property
    def trace(self) -> Tensor:
        """The sum of the eigenvalues, `‖A‖²` in the Frobenius norm, `(*,)`."""
        return self.spread.shape[-1] * self.floor + self.spread.sum(-1)


def merge_tolerance(dtype: torch.dtype) -> float:
    """Eigenvalues closer than this, relative to the largest, count as one."""
    return 8 * torch.finfo(dtype).eps


def rank_tolerance(dtype: torch.dtype) -> float:
    """Singular values below this, relative to the largest, are rounding, and mean zero.

    The error of a computed singular value is a few roundings of `‖A‖`, whatever the number of
    rows or columns: the factor `max(m, n)` of `numpy.linalg.matrix_rank` is a bound for the
    worst case, and at 30,000 rows in float32 it would call 3.6e-3 of `‖A‖` zero.
    """
    return merge_tolerance(dtype)


def small_gram(A: Tensor) -> Tensor:
    """The smaller of `AᵀA` and `AAᵀ`."""
    return A.mT @ A if A.shape[-2] >= A.shape[-1] else A @ A.mT


def lower_gram(A: Tensor) -> Tensor:
    """`AᵀA`, of which only the lower triangle counts: what `cholesky` and `eigh` read.

    A large one is made of four block rows, which leaves out three eighths of the work.
    """
    n = A.shape[-1]
    if n < _BLOCKED:
        return A.mT @ A
    gram = A.new_empty(*A.shape[:-2], n, n)
    size = -(-n // 4)
    for low in range(0, n, size):
        high = min(low + size, n)
        gram[..., low:high, :high] = A[..., low:high].mT @ A[..., :high]
    return gram


# Below this a product for each block row costs more than it saves.
_BLOCKED = 256


def gram_spectrum(A: Tensor, gram: Tensor | None = None) -> Spectrum:
    """From the smaller of `AᵀA` and `AAᵀ`: fast, exact to rounding in that matrix."""
    m, n = A.shape[-2:]
    squares, vectors = torch.linalg.eigh(small_gram(A) if gram is None else gram)
    tolerance = merge_tolerance(A.dtype)
    if m >= n:
        floor = squares[..., 0].clamp_min(0)
        spread = squares - squares[..., :1]
        return Spectrum(vectors.mT, merged(spread, squares[..., -1:], tolerance), floor, False)
    spread = merged(squares, squares[..., -1:], tolerance)
    lengths = torch.where(spread > 0, spread, torch.ones_like(spread)).sqrt()
    # Null directions of AAᵀ have no partner in the row space: theirs are zero vectors,
    # which leaves them to the complement.
    basis = (vectors * ((spread > 0) / lengths).unsqueeze(-2)).mT @ A
    return Spectrum(basis, spread, squares.new_zeros(squares.shape[:-1]), False)


def singular_spectrum(A: Tensor) -> tuple[Spectrum, Tensor, Tensor]:
    """From the singular values of `A` itself: slower, and loses nothing to `AᵀA`.

    Returns the left singular vectors `(*, m, p)` and the singular values `(*, p)`, in
    the order of the spectrum, as well.
    """
    m, n = A.shape[-2:]
    left, s, basis = torch.linalg.svd(A, full_matrices=False)
    left, s, basis = left.flip(-1), s.flip(-1), basis.flip(-2)
    top = s[..., -1:]
    s = torch.where(s > rank_tolerance(A.dtype) * top, s, torch.zeros_like(s))
    if m >= n:
        low = s[..., :1]
        rise = merged(s - low, top, merge_tolerance(A.dtype))
        return Spectrum(basis, rise * (s + low), s[..., 0].square(), True), left, s
    basis = basis * (s > 0).unsqueeze(-1)
    return Spectrum(basis, s.square(), s.new_zeros(s.shape[:-1]), True), left, s


def promoted(dtype: torch.dtype, p: int, device: torch.device) -> bool:
    """Whether `AᵀA` or `AAᵀ` of order `p` is better formed and decomposed in float64.

    Squaring costs no digits then, so nothing needs to be refined or done again: for small
    matrices that is worth more than the shorter words.
    """
    return dtype == torch.float32 and p <= 32 and device.type != "mps"


def promoted_spectrum(A: Tensor, b: Tensor, gram: Tensor) -> tuple[Spectrum, Tensor]:
    """What `singular_spectrum` gives for a float32 matrix, from its copy in float64.

    Returns the coefficients of `Aᵀb` in the basis as well.
    """
    m, n = A.shape[-2:]
    squares, vectors = eigh(gram)
    s = squares.clamp_min(0).sqrt()
    top = s[..., -1:]
    present = s > rank_tolerance(torch.float32) * top
    if m >= n:
        spread = squares - squares[..., :1]
        apart = spread > merge_tolerance(torch.float32) * top * (s + s[..., :1])
        floor = (squares * present)[..., 0]
        spectrum = Spectrum(vectors.mT, spread * apart, floor, True)
        # Aᵀb has no part along a singular vector whose singular value is zero.
        return spectrum, rmatvec(vectors, rmatvec(A, b)) * present
    left = vectors * s.reciprocal().masked_fill(~present, 0).unsqueeze(-2)
    floor = squares.new_zeros(squares.shape[:-1])
    spectrum = Spectrum(left.mT @ A, squares * present, floor, True)
    return spectrum, rmatvec(vectors, b) * (s * present)


def amplification(spectrum: Spectrum, gap: Tensor, y: Tensor) -> Tensor:
    """About how much `tangent_solve` magnifies its right-hand side, times the top of `AᵀA`.

    Multiplied by eps, this is the relative error of a solve in the basis of a rounded
    Gram matrix.
    """
    basis, spread = spectrum.basis, spectrum.spread
    low = gap.unsqueeze(-1)
    lowest = (spread == 0).expand(*gap.shape, -1)
    inverse = torch.where(lowest, 0, 1 / torch.where(lowest, 1, spread + low))
    y_in = matvec(basis, y)
    s_yy = dot(inverse * y_in, y_in)
    q = dot(y, y) - dot(y_in * ~lowest, y_in)
    determinant = q + gap * s_yy
    coupled = torch.where(determinant > 0, s_yy / torch.where(determinant > 0, determinant, 1), 0)
    # Eigenvalues that rounding has made one: whatever tells them apart is at most the gap.
    repeated = lowest.sum(-1) > (1 if spectrum.complete else 0)
    across = torch.where(repeated, 1 / gap.clamp_min(torch.finfo(y.dtype).tiny), 0)
    return spectrum.top * torch.stack([coupled, inverse.amax(-1), across]).amax(0)


class TangentSolver:
    """Solves `P H P z = P v`, `yᵀz = 0` where `H` has eigenvalues `spread + gap` in `basis`.

    Directions that the basis does not span have eigenvalue `gap`. Where the system is
    singular (a non-unique solution) `z` is zero along the directions it leaves free.

    In the eigenbasis, with `ν` the multiplier of `yᵀz = 0`, every row reads
    `hᵢzᵢ + νyᵢ = vᵢ`. The rows of the smallest eigenvalue `h₀ = gap` are eliminated by
    hand, multiplied through by `h₀`, so that `h₀ = 0` and `y₀ = 0` are both harmless:

        ν = (y₀v₀ + h₀ Σ yᵢvᵢ/hᵢ) / d,   z₀ = (v₀ Σ yᵢ²/hᵢ − y₀ Σ yᵢvᵢ/hᵢ) / d,
        d = y₀² + h₀ Σ yᵢ²/hᵢ,   the sums over all other rows.
    """

    def __init__(self, basis: Tensor, spread: Tensor, gap: Tensor, y: Tensor) -> None:
        # Far below rounding: a spectrum from A itself resolves what its square does not.
        tiny = merge_tolerance(y.dtype) ** 2
        p, n = basis.shape[-2:]
        low = gap.unsqueeze(-1)
        h = spread + low
        size = h.abs()
        scale = size.amax(-1, keepdim=True)
        threshold = tiny * scale
        lowest = (spread == 0) | (size <= threshold)
        self.basis, self.y, self.low, self.lowest = basis, y, low, lowest
        self.complete = p == n
        self.inverse = h.reciprocal().masked_fill(lowest, 0)

        self.y_in = matvec(basis, y)
        self.y_low = self.y_in * lowest
        self.y_rest = y if self.complete else y - rmatvec(basis, self.y_in)
        q = dot(self.y_low, self.y_low)
        if not self.complete:
            q = q + dot(self.y_rest, self.y_rest)
        self.weighted = self.inverse * self.y_in
        q, s_yy = q.unsqueeze(-1), dot(self.weighted, self.y_in).unsqueeze(-1)

        determinant = torch.addcmul(q, low, s_yy)
        singular = determinant.abs() <= tiny * torch.addcmul(q, scale, s_yy)
        # Where d vanishes the solution is not unique: couple the other rows alone.
        self.over_d = determinant.reciprocal().masked_fill(singular, 0)
        self.fallback = s_yy.reciprocal().masked_fill(~(singular & (s_yy > 0)), 0)
        self.s_yy = s_yy
        # Within the lowest eigenspace v has a part along y, coupled to the other rows, and
        # a part across it. With one dimension there is nothing across, whatever rounding says.
        self.several = None if n - p > 1 else n - (~lowest).sum(-1, keepdim=True) > 1
        self.over_q = q.reciprocal().masked_fill(q == 0, 0)
        self.over_low = low.reciprocal().masked_fill(low.abs() <= threshold, 0)

    def __call__(self, v: Tensor) -> Tensor:
        v_in = matvec(self.basis, v)
        v_low = v_in * self.lowest
        v_rest = v if self.complete else v - rmatvec(self.basis, v_in)
        p = dot(self.y_low, v_low)
        if not self.complete:
            p = p + dot(self.y_rest, v_rest)
        p, s_vy = p.unsqueeze(-1), dot(self.weighted, v_in).unsqueeze(-1)
        nu = torch.addcmul(p, self.low, s_vy) * self.over_d + s_vy * self.fallback
        share = p * self.over_q

        def solve_lowest(y_low: Tensor, v_low: Tensor) -> Tensor:
            along = share * y_low
            if self.several is not None:
                along = torch.where(self.several, along, v_low)
            coupled = (self.s_yy * along - s_vy * y_low) * self.over_d
            return torch.addcmul(coupled, self.over_low, v_low - along)

        z_in = torch.addcmul(solve_lowest(self.y_low, v_low), self.inverse, v_in - nu * self.y_in)
        z = rmatvec(self.basis, z_in)
        if not self.complete:
            z = z + solve_lowest(self.y_rest, v_rest)
        return z - self.y * dot(self.y, z).unsqueeze(-1)


def merged(rise: Tensor, top: Tensor, tolerance: float) -> Tensor:
    """Zero whatever rises above the smallest by no more than rounding."""
    return torch.where(rise > tolerance * top.abs(), rise, torch.zeros_like(rise))
