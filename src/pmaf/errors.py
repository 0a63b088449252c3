"""Exceptions, warnings and the checks of arguments."""

from __future__ import annotations

import importlib.util
import math
import numbers
from typing import Protocol

import torch
from torch import Tensor


class ConvergenceWarning(UserWarning):
    """A solve stopped before it met its own stopping rule.

    >>> import warnings, torch, pmaf
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     one_step = pmaf.solvers.ProjectedGradient(max_iterations=1)
    ...     u = pmaf.less(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.eye(2)[0], solver=one_step)
    >>> caught[0].category.__name__
    'ConvergenceWarning'
    """


class ConvergenceError(RuntimeError):
    """A solve with `throw=True` stopped before it met its own stopping rule.

    >>> import torch, pmaf
    >>> problem = pmaf.SphereLeastSquares(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.eye(2)[0])
    >>> try:
    ...     pmaf.solve(problem, solver=pmaf.solvers.ProjectedGradient(max_iterations=1), throw=True)
    ... except pmaf.ConvergenceError as error:
    ...     print(str(error).partition(" (")[0])
    1 of 1 solves did not converge in 1 iterations
    """


class NonFiniteError(ValueError, torch.linalg.LinAlgError):  # pyright: ignore
    """An input has entries that are infinite or nan.

    It is a `ValueError`, and, for programs that catch what decompositions of torch raise, also a
    `torch.linalg.LinAlgError` and a `RuntimeError`. `pmaf.solve(problem, nonfinite="report")`
    solves the other entries of the batch.

    >>> import torch, pmaf
    >>> try:
    ...     pmaf.ied(torch.full((2, 2), torch.nan))
    ... except torch.linalg.LinAlgError as error:
    ...     print(type(error).__name__)
    NonFiniteError
    """


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# With the dtypes of their parts. torch.compile cannot trace `dtype.to_real`.
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Typed(Protocol):
    """What a tensor and an operator have in common."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def shape_of(x: Typed) -> str:
    return str(tuple(x.shape))


def require_matrix(
    name: str, x: object, letters: str = "m, n", *, or_complex: bool = False
) -> None:
    """`x` is a floating-point tensor of shape `(*, m, n)` that is not empty."""
    tensor = _require_floating(name, x, or_complex)
    if tensor.dim() < 2:
        raise ValueError(
            f"{name} must have shape (*, {letters}); got {shape_of(tensor)}, which has "
            f"{tensor.dim()} dimension{'s' * (tensor.dim() != 1)}"
        )
    if 0 in tensor.shape[-2:]:
        raise ValueError(
            f"{name} must have at least one row and one column; got {shape_of(tensor)}"
        )


def require_vector(name: str, x: object, letter: str, *, or_complex: bool = False) -> None:
    """`x` is a floating-point tensor of shape `(*, letter)`."""
    tensor = _require_floating(name, x, or_complex)
    if tensor.dim() < 1:
        raise ValueError(f"{name} must have shape (*, {letter}); got a scalar")


def require_no_diagonal(name: str, x: object, n: int) -> None:
    """`x` is not a diagonal of n numbers, or a batch of them, in place of the matrix."""
    if not isinstance(x, Tensor) or tuple(x.shape[-2:]) == (n, n):
        return
    given = tuple(x.shape)
    column = len(given) > 1 and given[-2:] == (n, 1)
    if column or (given and given[-1] == n):
        raise ValueError(
            f"{name} must have shape (*, {n}, {n}); got {shape_of(x)}; if these are the entries of "
            f"diagonal matrices, pass pmaf.operators.Diagonal({name}{'.squeeze(-1)' * column})"
        )


def require_alike(name: str, x: Typed, other_name: str, other: Typed, real: bool = False) -> None:
    """`x` and `other` have one device, and one dtype, or with `real` that of real parts."""
    if real and x.dtype == _COMPLEX.get(other.dtype):
        pass
    elif x.dtype != other.dtype or (real and x.dtype.is_complex):
        remedy = "convert one of them with .to()"
        if real and x.dtype.is_complex:
            remedy = f"{name} has to be real: pass {name}.real"
        elif x.dtype.is_complex != other.dtype.is_complex:
            which, wanted = (other_name, x.dtype) if x.dtype.is_complex else (name, other.dtype)
            remedy = f"make both complex: convert {which} with .to({wanted})"
        raise TypeError(f"{name} is {x.dtype} but {other_name} is {other.dtype}; {remedy}")
    if x.device != other.device:
        raise ValueError(
            f"{name} is on {x.device} but {other_name} is on {other.device}; "
            "move one of them with .to()"
        )


def require_broadcast(name: str, shape: torch.Size, other_name: str, other: torch.Size) -> None:
    """Two batch shapes broadcast with each other."""
    for size, other_size in zip(reversed(shape), reversed(other)):
        if size != other_size and size != 1 and other_size != 1:
            raise ValueError(
                f"the batch dimensions {tuple(shape)} of {name} and {tuple(other)} of "
                f"{other_name} do not broadcast"
            )


def require_fits(name: str, shape: torch.Size, batch: torch.Size) -> None:
    """A batch shape broadcasts to another without enlarging it."""
    padded = (1,) * (len(batch) - len(shape)) + tuple(shape)
    if len(padded) != len(batch) or any(x not in (1, y) for x, y in zip(padded, batch)):
        raise ValueError(
            f"the batch dimensions {tuple(shape)} of {name} do not fit the batch "
            f"{tuple(batch)} of the problem"
        )


def require_positive(name: str, x: object) -> float:
    """`x` as a float, which is finite and above zero; NumPy's numbers count as numbers."""
    number = require_number(name, x)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {x}")
    return number


