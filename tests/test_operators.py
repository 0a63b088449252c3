"""Matrices known by their products: the same products, solutions and gradients as dense ones."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pmaf
from pmaf.operators import (
    Diagonal,
    FromMatvec,
    Gram,
    LowRank,
    Matrix,
    Operator,
    Scaled,
    Sparse,
    Sum,
)
from pmaf.operators.coordinates import Coordinates, InCoordinates, WithRowFactors

F64 = torch.float64


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Case(NamedTuple):
    """An operator made of leaves, and the matrix it stands for, made of the same."""

    operator: Callable[..., Operator]
    matrix: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]


def pattern(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def coo(values, mask):
    return torch.sparse_coo_tensor(mask.nonzero().T, values, mask.shape, check_invariants=True)


@functools.cache
def beta():
    """CSR tensors warn that they are a beta feature, once a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(2).to_sparse_csr()


def csr(values, mask):
    beta()
    rows = mask.sum(-1)
    starts = torch.cat([torch.zeros_like(rows[..., :1]), rows.cumsum(-1)], -1)
    columns = mask.nonzero()[:, -1]
    if mask.dim() > 2:
        columns, values = (x.reshape(len(mask), -1) for x in (columns, values))
    return torch.sparse_csr_tensor(starts, columns, values, mask.shape, check_invariants=True)


def dense(values, mask):
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)


def twice(mask):
    """One batch of two patterns with as many entries, which CSR needs."""
    return torch.stack([mask, mask.mT])


def sparse(make, mask):
    return Case(
        lambda v: Sparse(make(v, mask)),
        lambda v: dense(v, mask),
        (randn(int(mask.sum())),),
    )


def covariance(X, w):
    """`Σ wᵢ(xᵢ − mean)(xᵢ − mean)ᴴ`, with the weighted mean."""
    w = w.unsqueeze(-1)
    Z = X - (w * X).sum(-2, keepdim=True) / w.sum(-2, keepdim=True)
    return Z.mH @ (w * Z)


ones = torch.ones(1, 30, dtype=F64)
uniform = torch.full((1, 12), 1 / 12, dtype=F64)
walk = pattern(12, 12) | torch.eye(12, dtype=torch.bool).roll(1, 0)

