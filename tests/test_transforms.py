"""Every cell of the table in `tests/transforms.py`, and what does not fit into it."""

import dataclasses
import io
import logging
from pathlib import Path

import pytest
import torch

import pmaf
from pmaf import native
from pmaf.autograd.attach import Search
from pmaf.solvers import Dense, Lanczos, ProjectedGradient, Secular, Solver
from pmaf.tangent.complement import COMPLEMENT
from tests.compilers import HAS_COMPILER
from tests.transforms import (
    COLUMNS,
    GENERATED,
    ROWS,
    Column,
    check_compile,
    check_module_step,
    excused,
    page,
)

pytestmark = [
    # Tracing and compiling raise torch's own deprecation warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch compiles no code for complex numbers, and runs its own kernels.
    pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    # One of the solvers takes all its steps, and says so.
    pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning"),
]


def cells():
    for row in ROWS:
        for column in COLUMNS:
            short = not row.sampled or column.name in GENERATED or excused(row, column)
            marks = () if short else pytest.mark.long
            yield pytest.param(row, column, id=f"{row.name}-{column.name}", marks=marks)


@pytest.mark.parametrize(("row", "column"), list(cells()))
def test_cell(row, column, caplog):
    if not excused(row, column):
        caplog.set_level(logging.DEBUG, logger="pmaf")
        row.check(column)
        if column.takes is not None:
            ways = [x.getMessage() for x in caplog.records if x.name == "pmaf"]
            solves = {way for way in ways if way.startswith(column.takes.split(":")[0])}
            known = {column.takes, column.takes_forward if row.forward else column.takes}
            assert column.takes in solves
            assert solves <= known
        return
    with pytest.raises(Exception, match=r"eager mode only|rule for reverse mode|complex64 or"):
        row.check(column)


@pytest.mark.long
@pytest.mark.skipif(not HAS_COMPILER, reason="torch generates code for a C++ compiler")
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_generated_code(column):
    if column.eager_only:
        pytest.skip("a layer that is for eager mode only")
    check_compile(column, "inductor")
    check_module_step(column, "inductor")


# Kernels solve these in single precision, and keep nothing for the traced backward pass.
SINGLE = [column for column in COLUMNS if column.name.startswith("nullspace")]


@pytest.mark.parametrize("column", SINGLE, ids=lambda column: column.name)
def test_dynamic_shapes_in_single_precision(column):
    single = dataclasses.replace(
        column, inputs=lambda: tuple(x.float() for x in column.inputs()), tolerance=1e-3
    )
    check_compile(single, "aot_eager")


def test_columns_with_generated_code_exist():
    assert set(GENERATED) <= {column.name for column in COLUMNS}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_torchscript_is_refused_before_anything_runs(column, caplog):
    """A trace of TorchScript would record the results of kernels as constants."""
    caplog.set_level(logging.DEBUG, logger="pmaf")
    inputs = column.inputs()
    for call in (
        column.call,
        column.module(),
        lambda *inputs: column.call(*(x[0] for x in inputs)),  # one entry of the batch
        lambda *inputs: column.call(*(x.float() for x in inputs)),
        lambda *inputs: column.loss(*(x.requires_grad_() for x in inputs)),
    ):
        with pytest.raises(RuntimeError, match=r"TorchScript.* torch\.compile, or torch\.export"):
            torch.jit.trace(call, inputs, check_trace=False)
    assert not [x for x in caplog.records if x.name == "pmaf"]
    # Nothing of a trace is remembered.
    column.call(*inputs)


def test_torchscript_refuses_operators_problems_and_onnx():
    X = torch.randn(6, 4)
    known = pmaf.PrincipalEigenvectors(X.mT @ X)
    calls = (
        lambda X: pmaf.ied(pmaf.operators.Gram(X)).vectors,
        lambda X: pmaf.ied(X.mT @ X, M=pmaf.operators.Diagonal(X[0].square())).vectors,
        lambda X: pmaf.ied((X.mT @ X).to_sparse()).vectors,
        lambda X: pmaf.isvd(pmaf.operators.Matrix(X)).left,
        lambda X: pmaf.spectral(X.mT @ X, "exp", 2),
        lambda X: pmaf.solve(pmaf.SpectralFunction(X.mT @ X, "exp")).value,
        lambda X: X * pmaf.solve(known).value,
        lambda X: X * pmaf.certify(known, X[0]).optimality,
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="TorchScript"):
            torch.jit.trace(call, (X,), check_trace=False)
    # Other exporters trace in another way.
    with pytest.raises(RuntimeError, match="TorchScript"):
        torch.onnx.export(pmaf.ISVD(2), (X,), io.BytesIO(), dynamo=False)


