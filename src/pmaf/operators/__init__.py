"""Operators, matrices that are known by their products, for use in place of a dense `A`."""

from pmaf.operators.base import Operator, Scaled, Sum, as_operator, multiply, multiply_rows
from pmaf.operators.diagonal import Diagonal
from pmaf.operators.gram import Gram
from pmaf.operators.hessian import Hessian
from pmaf.operators.low_rank import LowRank
from pmaf.operators.matrix import Matrix
from pmaf.operators.matvec import FromMatvec
from pmaf.operators.sparse import Sparse
from pmaf.operators.with_solve import WithSolve

__all__ = [
    "Diagonal",
    "FromMatvec",
    "Gram",
    "Hessian",
    "LowRank",
    "Matrix",
    "Operator",
    "Scaled",
    "Sparse",
    "Sum",
    "WithSolve",
    "as_operator",
    "multiply",
    "multiply_rows",
]
