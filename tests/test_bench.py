"""`pmaf bench`: fair races, honest errors, every family and competitor."""

import json
import re
from dataclasses import replace

import pytest
import torch

from pmaf.solvers import Cholesky, Secular, adaptive
from pmaf_lab.bench import BENCHMARKS, eigen, least_squares
from pmaf_lab.bench.eigen import EigenRace
from pmaf_lab.bench.families import EIGEN, GENERAL, SQUARES
from pmaf_lab.bench.general import GeneralRace
from pmaf_lab.bench.growth import Growth, Sweep, growth_findings
from pmaf_lab.bench.memory import MemoryRace
from pmaf_lab.bench.race import Competitor, Race, race
from pmaf_lab.experiments import Row
from pmaf_lab.experiments.plots import DARK, drawn, picture
from pmaf_lab.paper import less as paper

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
    competitors["s"] = Competitor(runner("s"), needs="scipy")
    competitors["c"] = Competitor(runner("c"), largest=3)
    found = race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=1e9, repeats=2, turn=0)
    turn = ["a", "a", "b", "b", "c", "c"]
    assert order == ["a", "b", "bad", "s", "c", *turn * 2, "s", "s", "s", "s"]
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
    assert len(count) == 1


def test_times_are_medians_of_the_runs_that_fit_the_budget(monkeypatch):
    """The first run warms up, and so does the one before the first that counts."""
    runs = [(9.0, 9.0), (9.0, 9.0), (1.0, 10.0), (2.0, 20.0), (6.0, 60.0), (7.0, 70.0)]
    clock = iter([spent for run in runs for spent in run])
    monkeypatch.setattr("pmaf_lab.bench.race.seconds", lambda run, device: run() or next(clock))
    x = torch.ones(3, requires_grad=True)
    competitors = {"a": Competitor(lambda x: (2 * x,))}
    found = race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=100, repeats=9, turn=0)
    assert found["a"]["forward"] == 4
    assert found["a"]["backward"] == 40
    assert next(clock, None) is None


def test_one_run_that_was_held_up_does_not_count_alone(monkeypatch):
    """A run takes a second, but the first that counts takes as long as all have time for."""
    clock = iter([0.5, 0.5, 0.5, 0.5, 99.0, 99.0, 0.5, 0.5, 0.5, 0.5])
    monkeypatch.setattr("pmaf_lab.bench.race.seconds", lambda run, device: run() or next(clock))
    x = torch.ones(3, requires_grad=True)
    competitors = {"a": Competitor(lambda x: (2 * x,))}
    found = race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=100, repeats=9, turn=0)
    assert found["a"]["forward"] == found["a"]["backward"] == 0.5
    assert next(clock, None) is None


def test_times_are_compared_within_a_round(monkeypatch):
    """The machine is three times slower in the second of three rounds, and in half of the first."""
    # Two runs of each warm up.
    speed = {"a": iter([9.0, 9.0, 1.0, 3.0, 1.0]), "b": iter([9.0, 9.0, 6.0, 6.0, 2.0])}
    current = []

    def seconds(run, device):
        run()
        return current[-1]

    def solve(name):
        return lambda x: current.append(next(speed[name])) or (2 * x,)

    monkeypatch.setattr("pmaf_lab.bench.race.seconds", seconds)
    x = torch.ones(3, requires_grad=True)
    competitors = {name: Competitor(solve(name)) for name in "ab"}
    found = race(competitors, (x,), lambda out: out[0].sum(), CPU, budget=1e9, repeats=3, turn=0)
    assert found["a"]["forward"] == 1
    # Its ratios are 6, 2 and 2; its median alone is 6.
    assert found["b"]["forward"] == 2
    assert found["b"]["backward"] == 2