def test_the_page_in_the_docs_is_this_table():
    path = Path(__file__).parent.parent / "docs" / "transforms.md"
    assert path.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize(
    "column",
    [column for column in COLUMNS if column.name in ("less", "ied")],
    ids=lambda column: column.name,
)
def test_vmap_is_one_batched_solve(column: Column, monkeypatch):
    eigenvectors = pmaf.solvers.Reduction if native.available else pmaf.solvers.Dense
    kind = {"less": pmaf.solvers.Secular, "ied": eigenvectors}[column.name]
    solve, calls = kind.solve, []

    def counted(self, problem, **options):
        calls.append(problem.batch_shape)
        return solve(self, problem, **options)

    monkeypatch.setattr(kind, "solve", counted)
    torch.func.vmap(torch.func.grad(column.loss))(*column.inputs())
    assert calls == [torch.Size([4])]


def test_a_gradient_nobody_asked_for_is_not_computed(monkeypatch):
    A, b = torch.randn(5, 3), torch.randn(5, requires_grad=True)

    def never(*_, **__):
        raise AssertionError("the gradient of A was formed")

    monkeypatch.setattr("pmaf.gradients.minimum.outer_sum", never)
    pmaf.less(A, b, solver=Secular()).sum().backward()
    with pytest.raises(AssertionError, match="was formed"):
        pmaf.less(A.requires_grad_(), b, solver=Secular()).sum().backward()


def least_squares(A):
    return pmaf.SphereLeastSquares(A[..., :2], A[..., 0])


def eigenvectors(A, k=2, symmetric=True):
    return pmaf.PrincipalEigenvectors(A if symmetric else A.abs(), k, symmetric=symmetric)


@pytest.mark.parametrize(
    ("pose", "solver"),
    [
        (least_squares, Secular()),
        (least_squares, ProjectedGradient()),
        (eigenvectors, Dense()),
        (lambda A: eigenvectors(A, 1, False), Dense()),
        (lambda A: eigenvectors(A, 1), Lanczos()),
    ],
    ids=lambda x: repr(x) if isinstance(x, Solver) else "",
)
def test_opcheck(pose, solver):
    A = torch.randn(3, 4, 4, dtype=torch.float64)
    problem = pose(A + A.mT)
    first, second = (*problem.tensors, None)[:2]
    call = Search.text(problem, solver, True, False)
    torch.library.opcheck(torch.ops.pmaf.solve.default, ([first, second, None], call))


def test_opcheck_of_the_system_of_a_gradient():
    A = torch.randn(3, 4, 4, dtype=torch.float64)
    given = [A + A.mT, A[..., :1, 0] + 9, A[..., :1, :], A[..., :1, :].clone()]
    torch.library.opcheck(torch.ops.pmaf.solve.default, (given, COMPLEMENT))


@pytest.mark.parametrize("report", [True, False])
@pytest.mark.parametrize("solver", [Dense(), Lanczos()], ids=repr)
def test_outputs_of_an_operator_are_its_own(solver, report):
    """A compiler may write into them: what stands in place of a report must not be remembered."""
    A = torch.randn(3, 4, 4, dtype=torch.float64)

    def run():
        call = Search.text(pmaf.PrincipalEigenvectors(A, 2), solver, report, False)
        return torch.ops.pmaf.solve([A, None, None], call)

    first = run()
    full = [x for x in first if x.numel()]
    assert len({x.untyped_storage().data_ptr() for x in full}) == len(full)
    kept = [x.clone() for x in first]
    for x in first:
        x.fill_(7)
    for x, y in zip(run(), kept):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


class _Solutions(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        torch.set_num_threads(1)
        g = torch.Generator().manual_seed(i)
        A, b = torch.randn(5, 3, generator=g), torch.randn(5, generator=g)
        return pmaf.less(A, b), pmaf.ied(A.mT @ A).vectors


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers(context):
    loader = torch.utils.data.DataLoader(
        _Solutions(), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    (found,) = loader
    expected = [torch.stack(parts) for parts in zip(*(_Solutions()[i] for i in range(4)))]
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("layer", ["ied", "less", "nullspace"])
def test_second_derivatives_inside_a_trace_are_an_error(layer):
    """A trace would record zeros for them."""
    A, b = torch.diag(torch.tensor([3.0, 2.0, 1.0])) + 0.1, torch.ones(3)

    def loss(A):
        A = 2 * A
        if layer == "ied":
            return pmaf.ied(A).vectors[0]
        return pmaf.less(A, b)[0] if layer == "less" else pmaf.nullspace(A)[0]

    torch._dynamo.reset()
    second = torch.func.jacrev(torch.func.jacrev(loss))
    assert second(A).abs().max() > 0
    with pytest.raises(Exception, match="cannot trace second derivatives"):
        torch.compile(second, fullgraph=True, backend="eager")(A)
