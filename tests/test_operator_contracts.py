"""What operators promise around a solve: errors, devices, threads, training loops."""

import gc
import math
import re
import threading
import warnings

import numpy as np
import pytest
import torch

import pmaf
from pmaf import solvers
from pmaf.operators import Diagonal, FromMatvec, Gram, LowRank, Matrix, Sparse, Sum
from pmaf.solvers import Krylov

F64 = torch.float64


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(
        *shape, generator=torch.Generator(device="cpu").manual_seed(seed), dtype=F64, device="cpu"
    ).to(dtype)


RETURNS = {
    "None": (lambda u: None, TypeError, "returned None.*return a torch.Tensor"),
    "a list": (lambda u: u.tolist(), TypeError, "returned list.*return a torch.Tensor"),
    "an array": (lambda u: u.detach().numpy(), TypeError, "returned ndarray.*torch.from_numpy"),
    "float64": (lambda u: u.double(), TypeError, r"torch.float64.*\.to\(u\)"),
    "float16": (lambda u: u.half(), TypeError, r"torch.float16.*\.to\(u\)"),
    "another device": (lambda u: u.to("meta"), TypeError, r"on meta for u.*\.to\(u\)"),
    "another shape": (lambda u: u[..., :2], ValueError, r"returned shape \(2,\)"),
}


@pytest.mark.parametrize(("function", "kind", "message"), RETURNS.values(), ids=RETURNS.keys())
def test_what_a_function_returns_is_looked_at(function, kind, message):
    for call in (
        lambda: pmaf.ied(FromMatvec(function, (3, 3))),
        lambda: pmaf.ied(FromMatvec(function, (3, 3)), symmetric=False),
        lambda: pmaf.less(FromMatvec(function, (3, 3), rmatvec=function), torch.ones(3)),
        lambda: pmaf.less(FromMatvec(lambda u: u, (3, 3), rmatvec=function), torch.ones(3)),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_the_sum_of_python_adds_operators_up():
    d = [randn(5, seed=i) for i in range(3)]
    made = sum([Diagonal(x) for x in d])
    assert isinstance(made, Sum)
    x = randn(1, 5, seed=3)
    torch.testing.assert_close(made.matvec(x), x * (d[0] + d[1] + d[2]))
    assert sum([Diagonal(d[0])]).d is d[0]
    with pytest.raises(TypeError, match="got int"):
        1 + Diagonal(d[0])


OPTIONS = {
    solvers.Krylov: dict(
        tolerance=(math.nan, -1, math.inf, "a"),
        max_products=(2.5, 0, True),
        dimension=(3, 4.5, math.nan),
    ),
    solvers.PowerIteration: dict(
        tolerance=(math.nan, -1.0), iterations=(0, 1.5), shift=(math.nan, "a")
    ),
    solvers.SimultaneousIteration: dict(
        tolerance=(math.nan, -1.0), iterations=(0, 1.5), shift=(math.inf,)
    ),
    solvers.Lanczos: dict(
        tolerance=(math.nan, -1e-9), depth=(1, 2.5), extra=(-1, 0.5), restarts=(0, 1.5)
    ),
    solvers.ProjectedGradient: dict(
        tolerance=(math.nan, -1, None),
        regulariser=(math.nan, -1),
        max_iterations=(0, 1.5),
        search=("a", solvers.Backtracking),
        step=("long",),
    ),
    solvers.Secular: dict(max_iterations=(0, 2.5), refinements=(-1, 0.5)),
    solvers.Cholesky: dict(max_iterations=(0, 2.5), rounds=(0, 1.5)),
    solvers.Adaptive: dict(
        power_from=(math.nan, -1),
        general_from=("a",),
        krylov_from=(math.nan,),
        krylov_size=(0, 1.5),
    ),
    solvers.Backtracking: dict(alpha=(0, 1, math.nan, "a"), beta=(0, 1.0, math.nan)),
    solvers.TangentDecay: dict(beta=(math.nan, 0), angle_tolerance=(math.nan, -1)),
}


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_options_of_every_solver_are_looked_at(kind):
    for name, values in OPTIONS[kind].items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"^{name} must"):
                kind(**{name: value})


