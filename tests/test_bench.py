"""`pmaf bench`: fair races, honest errors, every family and competitor."""

import json

import pytest
import torch

from pmaf.bench import BENCHMARKS, eigen, least_squares
from pmaf.bench.families import EIGEN, SQUARES
from pmaf.bench.race import Competitor, race
from pmaf.experiments import Row
from pmaf.experiments.plots import DARK, drawn, picture
from pmaf.paper import less as paper

# A first-order method that stops early is what some of the races show.
pytestmark = pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
CPU = torch.device("cpu")


def test_a_race_is_run_in_turn_and_nobody_ends_it():
    order = []

    def runner(name, fails=False):
        def solve(x):
            order.append(name)
            if fails:
                raise RuntimeError("fell\nover")
            return (2 * x,)

        return solve

    competitors = {
        "a": Competitor(runner("a")),
        "b": Competitor(runner("b"), differentiable=False),
        "bad": Competitor(runner("bad", fails=True)),
        "absent": Competitor(runner("absent"), needs="no_such_module"),
        "slow": Competitor(runner("slow"), largest=2),
    }
    x = torch.ones(3, requires_grad=True)
    found = race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=1e9, repeats=2)
    assert order == ["a", "b", "bad", "a", "b", "a", "b"]
    assert found["bad"] == {"skipped": "RuntimeError: fell"}
    assert found["absent"] == {"skipped": "no_such_module is not installed"}
    assert found["slow"] == {"skipped": "takes minutes at this size"}
    assert found["b"]["backward"] is None
    assert torch.equal(found["a"]["gradients"][0], torch.full((3,), 2.0))


def test_a_slow_competitor_is_run_once():
    count = []
    competitors = {"a": Competitor(lambda x: count.append(1) or (x,))}
    x = torch.ones(3, requires_grad=True)
    race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=1e-12, repeats=9)
    assert len(count) == 2  # once for its result, once for its time


@pytest.mark.parametrize("family", EIGEN)
@pytest.mark.parametrize("n", [2, 9])
def test_eigen_families_are_symmetric_and_reproducible(family, n):
    A, again = (EIGEN[family](3, n, torch.Generator().manual_seed(4)) for _ in range(2))
    assert A.shape == (3, n, n)
    assert torch.equal(A, A.mT)
    assert torch.equal(A, again)
    assert A.isfinite().all()


def test_families_have_the_gaps_they_are_named_after():
    for name, gap in (("gap-0.3", 0.3), ("gap-1e-2", 1e-2), ("gap-1e-4", 1e-4)):
        values = torch.linalg.eigvalsh(EIGEN[name](2, 20, torch.Generator()).double())
        torch.testing.assert_close(
            values[:, -1] - values[:, -2], torch.full((2,), gap).double(), rtol=0.02, atol=0
        )


def test_least_squares_families_are_what_they_are_called():
    sizes = {}
    for family, build in SQUARES.items():
        A, b = (x.double() for x in build(4, 12, 5, torch.Generator().manual_seed(1)))
        sizes[family] = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.squeeze(-1).norm(dim=-1)
        if family == "hard":
            last = torch.linalg.svd(A).Vh[..., -1, :]
            assert ((b.unsqueeze(-2) @ A).squeeze(-2) * last).sum(-1).abs().max() < 1e-4
        if family == "ill-conditioned":
            assert (torch.linalg.cond(A) - 1000).abs().max() < 1
    assert (sizes["inner"] < 1).all()
    assert (sizes["outer"] > 1).all()


@pytest.mark.parametrize("family", EIGEN)
def test_the_truth_about_eigenvectors_is_that_of_autograd(family):
    A = EIGEN[family](2, 6, torch.Generator().manual_seed(0)).double().requires_grad_()
    c = torch.linspace(-1, 1, 6).double()
    truth = eigen._truth(A.detach(), c)
    y = torch.linalg.eigh(A).eigenvectors[..., -1]
    (G,) = torch.autograd.grad((y @ c).square().sum(), A)
    if not G.isfinite().all():
        pytest.skip("eigh's own derivative is not finite where eigenvalues repeat")
    torch.testing.assert_close(truth["gradient"], 0.5 * (G + G.mT), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("race", "shape", "families"),
    [(BENCHMARKS.experiments[1], [2, 20], EIGEN), (BENCHMARKS.experiments[0], [2, 6, 3], SQUARES)],
    ids=["ied", "less"],
)
def test_a_cell_of_every_family_and_the_report_of_them(race, shape, families):
    rows = []
    for family in families:
        params = {"family": family, "shape": shape, "budget": 1e-9}
        values = race.measure(CPU, **params)
        assert json.loads(json.dumps(values)) == values
        ours = values["ours"]
        assert ours["forward"] > 0
        # A relative gap of 1e-4 amplifies the rounding of float32 by as much, twice.
        bound = 2e-2 if family == "gap-1e-4" else 1e-3
        assert max(v for k, v in ours.items() if "error" in k and v is not None) < bound
        skipped = {name: entry["skipped"] for name, entry in values.items() if "skipped" in entry}
        # What a competitor cannot do is said, not hidden: lobpcg needs three times as many
        # rows as vectors, xitorch's backward fails on some.
        assert set(skipped) <= {"lobpcg", "xitorch", "trust-constr"}, skipped
        rows.append(Row(params, "done", values))
    for part in (rows, rows[:1], []):
        section = race.present(part)
        for figure in section.figures:
            with drawn(DARK):
                assert picture(figure.draw(DARK), "png")
        assert len(section.tables) == len(part)


def test_every_competitor_solves_the_problem():
    A = EIGEN["spiked"](2, 12, torch.Generator().manual_seed(0)).requires_grad_()
    value = torch.linalg.eigvalsh(A.detach().double())[:, -1]
    for name, competitor in eigen.COMPETITORS.items():
        found = competitor.solve(A)[0].detach().double()
        torch.testing.assert_close(found, value, rtol=1e-4, atol=0, msg=name)
    # Gaussian problems of this shape are those on which all of the paper's methods converge.
    problem = paper.problems(64, 32, range(3))
    least = problem.objective(least_squares._ours(problem.A, problem.b)[0])
    for name, competitor in least_squares.COMPETITORS.items():
        u = competitor.solve(problem.A, problem.b)[0]
        if name in least_squares.UNCONSTRAINED:
            torch.testing.assert_close(u, problem.unconstrained(), rtol=0, atol=1e-4, msg=name)
        else:
            torch.testing.assert_close(problem.objective(u), least, rtol=1e-4, atol=0, msg=name)