SQUARE = {
    "Matrix": Case(Matrix, lambda A: A, (randn(12, 12),)),
    "Matrix, batched": Case(Matrix, lambda A: A, (randn(2, 3, 12, 12),)),
    "Gram, tall": Case(Gram, lambda X: X.mT @ X, (randn(30, 12),)),
    "Gram, wide": Case(Gram, lambda X: X.mT @ X, (randn(7, 12),)),
    "Gram, batched": Case(Gram, lambda X: X.mT @ X, (randn(2, 30, 12),)),
    "Gram, scaled": Case(
        lambda X: Gram(X, scale=1 / 29), lambda X: X.mT @ X / 29, (randn(30, 12),)
    ),
    "Gram, centred": Case(
        lambda X: Gram(Matrix(X) - LowRank(ones, X.mean(0, keepdim=True))),
        lambda X: (X - X.mean(0)).mT @ (X - X.mean(0)),
        (randn(30, 12) + 3,),
    ),
    "Gram, centre": Case(
        lambda X: Gram(X, 0.5, centre=True),
        lambda X: 0.5 * (X - X.mean(0)).mT @ (X - X.mean(0)),
        (randn(30, 12) + 3,),
    ),
    "Gram, centre, wide, batched": Case(
        lambda X: Gram(X, centre=True),
        lambda X: (X - X.mean(-2, keepdim=True)).mT @ (X - X.mean(-2, keepdim=True)),
        (randn(2, 3, 7, 12) + 3,),
    ),
    "Gram, centre, weights": Case(
        lambda X, w: Gram(X, 0.5, w, centre=True),
        lambda X, w: 0.5 * covariance(X, w),
        (randn(30, 12) + 3, randn(30, seed=1).square()),
    ),
    "Gram, centre, many weights": Case(
        lambda X, w: Gram(X, weights=w, centre=True),
        covariance,
        (randn(30, 12) + 3, randn(2, 3, 30, seed=1).square()),
    ),
    "Gram, centre, weights for a batch": Case(
        lambda X, w: Gram(X, weights=w, centre=True),
        covariance,
        (randn(2, 3, 30, 12) + 3, randn(30, seed=1).square()),
    ),
    "Gram, centre, sparse": Case(
        lambda v, w: Gram(coo(v, pattern(30, 12)), weights=w, centre=True),
        lambda v, w: covariance(dense(v, pattern(30, 12)), w),
        (randn(int(pattern(30, 12).sum())) + 2, randn(30, seed=1).square()),
    ),
    "Gram, centre, function": Case(
        lambda X: Gram(FromMatvec(lambda u, X: X @ u, (30, 12), [X]), centre=True),
        lambda X: covariance(X, torch.ones(30, dtype=F64)),
        (randn(30, 12) + 3,),
    ),
    "Gram, sparse": Case(
        lambda v: Gram(coo(v, pattern(30, 12))),
        lambda v: dense(v, pattern(30, 12)).mT @ dense(v, pattern(30, 12)),
        (randn(int(pattern(30, 12).sum())),),
    ),
    "Sparse, COO": sparse(coo, pattern(12, 12)),
    "Sparse, CSR": sparse(csr, pattern(12, 12)),
    "Sparse, COO, batched": sparse(coo, pattern(2, 3, 12, 12)),
    "Sparse, CSR, batched": sparse(csr, twice(pattern(12, 12))),
    "LowRank": Case(LowRank, lambda L, R: L.mT @ R, (randn(3, 12), randn(3, 12, seed=1))),
    "Diagonal, batched": Case(Diagonal, torch.diag_embed, (randn(2, 12),)),
    "Laplacian": Case(
        lambda v: Diagonal(dense(v, pattern(12, 12)).sum(-1)) - Sparse(coo(v, pattern(12, 12))),
        lambda v: dense(v, pattern(12, 12)).sum(-1).diag() - dense(v, pattern(12, 12)),
        (randn(int(pattern(12, 12).sum())).abs(),),
    ),
    "PageRank": Case(
        lambda v: 0.85 * Sparse(coo(v, walk)) + 0.15 * LowRank(torch.ones_like(uniform), uniform),
        lambda v: 0.85 * dense(v, walk) + 0.15 * torch.ones_like(uniform).mT @ uniform,
        (randn(int(walk.sum())).abs(),),
    ),
    "deflated": Case(
        lambda X, y: Gram(X) - 20 * LowRank(y, y),
        lambda X, y: X.mT @ X - 20 * y.mT @ y,
        (randn(30, 12), randn(1, 12) / 12**0.5),
    ),
    "shared by a batch": Case(
        lambda A, d: Matrix(A) + Diagonal(d), lambda A, d: A + torch.diag_embed(d),
        (randn(12, 12), randn(2, 12)),
    ),
    "sparse, shared by a batch": Case(
        lambda v, d: Sparse(coo(v, pattern(12, 12))) + Diagonal(d),
        lambda v, d: dense(v, pattern(12, 12)) + torch.diag_embed(d),
        (randn(int(pattern(12, 12).sum())), randn(2, 12)),
    ),
    "negated": Case(lambda A: -Matrix(A), lambda A: -A, (randn(12, 12),)),
    "FromMatvec": Case(
        lambda A: FromMatvec(lambda u, A: u @ A.mT, (12, 12), [A]), lambda A: A, (randn(12, 12),)
    ),
    "FromMatvec, rmatvec": Case(
        lambda A: FromMatvec(lambda u, A: u @ A.mT, (12, 12), [A], lambda u, A: u @ A),
        lambda A: A,
        (randn(12, 12),),
    ),
    "FromMatvec, batched": Case(
        lambda A: FromMatvec(lambda u, A: (A @ u.unsqueeze(-1)).squeeze(-1), (3, 12, 12), [A]),
        lambda A: A,
        (randn(3, 12, 12),),
    ),
    "FromMatvec, not linear in params": Case(
        lambda a, B: FromMatvec(lambda u, a, B: a.exp() * (u @ B.mT @ B), (12, 12), [a, B]),
        lambda a, B: a.exp().unsqueeze(-1) * (B.mT @ B),
        (0.3 * randn(12), randn(12, 12)),
    ),
}  # fmt: skip

RECTANGULAR = {
    "Matrix": Case(Matrix, lambda A: A, (randn(20, 6),)),
    "Matrix, batched": Case(Matrix, lambda A: A, (randn(2, 20, 6),)),
    "Matrix, wide": Case(Matrix, lambda A: A, (randn(4, 6),)),
    "Sparse, COO": sparse(coo, pattern(20, 6)),
    "Sparse, CSR": sparse(csr, pattern(20, 6)),
    "Sparse, batched": sparse(coo, pattern(2, 20, 6)),
    "centred": Case(
        lambda X: Matrix(X) - LowRank(ones[:, :20], X.mean(0, keepdim=True)),
        lambda X: X - X.mean(0),
        (randn(20, 6) + 1,),
    ),
    "FromMatvec": Case(
        lambda A: FromMatvec(lambda u, A: u @ A.mT, (20, 6), [A]), lambda A: A, (randn(20, 6),)
    ),
    "Scaled": Case(lambda A: Scaled(Matrix(A), 0.3), lambda A: 0.3 * A, (randn(20, 6),)),
}