def test_numbers_of_numpy_are_numbers():
    A, b = randn(5, 3), randn(5, seed=1)
    for radius in (np.float32(2), np.float64(2), np.int64(2), 2):
        for wanted in (A, Matrix(A)):
            u = pmaf.less(wanted, b, radius=radius)
            assert u.dtype == F64
            torch.testing.assert_close(u.norm(), torch.tensor(2.0, dtype=F64))
        assert pmaf.LESS(radius=radius).radius == 2
    for radius in (np.float32("nan"), np.float64(-1), np.bool_(True), "2"):
        with pytest.raises((TypeError, ValueError), match="radius must"):
            pmaf.less(A, b, radius=radius)
    exact = Krylov(tolerance=np.float32(2.0**-20), max_products=np.int64(50))
    for given in (A.mT @ A, Gram(A)):
        pmaf.ied(given, solver=exact)


@pytest.mark.parametrize("name", ["reference", "init"])
@pytest.mark.parametrize("k", [None, 2])
def test_references_and_starts_that_are_not_finite_are_refused_before_any_work(name, k):
    calls = []

    def matvec(u):
        calls.append(u)
        return u

    bad = torch.ones(4) if k is None else torch.ones(4, k)
    for number in (math.nan, math.inf):
        bad.view(-1)[-1] = number
        for A in (FromMatvec(matvec, (4, 4)), torch.eye(4)):
            with pytest.raises(ValueError, match=f"{name} has non-finite values"):
                pmaf.ied(A, k, **{name: bad})
    assert not calls


def graph(x):
    """How many nodes there are behind a tensor."""
    seen, left = set(), [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize("name", ["init", "reference", "both"])
@pytest.mark.parametrize("options", [dict(), dict(k=2), dict(symmetric=False)], ids=str)
def test_a_training_loop_hands_on_its_eigenvectors(name, options):
    X = randn(8, 5).requires_grad_()
    names = ("init", "reference") if name == "both" else (name,)
    v, nodes, tensors = None, [], []
    for step in range(300):
        given = {} if v is None else dict.fromkeys(names, v)
        v = pmaf.ied(Gram(X), **options, **given).vectors
        nodes.append(graph(v))
        v.sum().backward()
        if step % 100 == 99:
            gc.collect()
            tensors.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
    # The first step has no reference, and may have a node less.
    assert len(set(nodes[1:])) == 1
    assert len(set(tensors)) == 1
    assert torch.isfinite(X.grad).all()


def test_a_training_loop_hands_on_its_minimisers():
    A, b = randn(8, 5).requires_grad_(), randn(8, seed=1)
    u, nodes, tensors = None, [], []
    for step in range(300):
        u = pmaf.less(Matrix(A), b, init=u)
        nodes.append(graph(u))
        u.sum().backward()
        if step % 100 == 99:
            gc.collect()
            tensors.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
    assert len(set(nodes)) == 1
    assert len(set(tensors)) == 1
    assert torch.isfinite(A.grad).all()


def everything():
    """Solves of every kind of operator in both layers, forward and backward, on the CPU."""
    mask = randn(6, 6, seed=7) > 0
    A, b = randn(6, 6).abs().requires_grad_(), randn(6, seed=1)
    # Of sizes that nobody has asked for before, so that nothing is remembered from elsewhere.
    n = 263
    d = randn(n, seed=2).requires_grad_()
    found = [
        *pmaf.ied(Gram(A), 2),
        *pmaf.ied(Matrix(A), symmetric=False),
        *pmaf.ied(Sparse((A.detach() * mask).to_sparse_coo()), largest=False),
        *pmaf.ied(Diagonal(d) + LowRank(d[None], d[None]), init=b.new_ones(n)),
        *pmaf.ied(Diagonal(d.square() + 1), symmetric=False, init=b.new_ones(n)),
        *pmaf.ied(FromMatvec(lambda u: 2 * u, (3, 3))),
        pmaf.less(Matrix(A), b),
        pmaf.less(Matrix(A), 1e-2 * b, init=b),
        pmaf.less(Matrix(A.detach()), b, solver=Krylov()),
    ]
    loss = torch.stack([(x.double().cos()).sum() for x in found]).sum()
    gradients = torch.autograd.grad(loss, (A, d))
    problems = (
        pmaf.PrincipalEigenvectors(Gram(A)),
        pmaf.PrincipalEigenvectors(Matrix(A), symmetric=False),
        pmaf.SphereLeastSquares(Matrix(A), b),
    )
    certificates = [pmaf.certify(x, pmaf.solve(x)).stationarity for x in problems]
    return [x.detach() for x in (*found, *gradients, *certificates)]


def test_a_default_device_is_of_no_account():
    from pmaf.linalg.symmetric_part import fixed_rows

    wanted = everything()
    fixed_rows.clear()
    with torch.device("meta"):
        found = everything()
    again = everything()
    for x, y, z in zip(found, wanted, again):
        assert x.device == y.device == z.device == torch.device("cpu")
        assert torch.equal(x, y)
        assert torch.equal(z, y)


def test_threads_leave_the_filters_of_warnings_alone():
    """A filter that is set and taken back in several threads at once stays behind."""
    A = torch.eye(20).roll(1, 0).to_sparse_coo() + torch.eye(20).to_sparse_coo()
    before = list(warnings.filters)
    entered = []
    original = warnings.catch_warnings.__enter__

    def watch(self):
        entered.append(self)
        return original(self)

    failures = []

    def work():
        try:
            for _ in range(5):
                pmaf.ied(Sparse(A))
                pmaf.less(Sparse(A), torch.ones(20))
        except BaseException as error:
            failures.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings.catch_warnings, "__enter__", watch)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert not entered
    assert list(warnings.filters) == before


