"""Sizes of rounding errors, and units in which nothing leaves the range of a dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pmaf import errors
from pmaf.runtime.modes import constant_in_traces

# The dtypes that are computed in float32.
HALF = (torch.float16, torch.bfloat16)
# The types of devices that have no float64. What is computed in float64 elsewhere is computed in
# float32 there, with the digits of that.
WITHOUT_DOUBLE = {"mps"}


def has_double(device: torch.device) -> bool:
    """Whether a device has numbers of float64."""
    return device.type not in WITHOUT_DOUBLE


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype with the most digits on a device, complex if the given one is."""
    return _MOST[device.type in WITHOUT_DOUBLE, dtype.is_complex]


def widened(x: Tensor) -> Tensor:
    """A tensor with the most digits that its device has."""
    return x.to(_MOST[x.device.type in WITHOUT_DOUBLE, x.is_complex()])


# By whether there is no float64, and whether numbers are complex.
_MOST = {
    (False, False): torch.float64,
    (False, True): torch.complex128,
    (True, False): torch.float32,
    (True, True): torch.complex64,
}


# Every comparison with a rounding error uses one of these multiples of eps.
REFINED = 1.0  # a residual that is refined if it is larger, relative to the sizes of its terms
ROUNDED = 4.0  # a product or a linear solve, relative to the sizes of its operands
DECOMPOSED = 6.0  # the residual of an eigenvector from LAPACK, relative to the largest modulus
NOISE = 8.0  # a coefficient of a vector in an eigenbasis, relative to the vector
EQUAL = 8.0  # two computed eigenvalues that count as one, relative to the largest
STILL, STILL_BLOCK = 8.0, 32.0  # change of the entries of one unit vector, or of several, in a step
SEARCHED = 16.0  # the residual of a search by products, whose images are sums of images
SETTLED = 64.0  # the residual where an iteration contracts no further
TIED = 64.0  # two moduli that count as one: those of complex pairs are sums of squares
LOPSIDED = 256.0  # ⟨Ax, y⟩ against ⟨x, Ay⟩ of a symmetric matrix, for one pair of vectors
LOOSE = 1e3  # a residual that counts as solved, or a difference of which some digits are known


# Under `torch.compile(dynamic=True)` a global float becomes an input of the graph, unless the
# function that reads it is marked.
@constant_in_traces
def merge_tolerance(dtype: torch.dtype) -> float:
    """Eigenvalues closer than this, relative to the largest, count as one."""
    return EQUAL * torch.finfo(dtype).eps


@constant_in_traces
def noise_tolerance(dtype: torch.dtype) -> float:
    """Coefficients below this, relative to their vector, are rounding."""
    return NOISE * torch.finfo(dtype).eps


def rank_tolerance(dtype: torch.dtype) -> float:
    """Singular values below this, relative to the largest, are rounding, and mean zero.

    The error of a computed singular value is a few roundings of `‖A‖`, whatever the number of
    rows or columns: the factor `max(m, n)` of `numpy.linalg.matrix_rank` is a bound for the
    worst case, and at 30,000 rows in float32 it would call 3.6e-3 of `‖A‖` zero.
    """
    return merge_tolerance(dtype)


def given_or(given: float | None, roundings: float, dtype: torch.dtype) -> float:
    """The tolerance that the user has given, or `roundings·eps`."""
    return roundings * torch.finfo(dtype).eps if given is None else given


def merged(rise: Tensor, top: Tensor, tolerance: float) -> Tensor:
    """`rise`, with zero for entries that are at most `tolerance·|top|`."""
    return torch.where(rise > tolerance * top.abs(), rise, torch.zeros_like(rise))


def square_range(dtype: torch.dtype) -> tuple[float, float]:
    """Between these, squares neither overflow nor lose digits that matter."""
    info = torch.finfo(dtype)
    return (info.tiny / info.eps) ** 0.5, (info.max * info.eps) ** 0.5


def power_of_two(x: Tensor) -> Tensor:
    """The power of two below each entry of `x`, one for zero: scaling by it is exact."""
    positive = torch.where(x > 0, x, torch.ones_like(x))
    # The logarithm of the largest number rounds up, to a power that is infinite.
    largest = math.floor(math.log2(torch.finfo(x.dtype).max * 0.75))
    return torch.exp2(positive.log2().floor().clamp_max(largest))


class OutOfRangeError(Exception):
    """Squares or sums of the entries of a finite matrix leave the range of the dtype.

    Attributes:
        unit: `(*,)`, powers of two; divided by them, the largest entry is between one and two.
    """

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = unit


def require_range(A: Tensor) -> None:
    """Squares of the entries stay in the range of the dtype; raises `OutOfRangeError` otherwise."""
    least, most = torch.linalg.vector_norm(A.detach(), dim=(-2, -1)).aminmax()
    low, high = square_range(A.dtype)
    if not (float(least) > low and float(most) < high):
        blame_range(A)


def blame_range(A: Tensor) -> None:
    """Raise an error that explains a non-finite result, if the entries of `A` cause it."""
    errors.require_finite(A=(A, 2))
    unit = power_of_two(A.detach().abs().amax((-2, -1)))
    if (unit != 1).any():
        raise OutOfRangeError(unit)


def times_power(x: Tensor, exponent: Tensor) -> Tensor:
    """`x · 2^exponent`, where the power itself may be out of range."""
    half = (0.5 * exponent).floor()
    return x * half.to(x.dtype).exp2() * (exponent - half).to(x.dtype).exp2()