square = pytest.mark.parametrize("case", SQUARE.values(), ids=SQUARE.keys())
rectangular = pytest.mark.parametrize("case", RECTANGULAR.values(), ids=RECTANGULAR.keys())
either = pytest.mark.parametrize(
    "case",
    [*SQUARE.values(), *RECTANGULAR.values()],
    ids=[*SQUARE, *(f"{name}, rectangular" for name in RECTANGULAR)],
)


def close(found, wanted, tolerance=1e-10):
    torch.testing.assert_close(
        found, wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().max()))
    )


def weights(x):
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)


@either
def test_products_are_those_of_the_matrix(case):
    A, M = case.operator(*case.leaves), case.matrix(*case.leaves)
    assert A.shape == M.shape
    assert (A.dtype, A.device) == (M.dtype, M.device)
    *batch, m, n = M.shape
    for p in (1, 3):
        x, y = randn(*batch, p, n), randn(*batch, p, m, seed=1)
        close(A.matvec(x), x @ M.mT)
        close(A.rmatvec(y), y @ M)


@either
def test_pullback_is_that_of_the_matrix(case):
    leaves = [x.clone().requires_grad_() for x in case.leaves]
    M = case.matrix(*leaves)
    *batch, m, n = M.shape
    left, right = randn(*batch, 2, m), randn(*batch, 2, n, seed=1)
    wanted = torch.autograd.grad((left * (right @ M.mT)).sum(), leaves)
    A = case.operator(*leaves)
    needs = [x.requires_grad for x in A.tensors]
    # The tensors of an operator may be made of the leaves.
    pairs = [(x, dx) for x, dx in zip(A.tensors, A.pullback(left, right, needs)) if dx is not None]
    found = torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs])
    for x, y in zip(found, wanted):
        close(x, y)
    assert A.pullback(left, right, [False] * len(needs)) == [None] * len(needs)


@either
def test_an_operator_times_tensors_broadcasts_as_torch_does(case):
    A, M = case.operator(*case.leaves), case.matrix(*case.leaves)
    *batch, n = (*M.shape[:-2], M.shape[-1])
    ones = [1] * len(batch)
    for shape in (
        (n,), (n, 1), (n, 4), (*batch, n, 2), (*ones, n, 2), (5, *batch, n, 2),
        (5, *ones, n, 3), (0, *ones, n, 3), (n, 0),
    ):  # fmt: skip
        x = randn(*shape)
        found = A @ x
        assert found.shape == (M @ x).shape
        if found.numel():
            close(found, M @ x)
    for i, size in enumerate(batch):
        x = randn(*batch[:i], 1, *batch[i + 1 :], n, 2)
        close(A @ x, M @ x)
        assert size > 1


@pytest.mark.parametrize("lead", [(1,), (4, 1), (1, 3), (2, 1, 3)], ids=str)
def test_a_batch_of_one_broadcasts_too(lead):
    """Matrices with batch dimensions of one, dense and sparse, times batches of matrices."""
    M = randn(*lead, 5, 6)
    for A in (Matrix(M), Sparse(M.to_sparse_coo())):
        for batch in ((2, 4, 3), (2, 4, 1), (4, 3), (1, 3), (3,), ()):
            try:
                wanted = M @ randn(*batch, 6, 2)
            except RuntimeError:
                with pytest.raises(ValueError, match="do not broadcast"):
                    A @ randn(*batch, 6, 2)
                continue
            close(A @ randn(*batch, 6, 2), wanted)
        close(A @ randn(6), M @ randn(6))


@pytest.mark.parametrize("shape", [(6,), (6, 2), (3, 6, 2), (2, 3, 6, 2)], ids=str)
def test_a_product_is_differentiable_in_both(shape):
    M, x = randn(3, 5, 6).requires_grad_(), randn(*shape, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda M, x: Matrix(M) @ x, (M, x))
    assert torch.autograd.gradcheck(lambda M, x: Gram(M) @ x, (M, x))
    assert torch.autograd.gradgradcheck(lambda M, x: Matrix(M) @ x, (M, x))


