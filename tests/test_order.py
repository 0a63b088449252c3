"""The order of several eigenvalues or singular values: the requested end is first by default."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
import torch

import pmaf
from pmaf.operators import Diagonal, Gram, Matrix, Sparse
from pmaf.runtime.text import decode

ENDS = [pytest.param(True, id="largest"), pytest.param(False, id="smallest")]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
ORDERS = (None, True, False)


def symmetric(n, dtype, batch=()):
    A = torch.randn(*batch, n, n, dtype=dtype)
    return A + A.mH


def spread(n, dtype, rows=None):
    """A symmetric matrix with eigenvalues 1 to n, or rows of a matrix with singular values 1 to n.

    The gaps are one, so that vectors are known up to some n or n² roundings.
    """
    Q = torch.linalg.qr(torch.randn(n, n, dtype=dtype)).Q
    D = torch.diag(torch.arange(1.0, n + 1)).to(dtype)
    return Q @ D @ Q.mH if rows is None else D[:rows] @ Q


def metric(n, dtype):
    S = symmetric(n, dtype)
    return torch.eye(n, dtype=dtype) + 0.02 * S / torch.linalg.matrix_norm(S, 2)


def is_in_order(values, largest, descending):
    """Whether the end that is asked for is first, or the order that is asked for holds."""
    steps = values.diff(dim=-1)
    down = largest if descending is None else descending
    return bool((steps < 0).all() if down else (steps > 0).all())


# Each returns values `(*, k)` and vectors `(*, n, k)`, given k, the end, and other options.
PAIRS = {
    "ied": lambda A, k, **o: pmaf.ied(A, k, **o),
    "IED": lambda A, k, **o: pmaf.IED(k, **o)(A),
    "ied, solver": lambda A, k, **o: pmaf.ied(A, k, solver=pmaf.solvers.Dense(), **o),
    "ied, reference": lambda A, k, **o: pmaf.ied(A, k, reference="largest", **o),
    "ied, skip": lambda A, k, **o: pmaf.ied(A, k, skip=1, **o),
    "ied, M": lambda A, k, **o: pmaf.ied(A, k, M=metric(A.shape[-1], A.dtype), **o),
    "ied, diagonal M": lambda A, k, **o: pmaf.ied(A, k, M=Diagonal(torch.ones_like(A[0])), **o),
    "ied, operator": lambda A, k, **o: pmaf.ied(Matrix(A), k, **o),
    "ied, sparse": lambda A, k, **o: pmaf.ied(Sparse(A.to_sparse_coo()), k, **o),
    "ied, Gram": lambda A, k, **o: pmaf.ied(Gram(A), k, **o),
    "PrincipalEigenvectors": lambda A, k, **o: solved(pmaf.PrincipalEigenvectors(A, k, **o)),
    "PrincipalSingularVectors": lambda A, k, **o: solved(
        pmaf.PrincipalSingularVectors(A, k=k, **o)
    ),
    "singular, operator": lambda A, k, **o: solved(
        pmaf.PrincipalSingularVectors(Matrix(A), k=k, **o)
    ),
    "isvd": lambda A, k, **o: pmaf.isvd(A, k, **o)[1:],
    "ISVD": lambda A, k, **o: pmaf.ISVD(k, **o)(A)[1:],
    "isvd, wide": lambda A, k, **o: pmaf.isvd(spread(7, A.dtype, 5), k, **o)[1:],
    "isvd, tall": lambda A, k, **o: pmaf.isvd(spread(7, A.dtype, 5).mT, k, **o)[1:],
    "isvd, operator": lambda A, k, **o: pmaf.isvd(Matrix(A), k, **o)[1:],
    "isvd, left": lambda A, k, **o: pmaf.isvd(A, k, **o)[1::-1],
}


def solved(problem):
    solution = pmaf.solve(problem)
    return solution.multiplier, solution.value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", ENDS)
@pytest.mark.parametrize("layer", PAIRS)
def test_the_requested_end_is_first(layer, largest, dtype):
    A, eps = spread(7, dtype), torch.finfo(dtype).eps
    for k, seed in itertools.product((2, 3, 5), range(2)):
        torch.manual_seed(seed)
        ordered = {}
        for options in ({}, *({"descending": order} for order in ORDERS)):
            torch.manual_seed(seed)  # M is the same one each time
            values, vectors = PAIRS[layer](A, k, largest=largest, **options)
            assert values.shape == (k,)
            assert is_in_order(values, largest, options.get("descending")), (k, options, values)
            ordered[options.get("descending", "unsaid")] = values, vectors
        # The default is one of the two orders to the last bit, and the other is its reverse.
        for x, y, z in zip(*(ordered[key] for key in ("unsaid", None, largest)), strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z)
        for x, y in zip(ordered[largest], ordered[not largest], strict=True):
            torch.testing.assert_close(x, y.flip(-1), rtol=0, atol=20 * 49 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", ENDS)
@pytest.mark.parametrize("descending", ORDERS)
def test_references_belong_to_vectors_in_the_order_of_the_result(descending, largest, dtype):
    A = symmetric(6, dtype)
    for call in (
        lambda r: pmaf.ied(A, 3, largest=largest, descending=descending, reference=r).vectors,
        lambda r: pmaf.isvd(A, 3, largest=largest, descending=descending, reference=r).right,
    ):
        before = call(None)
        # The signs differ from column to column, so that another order would change them.
        signs = torch.tensor([1.0, -1.0, 1.0], dtype=dtype)
        torch.testing.assert_close(call(before * signs), before * signs)


@pytest.mark.parametrize("largest", ENDS)
def test_null_vectors_and_functions_of_the_spectrum_have_that_order(largest):
    A = spread(6, torch.float64)
    truth = torch.linalg.eigvalsh(A)
    expected = truth.flip(0)[:3] if largest else truth[:3]
    for given in (A, Matrix(A)):
        solution = pmaf.solve(pmaf.SpectralFunction(given, "exp", 3, largest))
        torch.testing.assert_close(solution.multiplier, expected)
    vectors = pmaf.nullspace(A, 3)
    torch.testing.assert_close((A @ vectors).norm(dim=0), truth[:3])


@pytest.mark.parametrize("kind", [pmaf.PrincipalEigenvectors, pmaf.PrincipalSingularVectors])
def test_a_problem_knows_its_order_from_the_beginning(kind):
    """Texts, caches and traces see a bool."""
    A = symmetric(4, torch.float64)
    for largest, given in itertools.product((True, False), ORDERS):
        problem = kind(A, k=2, largest=largest, descending=given)
        expected = largest if given is None else given
        assert problem.descending is expected
        assert decode(problem.encoded()).descending is expected
        assert f"descending={expected}" in repr(problem)
    names = [field.name for field in fields(kind)]
    assert names.index("descending") > names.index("largest")


@pytest.mark.parametrize("module", [pmaf.IED, pmaf.ISVD])
def test_a_module_prints_the_order_that_it_has(module):
    assert "largest=False, " in repr(module(2, largest=False))
    assert "descending=False" in repr(module(2, largest=False))
    assert "descending=True" in repr(module(2))
    assert "descending=True" in repr(module(2, largest=False, descending=True))


# Tracing raises torch's own deprecation warnings.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("largest", ENDS)
def test_the_order_of_traced_and_mapped_calls_is_the_same(largest):
    A = symmetric(5, torch.float64, (3,))

    def layer(A):
        return pmaf.ied(A, 3, largest=largest)

    truth = layer(A)
    for other in (
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        torch.func.vmap(layer),
    ):
        torch.testing.assert_close(other(A), truth)


def test_gradients_follow_the_order():
    A = symmetric(5, torch.float64).requires_grad_()
    for largest, descending in itertools.product((True, False), ORDERS):
        values = pmaf.ied(A, 3, largest=largest, descending=descending).values
        exact = torch.linalg.eigvalsh(A)
        exact = exact.flip(0)[:3] if largest else exact[:3]
        exact = exact if descending in (None, largest) else exact.flip(0)
        weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
        found, expected = (torch.autograd.grad(x @ weights, A)[0] for x in (values, exact))
        torch.testing.assert_close(found, (expected + expected.mT) / 2)