def test_a_turn_of_short_runs_has_several(monkeypatch):
    """The first run of a turn does not count, and the loss is not part of any."""
    order = []
    competitors = {
        name: Competitor(lambda x, name=name: order.append(name) or (2 * x,)) for name in "ab"
    }
    monkeypatch.setattr("pmaf_lab.bench.race.seconds", lambda run, device: run() or 0.002)
    x = torch.ones(3, requires_grad=True)

    def loss(outputs):
        order.append("loss")
        return (outputs[0] * torch.tensor([1.0, 2.0, 3.0])).sum()

    found = race(competitors, (x,), loss, CPU, budget=1e9, repeats=2, turn=0.01)
    # A run takes 4 ms; after the one that warms up, three exceed 10 ms.
    assert order == ["a", "loss", "b", "loss", *"aaaabbbbaaaabbbb"]
    assert torch.equal(found["a"]["gradients"][0], torch.tensor([2.0, 4.0, 6.0]))


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


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("family", EIGEN)
def test_the_truth_about_eigenvectors_is_that_of_autograd(family, k):
    A = EIGEN[family](2, 7, torch.Generator().manual_seed(0)).double().requires_grad_()
    c = torch.linspace(-1, 1, 7).double()
    truth = eigen.symmetric_truth(A.detach(), c, k)
    vectors = torch.linalg.eigh(A).eigenvectors[..., -k:].flip(-1)
    (G,) = torch.autograd.grad(eigen._loss(vectors, c), A)
    if not G.isfinite().all():
        pytest.skip("eigh's own derivative is not finite where eigenvalues repeat")
    torch.testing.assert_close(truth["gradient"], 0.5 * (G + G.mT), rtol=1e-6, atol=1e-9)


def derivative(function, x):
    """Of a real function of `x`, by central differences; in torch's convention if complex."""
    found, step = torch.zeros_like(x), 1e-6
    for i in range(x.numel()):
        for unit in (1, 1j) if x.is_complex() else (1,):
            move = torch.zeros_like(x)
            move.view(-1)[i] = unit * step
            found.view(-1)[i] += unit * (function(x + move) - function(x - move)) / (2 * step)
    return found


@pytest.mark.parametrize("name", ["nullspace", "pairs", "hermitian", "pool"])
def test_the_truth_about_other_problems_is_that_of_differences(name):
    (race,) = BENCHMARKS.choose([name])
    task = race.task(
        race.families[-1], {"nullspace": [1, 7, 5], "pool": [1, 4, 6]}.get(name, [1, 5]), CPU
    )
    wide = [x.detach().to(torch.promote_types(x.dtype, torch.float64)) for x in task.inputs]
    c = task.c.double()
    _, gradient, simple = race.exact(tuple(wide), c)
    assert simple.all()

    def loss(x):
        x = 0.5 * (x + x.mH) if race.hermitian else x
        y, _, _ = race.exact((x, *wide[1:]), c)
        return float(race.loss((y,), c))

    wanted = derivative(loss, wide[0])
    assert (gradient - wanted).norm() <= 1e-6 * wanted.norm()


# One small shape of every race.
RACES = {
    "less": [2, 6, 3],
    "less-users": [2, 6, 3],
    "less-crossover": [2, 6, 3],
    "ied": [2, 20],
    "ied-users": [2, 20],
    "ied-users-k": [2, 20],
    "ied-k": [2, 20],
    "ied-nonsymmetric": [2, 20],
    "ied-crossover": [2, 40],
    "nullspace": [2, 8, 9],
    "pairs": [2, 12],
    "hermitian": [2, 6],
    "pool": [2, 9, 12],
}


@pytest.mark.parametrize(("name", "shape"), RACES.items(), ids=RACES)
def test_a_cell_of_every_family_and_the_report_of_them(name, shape):
    (race,) = BENCHMARKS.choose([name])
    rows = []
    for family in race.families:
        params = {"family": family, "shape": shape, "budget": 1e-9}
        values = race.measure(CPU, **params)
        assert json.loads(json.dumps(values)) == values
        ours = values["ours"]
        assert ours["forward"] > 0
        assert set(ours) >= {"forward", "backward", *race.errors}
        # A relative gap of 1e-4 amplifies the rounding of float32 by as much, twice; those of
        # k vectors are smaller than that of one.
        bound = {"gap-1e-4": 2e-2}.get(family, 5e-3 if name == "ied-k" else 1e-3)
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
        # One for each family, and a summary for each pass that is compared.
        assert len(section.tables) == len(part) + bool(part) * len(race.compared)


