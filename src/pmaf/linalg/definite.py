"""A proof that a matrix is positive definite, from the factor of a matrix near it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.products import norm
from pmaf.linalg.symmetric_part import fixed_normal


def is_definite(product: Callable[[Tensor], Tensor], lower: Tensor) -> Tensor:
    """Whether `K` is positive definite, `(*,)`, given the factor `L` of a matrix `LLᵀ` near it.

    If an eigenvalue of `K` were not positive, `L⁻¹KL⁻ᵀ − I` would have one of at most −1, and would
    map a normal vector `ω` to one that is shorter than `η` with a probability of at most `η√(2/π)`
    (Halko, Martinsson and Tropp 2011, lemma 4.1). So the lengths of the images of a few vectors
    bound the probability of an error, whatever rounding has done to `L`.

    Args:
        product: `K` times rows `(*, p, n)`.
        lower: `(*, n, n)`, the Cholesky factor.
    """
    probes = fixed_normal(_PROBES, lower.shape[-1]).to(lower)
    probes = probes.expand(*lower.shape[:-2], *probes.shape)
    rows = torch.linalg.solve_triangular(lower.mT, probes.mT, upper=True).mT
    images = torch.linalg.solve_triangular(lower, product(rows).mT, upper=False).mT
    chances = math.sqrt(2 / math.pi) * norm(images - probes)
    return chances.prod(-1) <= _CHANCE


_PROBES, _CHANCE = 8, 1e-9