def test_a_product_of_complex_numbers_has_no_conjugate():
    M, x = torch.complex(randn(5, 6), randn(5, 6, seed=1)), torch.complex(randn(6, 2), randn(6, 2))
    for A in (
        Matrix(M),
        Sparse(M.to_sparse_coo()),
        FromMatvec(lambda u: M @ u, (5, 6), dtype=M.dtype),
    ):
        close((A @ x).real, (M @ x).real)
        close((A @ x).imag, (M @ x).imag)


def both(case, solve):
    """Results and gradients, with the operator and with its matrix."""
    found = []
    for build in (case.operator, case.matrix):
        leaves = [x.clone().requires_grad_() for x in case.leaves]
        results = solve(build(*leaves))
        loss = sum((weights(x) * x).sum() for x in results)
        found.append(([x.detach() for x in results], torch.autograd.grad(loss, leaves)))
    return found


@pytest.mark.parametrize(
    "options",
    [dict(), dict(k=3), dict(largest=False), dict(k=2, largest=False, descending=True)],
    ids=str,
)
@square
def test_ied_equals_that_of_the_matrix(case, options):
    low_rank = "smallest" if not options.get("largest", True) else "largest"
    M = case.matrix(*case.leaves)
    values = torch.linalg.eigvalsh(0.5 * (M + M.mT))
    values = values if low_rank == "smallest" else values.flip(-1)
    k = options.get("k", 1)
    if float((values[..., 1 : k + 1] - values[..., :k]).abs().min()) < 1e-6:
        pytest.skip("the eigenvalues asked for are not simple")
    (made, gradients), (wanted, exact) = both(case, lambda A: pmaf.ied(A, **options))
    for x, y in zip([*made, *gradients], [*wanted, *exact]):
        close(x, y, 1e-9)


@square
def test_nonsymmetric_ied_equals_that_of_the_matrix(case):
    M = case.matrix(*case.leaves)
    values = torch.linalg.eigvals(M)
    first, second = values.abs().topk(2, -1).values.unbind(-1)
    if float((first - second).min()) < 1e-6:
        pytest.skip("the dominant eigenvalue is complex or not simple")
    (made, gradients), (wanted, exact) = both(case, lambda A: pmaf.ied(A, symmetric=False))
    for x, y in zip([*made, *gradients], [*wanted, *exact]):
        close(x, y, 1e-9)


@pytest.mark.parametrize("length", [0.05, 5.0], ids=["inner", "outer"])
@rectangular
def test_less_equals_that_of_the_matrix(case, length):
    M = case.matrix(*case.leaves)
    if M.shape[-2] < M.shape[-1] and length < 1:
        pytest.skip("the minimisers form a sphere")
    b = length * randn(*M.shape[:-1], seed=2)
    with_b = Case(
        lambda *leaves: (case.operator(*leaves[:-1]), leaves[-1]),  # pyright: ignore
        lambda *leaves: (case.matrix(*leaves[:-1]), leaves[-1]),  # pyright: ignore
        (*case.leaves, b),
    )
    (made, gradients), (wanted, exact) = both(with_b, lambda Ab: (pmaf.less(*Ab, radius=1.5),))
    for x, y in zip([*made, *gradients], [*wanted, *exact]):
        close(x, y, 1e-8)


def test_one_operator_serves_a_batch_of_right_hand_sides():
    A, b = randn(20, 6), randn(4, 3, 20, seed=1)
    case = Case(lambda A, b: (Matrix(A), b), lambda A, b: (A, b), (A, b))  # pyright: ignore
    (made, gradients), (wanted, exact) = both(case, lambda Ab: (pmaf.less(*Ab),))
    for x, y in zip([*made, *gradients], [*wanted, *exact]):
        close(x, y, 1e-9)


@pytest.mark.parametrize("make", [coo, csr], ids=["COO", "CSR"])
def test_a_sparse_tensor_is_taken_as_it_is_and_gets_a_sparse_gradient(make):
    mask = pattern(12, 12)
    stored = randn(int(mask.sum())).abs()
    A = make(stored, mask).requires_grad_()
    values, vectors = pmaf.ied(A, symmetric=False)
    (vectors[0] + values).backward()
    assert A.grad is not None
    assert A.grad.layout == A.layout
    full = dense(stored, mask).requires_grad_()
    values, vectors = pmaf.ied(full, symmetric=False)
    (vectors[0] + values).backward()
    close(A.grad.to_dense(), full.grad * mask)