def test_who_is_wrong_or_absent_is_said():
    (race,) = BENCHMARKS.choose(["ied"])
    right = {"forward": 1.0, "backward": 1.0, **dict.fromkeys(race.errors, 1e-6)}
    wrong = right | {"vector error": 0.5}
    nan = right | {"gradient error": None}
    values = dict.fromkeys(race.competitors, right)
    values |= {"unrolled PI": wrong, "lobpcg": nan, "xitorch": {"skipped": "not installed"}}
    row = Row({"family": "goe", "shape": [5, 20], "budget": 1.0}, "done", values)
    section = race.present([row])
    (table,) = [table for table in section.tables if table.name == "bench-ied-goe"]
    (line,) = table.frame.to_dict("records")
    found = {label: cell for (group, label), cell in line.items() if group.startswith("time")}
    assert found["eigh"] == "1.00"
    assert found["unrolled PI"] == found["lobpcg"] == "1.00 ≠"
    assert found["xitorch"] is None
    assert section.notes == ["xitorch is left out of 1 of 1 cells: not installed."]


def test_all_races_are_tested():
    raced = {experiment.name for experiment in BENCHMARKS.experiments}
    assert raced == {*RACES, "less-memory", "ied-memory", "graphs", "pca", "calls", "traces"}


def test_the_cells_of_a_race_are_what_its_figures_and_fits_are_made_of():
    for experiment in BENCHMARKS.experiments:
        for scale in ("quick", "full"):
            cells = experiment.cells(scale)
            assert len({cell.key for cell in cells}) == len(cells)
            if isinstance(experiment, Race):
                rows = [Row(cell.params, "done", {}) for cell in cells]
                panel = experiment.panel.of(rows)
                assert panel or scale == "quick"
                (batch,) = re.findall(r"\b\d+\b", experiment.panel.label)
                assert {row.params["shape"][0] for row in panel} <= {int(batch)}
        for sweep in getattr(experiment, "sweeps", ()):
            sizes = {sweep.size(row.params["shape"]) for row in sweep.of(rows)}
            assert len(sizes) > 2, sweep.label


def _timed(size: int, ours: float, theirs: float) -> Row:
    values = {
        "ours": {"forward": ours / size, "backward": ours - ours / size},
        "eigh": {"forward": theirs, "backward": 0.0},
    }
    return Row({"shape": [5, size]}, "done", values)


def test_growth_is_the_exponent_of_the_times_and_a_faster_one_is_not_hidden():
    sweep = Sweep("n from 4", lambda size: size[1] >= 4)
    rows = [_timed(n, 3e-5 * n**2.0, 1e-6 * n**1.5) for n in (2, 16, 4, 8)]
    growth = Growth.of(sweep, "any", rows, "eigh")
    assert growth.sizes == [4, 8, 16]
    assert growth.ours == pytest.approx(2)
    assert growth.other == pytest.approx(1.5)
    (finding,) = growth_findings("a race", [growth], "eigh")
    assert finding.holds is False
    assert "2.00 beside 1.50 (any, n from 4)" in finding.found
    slower = replace(growth, ours=1.0)
    assert growth_findings("a race", [slower], "eigh")[0].holds is True
    equal = replace(growth, ours=growth.other)
    assert growth_findings("a race", [equal], "eigh")[0].holds is True
    steep = replace(growth, ours=3.0, other=3.5)
    assert growth_findings("a race", [slower, growth, steep], "eigh") == [finding]
    assert Growth.of(sweep, "any", rows[:3], "eigh") is None


def test_a_race_is_held_against_its_second_competitor():
    (race,) = BENCHMARKS.choose(["ied"])
    rows = []
    for n in (8, 16, 32):
        values = {name: {"forward": 1.0, "backward": 1.0} for name in race.competitors}
        values |= _timed(n, n**2.0, 64.0 * n).values
        params = {"family": "goe", "shape": [5, n], "budget": 1.0}
        rows.append(Row(params, "done", values))
    section = race.present(rows)
    tables = {table.name: table.frame.to_numpy().tolist() for table in section.tables}
    assert tables["bench-ied-both-5"] == [["goe", 8.0, 4.0, 2.0]]
    ((*words, ours, eigh),) = tables["bench-ied-growth"]
    assert words == ["goe", "n to 64, batch 5", 8, 32]
    assert (ours, eigh) == (pytest.approx(2), pytest.approx(1))
    (finding,) = [finding for finding in section.findings if "growth" in finding.claim]
    assert finding.found == "2.00 beside 1.00 (goe, n to 64, batch 5)"
    assert finding.holds is False


