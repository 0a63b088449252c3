"""The appendix table of the paper: ours beside the published code's counts."""

import functools
import math

import numpy as np
import pytest
import torch

import pmaf
from pmaf_lab.paper import less as paper
from pmaf_lab.paper import published

SIZE = {(2, 2): 1000, (64, 32): 1000, (1024, 256): 100}
INNER = {(2, 2): 282, (64, 32): 555, (1024, 256): 1000}
# One group a size: the tests of a group run in one worker and share the SLSQP runs.
SIZES = [
    pytest.param((2, 2), marks=pytest.mark.xdist_group("2x2")),
    pytest.param((64, 32), marks=pytest.mark.xdist_group("64x32")),
    pytest.param((1024, 256), marks=pytest.mark.long),
]

pytestmark = pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_the_inner_outer_split_is_the_papers(size):
    assert int(paper.is_inner(paper.problems(*size)).sum()) == INNER[size]


@functools.cache
def scipy_reference(size):
    """The problems of a size and what SLSQP makes of them, once."""
    problem = paper.problems(*size, range(SIZE[size]))
    return problem, paper.scipy_points(problem)


def nearby(problem, count):
    """Copies of a problem with each number moved by one rounding up, down or not at all."""
    for seed in range(count):
        g = torch.Generator().manual_seed(seed)
        yield pmaf.SphereLeastSquares(
            *(
                x + x * torch.finfo(x.dtype).eps * torch.randint(-1, 2, x.shape, generator=g)
                for x in (problem.A, problem.b)
            )
        )


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_every_row_of_the_table(size):
    problem, points = scipy_reference(size)
    reference = problem.objective(points.to(problem.A.dtype))
    count = SIZE[size]
    inner = paper.is_inner(problem)
    rows = {}
    for name, method in paper.METHODS.items():
        solution = pmaf.solve(problem, solver=method)
        objective = problem.objective(solution.value)
        rows[name] = paper.table_row(objective, solution.iterations, inner, reference)
    # One 2x2 problem with a tiny objective moves the mean of a method that fails on it, and
    # where such a run ends is up to rounding: the published mean is one draw of many.
    draws = {name: [row.mean_relative_error] for name, row in rows.items()}
    for moved in nearby(problem, 7) if size == (2, 2) else ():
        for name, method in paper.METHODS.items():
            objective = problem.objective(pmaf.less(moved.A, moved.b, solver=method))
            error = pmaf.metrics.mean_relative_error(objective.double(), reference.double())
            draws[name].append(float(error))
    table = published.table("less_table").set_index(["m", "n", "method"])
    released = {name: table.loc[(*size, name)].filter(like="code_").tolist() for name in rows}
    assert {found[0] for found in released.values()} == {count}
    print(f"\n{size[0]}x{size[1]}, ours / published: In, Out, Imp., MRE in percent")
    for name, row in rows.items():
        print(f"{name:18}", row, released[name][1:])
    for name, row in rows.items():
        _, inner, outer, improved, error = released[name]
        # Runs that end near the limit move with rounding: rows with DW at 64x32, and all of
        # them at 1024x256, where the published code and the paper differ by as much.
        moves = size == (1024, 256) or ("DW" in name and size == (64, 32))
        bound = (0.08 if moves else 0.03) * count
        if name == "PGD+RM+BLSOne+DW" and size == (1024, 256):
            # The published code fails on 10 of 100 here and the paper on 984 of 1000: this
            # row stops, or not, at the last step.
            bound = count
        assert abs(row.failed_inner - inner) <= bound, name
        assert abs(row.failed_outer - outer) <= bound, name
        assert abs(row.improved - improved) <= bound, name
        if size != (2, 2):
            assert row.mean_relative_error == pytest.approx(error, rel=0.25, abs=0.002), name
            continue
        # They are published to three digits, and none after the fourth decimal.
        last_digit = max(10.0 ** (math.floor(math.log10(error)) - 2), 1e-4)
        spread = np.std(draws[name], ddof=1) * (1 + 1 / len(draws[name])) ** 0.5
        assert abs(np.mean(draws[name]) - error) <= 0.5 * last_digit + 4 * spread, name


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_auto_is_the_global_minimum_on_all_of_them(size):
    problem, points = scipy_reference(size)
    exact = pmaf.SphereLeastSquares(problem.A.double(), problem.b.double())
    solution = pmaf.solve(exact, throw=True)
    certificate = pmaf.certify(exact, solution)
    assert solution.residual.max() <= 1e-12
    assert certificate.stationarity.max() <= 1e-12
    assert (solution.gap >= 0).all()
    assert certificate.holds(1e-12).all()
    assert certificate.feasibility.max() <= 4 * torch.finfo(torch.float64).eps
    best = exact.objective(solution.value)

    others = {name: pmaf.less(exact.A, exact.b, solver=x) for name, x in paper.METHODS.items()}
    for name, value in {"SciPy": points, **others}.items():
        assert (best <= exact.objective(value) * (1 + 1e-12)).all(), name

    single = pmaf.solve(problem, throw=True)
    objective = exact.objective(single.value.double())
    error = (objective - best) / best
    # Rounding the exact solution to float32 already costs more than 1e-5 of the objective
    # on one of the 2x2 problems, whose minimum is 1e-7.
    rounded = (exact.objective(solution.value.float().double()) - best) / best
    reachable = rounded.abs() <= 1e-5
    assert reachable.sum() >= reachable.numel() - 1
    assert (error[reachable].abs() <= 1e-5).all()
    assert (error[~reachable].abs() <= rounded[~reachable].abs()).all()
    assert (single.gap >= 0).all()


def test_a_first_order_method_can_end_in_a_local_minimum_and_ours_does_not():
    """The published finding behind `gap`: TWD is above the minimum on some 2x2 problems."""
    problem = paper.problems(2, 2)
    exact = pmaf.SphereLeastSquares(problem.A.double(), problem.b.double())
    best = exact.objective(pmaf.less(exact.A, exact.b))
    method = paper.METHODS["PGD+RM+TWD"]
    reached = exact.objective(pmaf.less(problem.A, problem.b, solver=method).double())
    above = (reached - best) / best
    assert 80 <= int((above > 1e-5).sum()) <= 130
    assert int((above > 1e-3).sum()) >= 1


def test_paths_start_and_end_on_the_circle():
    problem = paper.example()
    for name, method in paper.METHODS.items():
        points = paper.path(problem, method)
        steps = int(pmaf.solve(problem, solver=method).iterations)
        assert len(points) == 2 * steps + 1, name
        np.testing.assert_allclose(points[[0, -1]].norm(dim=-1), 1, atol=1e-6)


def test_workers_share_the_runs_of_scipy():
    problem = paper.problems(6, 3, range(5))
    torch.testing.assert_close(paper.scipy_points(problem, 2), paper.scipy_points(problem))