def test_entries_stored_twice_add_up():
    index = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])
    values = torch.tensor([1.0, 2.0, 1.0, 0.5], requires_grad=True)
    A = torch.sparse_coo_tensor(index, values, (2, 2), check_invariants=True)
    found, _ = pmaf.ied(A)
    close(found.detach(), torch.linalg.eigvalsh(torch.tensor([[3.0, 0.25], [0.25, 1.0]]))[-1], 1e-6)
    found.backward()
    assert values.grad[0] == values.grad[1]


def test_the_pattern_of_a_sparse_matrix_is_sorted_once():
    mask = pattern(12, 12)
    A = Sparse(coo(randn(int(mask.sum())).abs(), mask))
    pmaf.ied(A, symmetric=False)
    other = A.with_tensors([2 * A.tensors[0]])
    assert other._pattern is A._pattern
    close(pmaf.ied(other, symmetric=False).values, 2 * pmaf.ied(A, symmetric=False).values)


def test_a_function_without_params():
    A = FromMatvec(lambda u: u * torch.tensor([3.0, 1.0]), (2, 2))
    assert pmaf.ied(A).values.dtype == torch.float32
    A = FromMatvec(lambda u: u * torch.tensor([3.0, 1.0], dtype=F64), (2, 2), dtype=F64)
    close(pmaf.ied(A).values, torch.tensor(3.0, dtype=F64))


def test_a_function_autograd_cannot_see_through():
    d = torch.arange(1.0, 6.0)
    A = FromMatvec(lambda u: torch.from_numpy(u.detach().numpy() * d.numpy()), (5, 5))
    close(pmaf.ied(A).values, torch.tensor(5.0), 1e-6)  # symmetric is taken on trust
    with pytest.raises(NotImplementedError, match="pass rmatvec"):
        pmaf.less(A, torch.ones(5))