@pytest.mark.parametrize("n", [32, 256])
def test_each_way_of_a_crossover_is_the_one_it_is_named_after(n, monkeypatch):
    tried = []
    named = {"dominant": "dominant", "dominant_of_sum": "dominant", "_krylov": "_krylov"}
    for name, way in named.items():
        monkeypatch.setattr(adaptive, name, lambda *_, way=way, **__: tried.append(way))
    (race,) = BENCHMARKS.choose(["ied-crossover"])
    A = EIGEN["goe"](5, n, torch.Generator().manual_seed(0))
    for way, names in {"dense": [], "power": ["dominant"], "krylov": ["_krylov"]}.items():
        tried.clear()
        race.competitors[way].solve(A)
        assert tried == names, way


def test_each_solver_of_the_crossover_of_least_squares_is_its_own(monkeypatch):
    tried = []

    def watched(solver, solve):
        return lambda self, *args, **options: tried.append(solver) or solve(self, *args, **options)

    for solver in (Cholesky, Secular):
        monkeypatch.setattr(solver, "solve", watched(f"{solver.__name__}()", solver.solve))
    (race,) = BENCHMARKS.choose(["less-crossover"])
    A, b = SQUARES["outer"](2, 32, 16, torch.Generator().manual_seed(0))
    for name in ("Cholesky()", "Secular()"):
        tried.clear()
        race.competitors[name].solve(A, b)
        assert tried[0] == name


def linear_systems_are_solved(*shape):
    """With more threads than cores MKL's factorisation of a batch fails, and so does torch."""
    A = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(0))
    try:
        torch.linalg.solve(A, A)
    except RuntimeError as error:
        return "Pivots given to lu_solve" not in str(error)
    return True


def test_memory_is_a_multiple_of_the_inputs():
    memory = MemoryRace(EigenRace(), {"quick": [(2, 300)]})
    rows = [
        Row(cell.params, "done", memory.measure(CPU, **cell.params))
        for cell in memory.cells("quick")
    ]
    found = {row.params["competitor"]: row.values for row in rows}
    assert json.loads(json.dumps(found)) == found
    # eigh keeps all vectors, its derivative builds several matrices.
    assert found["eigh"]["forward"] >= 1
    assert found["eigh"]["backward"] > 2
    assert 1 <= found["ours"]["backward"] <= 2
    assert 0.5 < found["scipy eigh"]["forward"] < 10
    assert found["scipy eigh"]["backward"] is None
    if linear_systems_are_solved(2, 300):
        assert "skipped" not in found["PI-IFT-E"]
    section = memory.present(rows)
    assert section.findings[0].holds is True
    assert memory.present([]).tables == []


def test_memory_of_what_cannot_run_is_said():
    (memory,) = BENCHMARKS.choose(["ied-memory"])
    found = memory.measure(CPU, shape=[1, 2], competitor="lobpcg")
    assert "skipped" in found
    section = memory.present([Row({"shape": [1, 2], "competitor": "lobpcg"}, "done", found)])
    assert section.findings == ()


def test_every_competitor_solves_the_problem():
    A = EIGEN["spiked"](2, 12, torch.Generator().manual_seed(0)).requires_grad_()
    value = torch.linalg.eigvalsh(A.detach().double())[:, -1]
    for name, competitor in eigen.COMPETITORS.items():
        found = competitor.solve(A)[0].detach().double().reshape(2)
        torch.testing.assert_close(found, value, rtol=1e-4, atol=0, msg=name)
    general = GENERAL["spiked"](2, 12, torch.Generator().manual_seed(0)).requires_grad_()
    value = torch.linalg.eigvals(general.detach().double()).real.amax(-1)
    for name, competitor in GeneralRace.competitors.items():
        found = competitor.solve(general)[0].detach().double()
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