def require_not_negative(name: str, x: object, *, infinite: bool = False) -> float:
    """`x` as a float, which is zero or above, and finite unless infinity has a meaning."""
    number = require_number(name, x)
    if not 0 <= number < math.inf and not (infinite and number == math.inf):
        bound = "" if infinite else " and finite"
        raise ValueError(f"{name} must be zero or positive{bound}; got {x}")
    return number


def require_tolerance(name: str, x: object) -> None:
    """`x` is None, for the default, or a finite number of at least zero."""
    if x is not None:
        require_not_negative(name, x)


def require_finite_number(name: str, x: object) -> float:
    """`x` as a float, which is finite."""
    number = require_number(name, x)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite; got {x}")
    return number


def require_number(name: str, x: object) -> float:
    """`x` as a float."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be a number; got {type(x).__name__}")
    return float(x)


def require_at_least(name: str, x: object, least: int) -> None:
    """`x` is an integer of at least `least`."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or int(x) < least:
        raise ValueError(f"{name} must be an integer of at least {least}; got {x!r}")


def require_count(name: str, x: object) -> None:
    """`x` is None, for one, or an integer; its bounds follow from the matrix."""
    if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
        hint = ", pass the matrix to the layer that this makes" if isinstance(x, Tensor) else ""
        got = f"a tensor of shape {shape_of(x)}{hint}" if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{name} must be None or an integer; got {got}")


def require_finite(**tensors: tuple[Tensor, int]) -> None:
    """Name every argument with non-finite entries, and how many batch entries they are in.

    Each argument comes with the number of dimensions of one batch entry. This looks at
    every number, so call it only once something downstream has come out non-finite.
    """
    problems = []
    for name, (x, dims) in tensors.items():
        bad = ~torch.isfinite(x)
        if bad.any():
            per_entry = bad.flatten(-dims).any(-1) if dims else bad
            where = (
                f"{int(per_entry.sum())} of {per_entry.numel()} batch entries"
                if per_entry.dim()
                else f"{int(bad.sum())} of {x.numel()} numbers"
            )
            problems.append(f"{name} has non-finite values in {where}")
    if problems:
        raise NonFiniteError(
            "; ".join(problems) + "; clean the input, e.g. with torch.nan_to_num, or leave these "
            'entries out with pmaf.solve(problem, nonfinite="report")'
        )


def require_row_weights(weights: Tensor, name: str, x: Typed) -> None:
    """`weights` has one real number for each row of `x`, `(*, m, n)`, in its dtype."""
    require_vector("weights", weights, "m")
    require_alike("weights", weights, name, x, real=True)
    if weights.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"{name} of shape {shape_of(x)} needs weights of shape (*, {x.shape[-2]}), one for "
            f"each row; got {shape_of(weights)}"
        )


def require_sign_rule(name: str, x: object, n: int) -> None:
    """`x` is the index of one of n components, or "largest"."""
    if isinstance(x, bool) or (isinstance(x, str) and x != "largest"):
        raise ValueError(
            f'{name} must be a tensor, the index of a component, or "largest"; got {x!r}'
        )
    if isinstance(x, int) and not -n <= x < n:
        raise ValueError(f"{name}={x} is the index of a component, and a vector has n = {n}")


def refuse_script(module: object) -> None:
    """Raise the error of a layer under `torch.jit.script`."""
    raise RuntimeError(
        f"{type(module).__name__} cannot be compiled by torch.jit.script{_NO_SCRIPT}"
    )


def refuse_trace() -> None:
    """Raise the same error under `torch.jit.trace`, which would record results as constants."""
    if _tracing_state() is not None:
        raise RuntimeError(
            "a layer cannot be traced by torch.jit.trace, nor by torch.onnx.export with "
            f"dynamo=False{_NO_SCRIPT}"
        )


_tracing_state = torch._C._get_tracing_state
_NO_SCRIPT = (
    ": a solve depends on data in ways TorchScript does not express; use torch.compile, or "
    "torch.export to save a program"
)


def require_extra(module: str, extra: str) -> None:
    """An optional dependency is there; the error names the extra that brings it."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"this needs {module}; install it with: pip install 'pmaf[{extra}]'")


def _require_floating(name: str, x: object, or_complex: bool) -> Tensor:
    refuse_trace()  # first of all: the sizes of its tensors are no numbers
    if not isinstance(x, Tensor):
        hint = "" if x is None else " (torch.as_tensor converts it)"
        if callable(getattr(x, "matvec", None)):
            hint = " (pmaf.operators.FromMatvec wraps a function that multiplies by it)"
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}{hint}")
    if x.dtype not in (*_DTYPES, *_COMPLEX) if or_complex else x.dtype not in _DTYPES:
        kind = "complex" if x.is_complex() else "not floating-point"
        kind = "not supported" if x.is_floating_point() or (or_complex and x.is_complex()) else kind
        raise TypeError(
            f"{name} has dtype {x.dtype}, which is {kind}; "
            "use float32 or float64 (float16 and bfloat16 are computed in float32)"
            + (", complex64 or complex128" if or_complex else "")
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; convert it with .to_dense()")
    return x
