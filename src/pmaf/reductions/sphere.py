"""Least squares on any sphere or ellipsoid, or in one, as least squares on the unit sphere.

On the sphere of radius ρ, `u = ρw` with `w` the solution for `A` and `b/ρ` on the unit sphere;
multiplier and gap are the same. An ellipsoid `uᵀMu = ρ²` is a sphere in other coordinates: with
`M = LLᵀ`, `u = ρL⁻ᵀw` for a unit vector `w`, which solves the problem of `AL⁻ᵀ` and `b/ρ`.

The coordinates are fixed: `L` is not differentiated, because a factor of an ill-conditioned `M` has
a derivative in which large numbers cancel. In fixed coordinates the constraint is `wᵀM′w = ρ′²`
with `M′ = L⁻¹ML⁻ᵀ` and `ρ′`, whose values are the identity and one, and which are differentiated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pmaf import errors
from pmaf.linalg.products import broadcast
from pmaf.linalg.roundings import power_of_two, square_range, times_power, working_dtype
from pmaf.operators import Operator
from pmaf.operators.coordinates import Coordinates, InCoordinates, in_dtype
from pmaf.reductions.base import Found, Reduction, Report, Tensors
from pmaf.runtime.modes import plain


@dataclass(frozen=True)
class Radius(Reduction):
    """A sphere of any radius becomes the unit sphere, and the numbers keep their units."""

    radius: float

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"sphere of radius {self.radius:g} -> unit sphere" if self.radius != 1 else ""

    def apply(self, given: Tensors) -> Tensors:
        A, b = given["A"], given["b"]
        if isinstance(A, Operator):
            b = b.expand(*broadcast(A.batch_shape, b.shape[:-1]), -1)
        return {**given, "b": b if self.radius == 1 else b / self.radius}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        value, *others = found
        # A user may write into this tensor, but not into that kept for the backward pass.
        return self.radius * value, *others

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        return vectors / self.radius


@dataclass(frozen=True)
class RadiusAndUnits(Radius):
    """The same, in units in which squares stay in the range of the dtype.

    Args:
        always: whether the entries of `A` are about one, and not only in range.
    """

    always: bool = False

    @property
    def words(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        units = "entries whose squares leave the range of the dtype -> other units"
        return f"{super().words}; {units}" if self.radius != 1 else units

    def apply(self, given: Tensors) -> Tensors:
        A, b, exponents = in_range(given["A"], given["b"], self.radius, self.always)
        return {**given, "A": A, "b": b, "exponents": exponents}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        value, multiplier = found
        value = value if self.radius == 1 else self.radius * value
        return value, _times(multiplier, posed["exponents"])

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        return report._replace(gap=_times(report.gap, posed["exponents"]))


@dataclass(frozen=True)
class Ellipsoid(Reduction):
    """A ball, an ellipsoid, weights and a radius that gets a gradient, in fixed coordinates.

    The tensors of the equivalent problem are `A`, `b`, the weights in units of a power of two, the
    metric `M′`, `(*, n, n)` or `(*, 1, n)` if it is diagonal, and `ρ′`; None for what there is not.
    """

    words = "radius, M and weights, as far as there are any -> unit sphere, in other coordinates"

    def apply(self, given: Tensors) -> Tensors:
        A, b, M, weights, radius = (given[x] for x in ("A", "b", "M", "weights", "radius"))
        # Products with an operator have the digits of what it is made of.
        given_dtype = torch.promote_types(A.dtype, torch.float32)
        dtype = given_dtype if isinstance(A, Operator) else working_dtype(A.dtype, A.device)
        b, weights = b.to(dtype), None if weights is None else weights.to(dtype)
        radius = radius.to(dtype) if isinstance(radius, Tensor) else radius
        M = None if M is None else in_dtype(M, dtype)
        exponents = size = coordinates = within = None
        if isinstance(A, Operator):
            # Tensors of the embedding of a complex operator are complex.
            kinds = (dtype.to_complex() if x.is_complex() else dtype for x in A.tensors)
            A = A.with_tensors([x.to(kind) for x, kind in zip(A.tensors, kinds)])
            if M is not None:
                coordinates = Coordinates.of(M)
                A = InCoordinates(A, coordinates)
            b = b / column(radius)
            lead = () if weights is None else weights.shape[:-1]
            b = b.expand(*broadcast(A.batch_shape, b.shape[:-1], torch.Size(lead)), -1)
        else:
            A = A.to(dtype)
            if M is not None:
                coordinates = Coordinates.of(M, fixed=True)
                within = coordinates.of_metric(M)
                A = coordinates.of_matrix(A)
            if isinstance(radius, Tensor):
                fixed = radius.detach()
                size, radius = 1 + (radius - fixed) / fixed, fixed
            A, b, exponents = in_range(A, b, radius, always=True)
        if weights is not None:
            power = power_of_two(weights.detach().amax(-1)).log2()
            weights = times_power(weights, -power.unsqueeze(-1))
            exponents = power if exponents is None else exponents + power
        posed = {"A": A, "b": b, "M": within, "weights": weights, "radius": size}
        changed = {"coordinates": coordinates, "length": radius, "exponents": exponents}
        return {**given, **posed, **changed}

    def back(self, found: Found, given: Tensors, posed: Tensors) -> Found:
        w, multiplier = found
        coordinates, dtype = posed["coordinates"], given["b"].dtype
        u = w if coordinates is None else coordinates.back(w)
        u = (column(posed["length"]) * u).to(dtype)
        return u, _times(multiplier, posed["exponents"]).to(dtype)

    def forth(self, vectors: Tensor, given: Tensors, posed: Tensors) -> Tensor:
        coordinates = posed["coordinates"]
        u = vectors.to(posed["b"].dtype)
        u = u if coordinates is None else coordinates.of_vector(u)
        return u / column(posed["length"])

    def report(self, report: Report, found: Found, given: Tensors, posed: Tensors) -> Report:
        dtype = given["b"].dtype
        gap = _times(report.gap, posed["exponents"])
        return report._replace(residual=report.residual.to(dtype), gap=gap.to(dtype))


def _times(x: Tensor, exponents: Tensor | None) -> Tensor:
    return x if exponents is None else times_power(x, exponents)


def column(radius: float | Tensor) -> float | Tensor:
    """The radius as a factor of vectors `(*, n)`."""
    return radius.unsqueeze(-1) if isinstance(radius, Tensor) else radius


def in_range(
    A: Tensor, b: Tensor, radius: float | Tensor, always: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`A` and `b/radius` divided by powers of two, and the exponents `(*,)` of multipliers.

    If everything is in range, `b` is only divided by the radius, and the exponents are None,
    unless `always` asks for entries of `A` of about one.
    """
    low, high = square_range(A.dtype)
    one = not isinstance(radius, Tensor) and radius == 1
    quotient = b if one else b / column(radius)
    sizes = torch.linalg.vector_norm(A.detach(), dim=(-2, -1))
    eager = plain(A) and plain(b)
    if eager:
        (least, most), (bottom, top) = sizes.aminmax(), quotient.detach().aminmax()
        if (
            not always
            and low < float(least)
            and float(most) < high
            and -high < float(bottom)
            and float(top) < high
        ):
            return A, quotient, None
        errors.require_finite(A=(A, 2), b=(b, 1))
    unit = _exponent(A.detach().abs().amax((-2, -1)))
    mantissa, power = _mantissa(radius)
    largest = b.detach().abs().amax(-1)
    # If ‖b‖ is far above ‖A‖, it does not affect the solution, and the multiplier is proportional
    # to it. So b is divided until its squares do not overflow; a b of zero has no size to divide.
    length = _exponent(largest) - power
    excess = (length - unit - _span(A.dtype)).clamp_min(0)
    excess = torch.where(largest > 0, excess, 0)
    if not always:
        # A problem that is in range stays as it is beside one that is not, and a trace cannot
        # branch on whether anything is. The units for A must come from A alone, since many
        # problems may share it.
        inside = (sizes > low) & (sizes < high)
        unit = torch.where(inside, 0, unit)
        excess = torch.where(inside & (quotient.detach().abs().amax(-1) < high), 0, excess)
    return (
        times_power(A, -unit[..., None, None]),
        times_power(b / column(mantissa), -(unit + excess + power).unsqueeze(-1)),
        2 * unit + excess,
    )


def _mantissa(radius: float | Tensor) -> tuple[float | Tensor, int | Tensor]:
    """The radius divided by a power of two, and its exponent."""
    if not isinstance(radius, Tensor):
        return math.frexp(radius)
    power = _exponent(radius.detach())
    return times_power(radius, -power), power


def _exponent(size: Tensor) -> Tensor:
    """The exponent of the power of two below each size; zero for zero."""
    return power_of_two(size).log2()


def _span(dtype: torch.dtype) -> float:
    """The largest `log₂(‖b‖/‖A‖)` at which `AᵀA` is not yet lost in rounding of the multiplier."""
    return -1.25 * math.log2(torch.finfo(dtype).eps)