BAD = {
    "not square": (lambda: pmaf.ied(Matrix(torch.ones(3, 2))), "square.*Gram"),
    "k too large": (lambda: pmaf.ied(Gram(torch.ones(3, 2)), k=3), "between 1 and n = 2"),
    "a list": (lambda: Gram([[1.0]]), "expected a dense tensor.*got list"),
    "integers": (lambda: Sparse(torch.eye(3).long().to_sparse_coo()), "int64"),
    "dense for Sparse": (lambda: Sparse(torch.eye(3)), "layout torch.strided"),
    "shapes that do not add up": (
        lambda: Matrix(torch.ones(3, 3)) + Diagonal(torch.ones(2)),
        r"Matrix\(3, 3\) and Diagonal\(2, 2\) do not add up",
    ),
    "dtypes that do not add up": (
        lambda: Matrix(torch.ones(3, 3)) + Diagonal(torch.ones(3).double()),
        "float64",
    ),
    "factors of different rank": (lambda: LowRank(torch.ones(2, 3), torch.ones(1, 3)), "as many"),
    "one tensor for params": (
        lambda: FromMatvec(lambda u, a: u, (2, 2), torch.ones(2)),
        r"pass \[tensor\]",
    ),
    "an image of the wrong shape": (
        lambda: pmaf.ied(FromMatvec(lambda u: u[..., :1], (3, 3))),
        r"matvec returned shape \(1,\) for u of shape \(3,\)",
    ),
    "other values": (
        lambda: Sparse(torch.eye(3).to_sparse_coo()).with_tensors([torch.ones(2)]),
        r"stores values of shape \(3,\); got \(2,\)",
    ),
    "a factor with a gradient": (
        lambda: torch.tensor(2.0, requires_grad=True) * Gram(torch.ones(3, 2)),
        "would get none",
    ),
    "a scale with a gradient": (
        lambda: Gram(torch.ones(3, 2), scale=torch.tensor(2.0, requires_grad=True)),
        "scale is a number here",
    ),
    "an empty sum": (lambda: Sum(), "at least one part"),
    "a vector of another length": (
        lambda: Matrix(torch.ones(3, 2)) @ torch.ones(3),
        r"Matrix\(3, 2\) @ x needs x of shape \(2,\) or \(\*, 2, p\); got \(3,\)$",
    ),
    "a batch of vectors for @": (
        lambda: Matrix(torch.ones(3, 2)) @ torch.ones(5, 2),
        r"got \(5, 2\); for a batch of vectors \(\*, n\) call A\(x\)",
    ),
    "a number for @": (lambda: Diagonal(torch.ones(2)) @ torch.tensor(1.0), r"got \(\)$"),
    "batches that do not broadcast": (
        lambda: Matrix(torch.ones(4, 3, 2)) @ torch.ones(5, 2, 1),
        r"\(4,\) of Matrix\(4, 3, 2\) and \(5,\) of x do not broadcast",
    ),
    "another dtype for @": (
        lambda: Diagonal(torch.ones(2)) @ torch.ones(2).double(),
        r"x is torch.float64 but Diagonal\(2, 2\) is torch.float32",
    ),
    "a sparse tensor for @": (
        lambda: Diagonal(torch.ones(2)) @ torch.eye(2).to_sparse_coo(),
        "needs a dense tensor; got layout torch.sparse_coo",
    ),
    "a list for @": (lambda: Diagonal(torch.ones(2)) @ [1.0, 1.0], "a dense tensor; got list"),
    "an operator for @": (
        lambda: Diagonal(torch.ones(2)) @ Gram(torch.ones(3, 2)),
        r"Diagonal\(2, 2\) @ Gram\(2, 2\) is no operator.*A @ \(B @ x\)",
    ),
    "batches a sparse matrix cannot follow": (
        lambda: (
            Sparse(torch.eye(2).expand(2, 1, 2, 2).to_sparse_coo()) + Matrix(torch.ones(1, 3, 2, 2))
        ).matvec(torch.ones(2, 3, 1, 2)),
        "does not broadcast",
    ),
    "a function that is not finite": (
        lambda: pmaf.ied(FromMatvec(lambda u: u * torch.nan, (3, 3))),
        "non-finite",
    ),
    "not finite, not symmetric": (
        lambda: pmaf.ied(Matrix(torch.full((3, 3), torch.nan)), symmetric=False),
        "tensor 0 of Matrix",
    ),
    "a solver that needs entries": (
        lambda: pmaf.ied(Gram(torch.ones(3, 2)), solver=pmaf.solvers.Dense()),
        r"Dense\(\) needs the entries.*Gram\(2, 2\).*Krylov",
    ),
    "a gradient that needs entries": (
        lambda: pmaf.less(Matrix(torch.ones(3, 2)), torch.ones(3), gradient=pmaf.gradients.DDN()),
        r"needs the entries.*Implicit\(\)",
    ),
    "a batch that is too small": (
        lambda: pmaf.less(Matrix(torch.ones(2, 1, 3, 2)), torch.ones(2, 4, 3)),
        "the whole batch, or none",
    ),
    "an empty batch": (lambda: pmaf.ied(Gram(torch.ones(0, 3, 2))), "empty batch"),
    "init of another size": (
        lambda: pmaf.ied(Gram(torch.ones(3, 2)), init=torch.ones(3)),
        r"init must have shape \(\*, 2\)",
    ),
    "numbers that are not finite": (
        lambda: pmaf.ied(Gram(torch.tensor([[1.0, torch.nan]]))),
        r"tensor 0 of Gram\(2, 2\) has non-finite values in 1 of 2 numbers",
    ),
    "a product that overflows": (
        lambda: pmaf.ied(Gram(torch.full((3, 2), 1e30))),
        "overflows torch.float32",
    ),
    "b that is not finite": (
        lambda: pmaf.less(Matrix(torch.ones(3, 2)), torch.full((3,), torch.inf)),
        "b has non-finite",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_what_is_wrong(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_operators_meet_tensors_and_numbers_on_either_side():
    A, B = randn(3, 3), randn(3, 3, seed=1)
    x = randn(1, 3, seed=2)
    for made, wanted in (
        (A + Matrix(B), A + B),
        (Matrix(A) + B, A + B),
        (A - Matrix(B), A - B),
        (Matrix(A) / 2, A / 2),
        (torch.tensor(3.0) * Matrix(A), 3 * A),
    ):
        close(made.matvec(x), x @ wanted.mT)


def test_the_values_of_a_sparse_matrix_may_be_written_to():
    values = randn(int(pattern(12, 12).sum()))
    A = Sparse(coo(values, pattern(12, 12))).with_tensors([values])
    x = randn(1, 12)
    before = A.matvec(x), A.rmatvec(x)
    values.mul_(2)
    close(A.matvec(x), 2 * before[0])
    close(A.rmatvec(x), 2 * before[1])
    for other in (copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        close(other.rmatvec(x), A.rmatvec(x))


def test_a_sparse_batch_of_one_is_shared():
    A = Sparse(coo(randn(int(pattern(12, 12).sum())), pattern(12, 12)).unsqueeze(0))
    both = A + Matrix(randn(3, 12, 12))
    x = randn(3, 2, 12)
    close(both.matvec(x) - Matrix(randn(3, 12, 12)).matvec(x), A.matvec(x))


def test_params_may_be_indices_and_dtypes_are_kept():
    order = torch.tensor([2, 0, 1])
    d = torch.tensor([1.0, 2.0, 5.0])
    A = FromMatvec(lambda u, order, d: d[order] * u, (3, 3), [order, d], device="cpu")
    assert A.dtype == torch.float32
    close(pmaf.ied(A).values, torch.tensor(5.0), 1e-6)
    A = FromMatvec(lambda u, order: u * (order + 1).to(u), (3, 3), [order], dtype=F64)
    close(pmaf.ied(A).values, torch.tensor(3.0, dtype=F64))


def test_products_that_autograd_cannot_follow_are_an_error_not_a_missing_gradient():
    inside = Sparse(torch.eye(4).to_sparse_coo())
    w = torch.ones(4, requires_grad=True)
    A = FromMatvec(lambda u, w: inside.with_tensors([w]).matvec(u[None])[0], (4, 4), [w])
    with pytest.raises(RuntimeError, match="autograd sees no way"):
        pmaf.ied(A).values.backward()


def test_transforms_of_functions_are_refused():
    with pytest.raises(RuntimeError, match="give the operator a batch"):
        torch.func.vmap(lambda X: pmaf.ied(Gram(X)).values)(torch.ones(2, 3, 2))


COO = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 1, 0]])


def small_coo(values):
    return torch.sparse_coo_tensor(COO, values, (3, 3), check_invariants=True)


SQUARE = randn(6, 6, seed=1) + randn(6, 6, seed=1).mT + 6 * torch.eye(6, dtype=F64)
METRIC = randn(6, 6, seed=2) @ randn(6, 6, seed=2).mT + torch.eye(6, dtype=F64)
TALL, SIDE = randn(7, 3, seed=3), randn(7, seed=4)
# Functions of one tensor, whose gradient is found by products.
BY_PRODUCTS = {
    "values": (lambda X: pmaf.ied(Gram(X)).values, TALL),
    "vectors": (lambda X: pmaf.ied(Gram(X), 2).vectors.sum(), TALL),
    "general": (lambda S: pmaf.ied(Matrix(S.abs()), symmetric=False).vectors.sum(), SQUARE),
    "pair": (lambda S: pmaf.ied(Matrix(S), 2, M=Matrix(METRIC)).vectors.sum(), SQUARE),
    "metric": (lambda M: pmaf.ied(Matrix(SQUARE), 2, M=Matrix(M)).vectors.sum(), METRIC),
    "diagonal": (
        lambda d: pmaf.ied(Matrix(SQUARE), M=Diagonal(d)).vectors.sum(),
        METRIC.diagonal().clone(),
    ),
    "complex": (lambda S: pmaf.ied(Matrix(S + 1j * (S.triu() - S.triu().mT))).values, SQUARE),
    "less": (lambda X: pmaf.less(Matrix(X), SIDE).sum(), TALL),
    "right-hand side": (lambda b: pmaf.less(Matrix(TALL), b).sum(), SIDE),
    "weights": (lambda w: pmaf.less(Matrix(TALL), SIDE, weights=w).sum(), SIDE.exp()),
    "ball": (lambda X: pmaf.less(Matrix(X), SIDE, ball=True).sum(), TALL),
    "radius": (lambda r: pmaf.less(Matrix(TALL), SIDE, radius=r).sum(), torch.tensor(2.0).double()),
    "nullspace": (lambda X: pmaf.nullspace(Matrix(X)).sum(), TALL),
    "triplets": (lambda X: pmaf.isvd(Matrix(X), 2).left.sum(), TALL),
    "singular values": (lambda X: pmaf.isvd(Matrix(X), 2).values.sum(), TALL),
    "function": (
        lambda S: pmaf.spectral(Matrix(S @ S.mT), "sqrt", k=2).tensors[0].sum(),
        SQUARE,
    ),
    "matvec": (
        lambda w: pmaf.ied(FromMatvec(lambda u, w: w * u, (3, 3), [w])).values,
        SIDE[:3].exp(),
    ),
    "sparse": (
        lambda v: pmaf.ied(small_coo(v)).values,
        torch.tensor([3.0, 2, 1, 0.5, 0.5]).double(),
    ),
    "stored values": (
        lambda v: pmaf.ied(Sparse(small_coo(torch.ones(5, dtype=F64))).with_tensors([v])).values,
        torch.tensor([3.0, 0.5, 0.5, 2, 1]).double(),
    ),
}


def again(call, x):
    """The derivative of a function of a gradient and of the input itself."""
    (first,) = torch.autograd.grad(call(x), x, create_graph=True)
    return torch.autograd.grad((first * x).sum(), x)


def in_the_incoming_gradient(call, x):
    found = call(x)
    incoming = torch.ones_like(found).requires_grad_()
    (first,) = torch.autograd.grad(found, x, incoming, create_graph=True)
    return torch.autograd.grad(first.sum(), incoming)


@pytest.mark.parametrize(
    "derivative", [torch.autograd.functional.hessian, again, in_the_incoming_gradient]
)
@pytest.mark.parametrize("call", BY_PRODUCTS)
def test_a_second_derivative_is_refused(call, derivative):
    """It would be zero, or lack a term, without a word."""
    call, x = BY_PRODUCTS[call]
    with pytest.raises(RuntimeError, match=r"differentiated again|asks for second derivatives"):
        derivative(call, x.clone().requires_grad_())


@pytest.mark.parametrize("call", [name for name in BY_PRODUCTS if name != "sparse"])
def test_a_first_derivative_may_be_recorded(call):
    """Nobody has to differentiate it again."""
    call, x = BY_PRODUCTS[call]
    x = x.clone().requires_grad_()
    recorded = torch.autograd.grad(call(x), x, create_graph=True)
    torch.testing.assert_close(recorded, torch.autograd.grad(call(x), x))


def test_a_sparse_leaf_is_not_differentiated_twice():
    A = small_coo(torch.tensor([3.0, 2, 1, 0.5, 0.5]).double()).coalesce().requires_grad_()
    (first,) = torch.autograd.grad(pmaf.ied(A).values, A, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(first.to_dense().sum(), A)


def test_custom_operators_need_four_methods():
    class Circulant(Operator):
        def __init__(self, c):
            self.c = c

        @property
        def shape(self):
            return torch.Size((*self.c.shape, self.c.shape[-1]))

        @property
        def tensors(self):
            return (self.c,)

        def with_tensors(self, tensors):
            return Circulant(*tensors)

        def matvec(self, rows):
            spectrum = torch.fft.rfft(self.c)
            return torch.fft.irfft(spectrum * torch.fft.rfft(rows), n=self.c.shape[-1])

    def matrix(c):
        return torch.stack([c.roll(i) for i in range(7)], -1)

    c = torch.tensor([4.0, 1.5, 0.7, 0.2, 0.2, 0.7, 1.5], dtype=F64)
    case = Case(Circulant, matrix, (c,))
    (made, gradients), (wanted, exact) = both(case, pmaf.ied)
    for x, y in zip([*made, *gradients], [*wanted, *exact]):
        close(x, y)


def test_a_number_is_no_shape():
    with pytest.raises(TypeError, match=r"shape must be \(\*, m, n\); got 3, pass \(3, 3\)"):
        FromMatvec(lambda u: u, 3)  # pyright: ignore[reportArgumentType]


def test_a_factor_on_one_side_makes_an_operator_that_is_not_symmetric():
    """An operator that wraps one has its shape, its tensors and its claims, unless it says so."""
    part = pmaf.operators.Diagonal(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    M = torch.eye(3, dtype=torch.float64) + 0.1
    u = torch.randn(3, dtype=torch.float64)
    for one_sided in (InCoordinates(part, Coordinates.of(M)), WithRowFactors(part, u)):
        assert part.symmetric
        assert not one_sided.symmetric
        assert repr(one_sided) == repr(part)
        dense = one_sided.matvec(torch.eye(3, dtype=torch.float64)).mT
        torch.testing.assert_close(one_sided.transposed(u), dense.mT @ u)
        again = one_sided.with_tensors([2 * x for x in one_sided.tensors])
        assert type(again) is type(one_sided)
        torch.testing.assert_close(again.part(u), 2 * part(u))


def test_an_operator_around_another_keeps_what_is_its_own():
    part = pmaf.operators.Diagonal(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    u = torch.randn(3, dtype=torch.float64)
    for made in (0.5 * part, pmaf.operators.WithSolve(part, lambda rows: rows / part.d)):
        other = made.with_tensors([2 * part.d])
        assert type(other) is type(made)
        torch.testing.assert_close(other(u), 2 * made(u))
        torch.testing.assert_close(made.tensors, part.tensors)  # the first is left as it was
        assert (other.dtype, other.shape, other.symmetric) == (u.dtype, part.shape, True)