def test_no_word_about_sparse_tensors_in_a_fresh_process():
    import subprocess
    import sys

    code = (
        "import torch, pmaf\nA = torch.eye(3).to_sparse_coo()\nprint(float(pmaf.ied(A).values))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.match(r"(1\.0|0\.99999)", run.stdout)


def mirrored(A, B, flaw, dtype=F64):
    """A function and what is said to be its transpose."""
    A, B = A.to(dtype), B.to(dtype)
    m, n = A.shape[-2:]
    batch = A.shape[:-2]
    return FromMatvec(
        lambda u: (A @ u.unsqueeze(-1)).squeeze(-1),
        (*batch, m, n),
        rmatvec=lambda u: flaw((B.mT @ u.unsqueeze(-1)).squeeze(-1)),
        dtype=dtype,
    )


FLAWS = {
    "the sign": lambda x: -x,
    "a factor": lambda x: 1.01 * x,
    "twice": lambda x: 2 * x,
    "nothing": lambda x: 0 * x,
    "the order": lambda x: x.roll(1, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("c", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS.keys())
def test_a_wrong_transpose_is_found_out(flaw, c, dtype):
    A, b = c * randn(12, 12), c * randn(12, seed=1).to(dtype)
    X = c * randn(30, 12)
    wrong, data = mirrored(A, A, flaw, dtype), mirrored(X, X, flaw, dtype)
    y = torch.ones(12, dtype=dtype) / 12**0.5
    calls = (
        lambda: pmaf.less(wrong, b),
        lambda: pmaf.less(data, torch.ones(30, dtype=dtype)),
        lambda: pmaf.ied(wrong),
        lambda: pmaf.ied(wrong, symmetric=False),
        lambda: pmaf.ied(Gram(data)),
        lambda: pmaf.ied(2 * wrong + Matrix(A.to(dtype)), largest=False),
        lambda: pmaf.certify(pmaf.SphereLeastSquares(wrong, b), y),
        lambda: pmaf.certify(pmaf.PrincipalEigenvectors(wrong, symmetric=False), y),
        lambda: pmaf.certify(pmaf.PrincipalEigenvectors(Gram(data)), y),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"is not the transpose of its matvec.*correct it"):
            call()


def test_a_wrong_transpose_of_one_batch_entry_is_found_out():
    A = randn(5, 12, 12)
    B = A.clone()
    B[3] = -B[3]
    with pytest.raises(ValueError, match="is not the transpose"):
        pmaf.less(mirrored(A, B, lambda x: x), randn(5, 12, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_right_transpose_is_not_accused(dtype):
    for seed in range(20):
        for shape in ((12, 12), (40, 300), (3, 20, 30)):
            A = randn(*shape, seed=seed) * torch.logspace(-6, 0, shape[-1], dtype=F64)
            b = torch.ones(*shape[:-1], dtype=dtype)
            operator = mirrored(A, A, lambda x: x, dtype)
            problem = pmaf.SphereLeastSquares(operator, b)
            pmaf.certify(problem, pmaf.less(A.to(dtype), b))


@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
def test_products_in_short_floats_are_not_accused():
    """They are what they are: of as few digits from both sides."""
    M = randn(200, 200, dtype=torch.float32)
    M = M + M.mT
    A = FromMatvec(lambda u: (u @ M).half().float(), (200, 200), rmatvec=lambda u: u @ M)
    pmaf.ied(A)
    M64 = M.double()
    single = FromMatvec(
        lambda u: (u.float() @ M).double(), (200, 200), rmatvec=lambda u: u @ M64, dtype=F64
    )
    pmaf.ied(single, solver=Krylov(tolerance=1e-6))


class Bare(pmaf.operators.Operator):
    """Of somebody else: with its own rmatvec, or without one and said to be symmetric."""

    def __init__(self, A, symmetric=False):
        self.A, self.symmetric = A, symmetric

    @property
    def shape(self):
        return self.A.shape

    @property
    def tensors(self):
        return (self.A,)

    def with_tensors(self, tensors):
        return type(self)(*tensors, self.symmetric)

    def matvec(self, rows):
        return rows @ self.A.mT


class Own(Bare):
    def rmatvec(self, rows):
        return rows @ self.A.mT


class Mended(Matrix):
    """One of the library's, with something of somebody else."""

    def rmatvec(self, rows):
        return 2 * super().rmatvec(rows)

    def with_tensors(self, tensors):
        return Mended(*tensors)


def test_classes_of_users_are_asked_as_well():
    A = randn(9, 9)
    with pytest.raises(ValueError, match="is not the transpose"):
        pmaf.less(Mended(A), randn(9))
    for call in (
        lambda: pmaf.ied(Bare(A, symmetric=True)),
        lambda: pmaf.ied(3 * Bare(A, symmetric=True) + Matrix(A)),
        lambda: pmaf.less(Bare(A, symmetric=True), randn(9)),
    ):
        with pytest.raises(ValueError, match=r"says that it is symmetric and is not.*implement rm"):
            call()
    with pytest.raises(ValueError, match="is not the transpose"):
        pmaf.ied(Own(A), symmetric=False)
    S = A + A.mT
    for operator in (Bare(S, symmetric=True), Own(S)):
        torch.testing.assert_close(pmaf.ied(operator).values, pmaf.ied(S).values)


def test_only_what_is_taken_on_trust_is_asked():
    """Of the library's own operators every product counts."""
    for operator in (
        Gram(randn(9, 4)),
        Matrix(randn(4, 4)),
        Diagonal(randn(4)) - Matrix(randn(4, 4)),
    ):
        assert not list(operator.claims())
    calls = []

    def matvec(u):
        calls.append("A")
        return 2 * u

    def rmatvec(u):
        calls.append("Aᵀ")
        return 2 * u

    pmaf.ied(FromMatvec(matvec, (40, 40), rmatvec=rmatvec))
    assert calls.count("Aᵀ") == 1
