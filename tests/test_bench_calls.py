"""`pmaf bench calls` and `pmaf bench traces`: the same problem for both, and honest ratios."""

import json
import time

import pytest
import torch

import pmaf
from pmaf_lab.bench import BENCHMARKS, by_hand, calls, traces
from pmaf_lab.bench.calls import CALLS, ERRORS, MANY, THEIRS, CallsRace
from pmaf_lab.bench.families import SQUARES
from pmaf_lab.bench.race import Competitor, race
from pmaf_lab.bench.traces import BEYOND, LATER, Traces
from pmaf_lab.experiments import Row
from pmaf_lab.experiments.measure import seconds

pytestmark = pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
CPU = torch.device("cpu")
# A family of each source whose solution is unique.
UNIQUE = ("outer", "goe", "wishart", "noise", "spiked")
# Of which svd's derivative is wrong or not finite: its matrices are wide.
WRONG = ("nullspace", "solve PrincipalSingularVectors")


def family_of(call):
    (family, *_) = [name for name in UNIQUE if name in call.source.families]
    return family


@pytest.mark.parametrize("name", CALLS)
def test_both_competitors_solve_the_same_problem(name):
    call = CALLS[name]
    shape = [4, *call.source.sizes[1]]
    found = calls._raced(call, family_of(call), shape, CPU, budget=1e-9)
    assert not [entry for entry in found.values() if "skipped" in entry]
    for entry in found.values():
        assert entry["forward"] > 0
        assert entry["backward"] > 0
    dtype = (call.dtype or torch.float32).to_real()
    # Conditions of these matrices, and of AᵀA, take some of the digits.
    bound = 2e4 * torch.finfo(torch.float32 if dtype == torch.bfloat16 else dtype).eps
    bound = max(bound, 4 * torch.finfo(dtype).eps)
    checked = ERRORS[:1] if name.startswith(WRONG) else ERRORS
    assert {error: found["ours"][error] for error in checked if found["ours"][error] > bound} == {}


@pytest.mark.parametrize("family", SQUARES)
@pytest.mark.parametrize("shape", [(3, 3), (8, 9), (20, 9)])
@pytest.mark.parametrize("ball", [False, True])
def test_least_squares_by_hand_find_the_minimum(family, shape, ball):
    A, b = (x.double() for x in SQUARES[family](20, *shape, torch.Generator().manual_seed(3)))
    problem = pmaf.SphereLeastSquares(A, b, 1.0, ball)
    (u,) = by_hand.least_squares(A, b, ball=ball)
    excess = problem.objective(u) - problem.objective(pmaf.solve(problem).value)
    # Of float32, the families are hard only nearly, and steps of a fixed number stop early.
    close = excess / b.square().sum(-1) < torch.finfo(torch.float32).eps ** 0.5
    assert close.float().mean() > 0.9
    length = u.norm(dim=-1)
    assert (length < 1 + 1e-9).all()
    assert ball or (length > 1 - 1e-9).all()


@pytest.mark.parametrize("ball", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_derivative_of_least_squares_by_hand_is_that_of_differences(dtype, ball):
    generator = torch.Generator().manual_seed(2)
    A = torch.randn(2, 5, 3, generator=generator, dtype=dtype)
    b = torch.randn(2, 5, generator=generator, dtype=dtype)
    b = b * torch.tensor([[0.1], [4.0]])  # inside of the ball, and outside
    inside = torch.linalg.lstsq(A, b.unsqueeze(-1)).solution.norm(dim=(-2, -1)) < 1
    assert inside.tolist() == [True, False]
    X = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    options = [dict(ball=ball)]
    if not dtype.is_complex:
        w = 0.5 + torch.rand(2, 5, generator=generator, dtype=torch.float64)
        r = torch.tensor([0.9, 1.2], dtype=torch.float64)
        options.append(dict(ball=ball, M=X, weights=w, radius=r))
        options.append(dict(ball=ball, diagonal=w[:, :3]))
    for given in options:
        names = [name for name in given if name != "ball"]

        def call(A, b, *rest, names=names):
            chosen = dict(zip(names, rest, strict=True))
            if "M" in chosen:  # symmetric for every step of the differences
                chosen["M"] = chosen["M"].mT @ chosen["M"]
            return by_hand.least_squares(A, b, ball=ball, **chosen)[0]

        inputs = [A, b, *(given[name] for name in names)]
        assert torch.autograd.gradcheck(call, [x.clone().requires_grad_() for x in inputs])


@pytest.mark.parametrize("reference", [0, "largest", torch.tensor([1.0, -3.0, 2.0])])
def test_signs_by_hand_are_those_of_the_layer(reference):
    A = torch.randn(8, 3, 3, generator=torch.Generator().manual_seed(0))
    A = A + A.mT
    ours, theirs = pmaf.ied(A, 2, reference=reference), by_hand.signed(A, reference, 2)
    scale = 100 * torch.finfo(A.dtype).eps
    if isinstance(reference, torch.Tensor):
        reference = reference.unsqueeze(-1)  # one for each vector
        ours = pmaf.ied(A, 2, reference=reference.expand(3, 2))
    torch.testing.assert_close(ours.vectors, theirs[1], rtol=0, atol=scale)
    torch.testing.assert_close(ours.values, theirs[0], rtol=scale, atol=scale)


def test_goals_are_those_of_one_matrix_and_of_many():
    goals = {name: (call.goal(1), call.goal(MANY)) for name, call in CALLS.items()}
    assert {many for _, many in goals.values()} == {1.0}
    easier = {name for name, (alone, _) in goals.items() if alone == 0.7}
    assert easier == {
        "ied symmetric=False",
        *(name for name in CALLS if name.startswith(("spectral", "solve"))),
        *(name for name in CALLS if name.startswith("pair") and "skip" in name),
    }
    assert {name for name, (alone, _) in goals.items() if alone is None} == {
        "less bfloat16",
        "less complex64",
        "pool",
        "pool weights",
    }


def test_a_cell_is_measured_on_every_family_and_saved():
    race = CallsRace()
    (quick, *_), full = race.cells("quick"), race.cells("full")
    assert len(full) == 9 * len(CALLS)
    values = race.measure(CPU, **{**quick.params, "budget": 1e-9, "families": 2})
    assert json.loads(json.dumps(values)) == values
    assert list(values) == list(CALLS["less"].source.families)[:2]
    measured = race.measured(Row(quick.params, "done", values))
    assert measured.family == "less"
    assert measured.size == "1×8×9"
    assert 0 < measured.numbers["least both"] <= measured.numbers["median both"]
    assert measured.numbers["goal"] == 1


def row(name, shape, **ratios):
    values = {
        family: {
            "ours": {"forward": 1.0, "backward": 1.0, **dict.fromkeys(ERRORS, 1e-7)},
            THEIRS: {"forward": speed, "backward": speed},
        }
        for family, speed in ratios.items()
    }
    params = {"call": name, "shape": shape, "budget": 1.0, "families": None}
    return Row(params, "done", values)


def test_the_worst_family_is_held_against_the_goal():
    rows = [
        row("ied", [1, 9], goe=1.5, wishart=1.2, laplacian=4.0),
        row("ied", [1, 3], goe=9.0),
        row("ied", [64, 9], goe=0.9, wishart=3.0),
        row("ied symmetric=False", [1, 9], paper=0.8),
        row("pool", [1, 8, 9], noise=0.1),
    ]
    rows[1].values["wishart"] = {"ours": {"skipped": "no"}, THEIRS: {"skipped": "no, too"}}
    section = CallsRace().present(rows)
    findings = {finding.claim: finding for finding in section.findings}
    one = findings[f"ied, one matrix: {THEIRS} over ours, least"]
    assert (one.claimed, one.found, one.holds) == ("at least 1×", "1.20× (1×9)", True)
    many = findings[f"ied, {MANY} matrices and more: {THEIRS} over ours, least"]
    assert (many.found, many.holds) == ("0.90× (64×9)", False)
    general = findings[f"ied symmetric=False, one matrix: {THEIRS} over ours, least"]
    assert (general.claimed, general.holds) == ("at least 0.7×", True)
    assert len(findings) == 3  # one matrix of the pool has no goal
    tables = {table.name: table.frame.to_numpy().tolist() for table in section.tables}
    assert tables["bench-calls-ied-1"][0] == ["ied", 1.0, 9.0, 9.0, 1.2, 1.5]
    assert tables["bench-calls-ied-64"] == [["ied", 1.0, 0.9, 1.95]]
    assert "ours of ied, wishart, does not take part: no." in section.notes
    assert CallsRace().present([]).tables == ()


@pytest.mark.parametrize("name", ["calls", "traces"])
def test_quick_cells_are_a_few_of_the_full_ones(name):
    (experiment,) = BENCHMARKS.choose([name])

    def wanted(scale):
        keys = ("call", "layer", "shape", "empty")
        return [
            json.dumps({key: cell.params[key] for key in keys if key in cell.params})
            for cell in experiment.cells(scale)
        ]

    quick, full = wanted("quick"), wanted("full")
    assert set(quick) < set(full)
    assert len(quick) < len(full) / 4


def test_a_clock_of_ones_own_tells_the_time():
    ticks = iter(range(100))
    assert seconds(lambda: None, CPU, lambda: next(ticks)) == 1
    x = torch.ones(3, requires_grad=True)
    found = race(
        {"a": Competitor(lambda x: (2 * x,))},
        (x,),
        lambda out: out[0].sum(),
        CPU,
        budget=1,
        clock=lambda: 7 * next(ticks),
    )
    assert found["a"]["forward"] == found["a"]["backward"] == 7


def test_processor_time_is_that_of_the_call():
    assert seconds(lambda: time.sleep(0.05), CPU, time.process_time) < 0.05


def test_an_output_may_be_computed_from_another():
    def solve(x):
        y = 2 * x
        return y, y.exp()

    x = torch.ones(3, requires_grad=True)
    loss = lambda out: out[1].sum()  # noqa: E731
    found = race({"a": Competitor(solve)}, (x,), loss, CPU, budget=1e-9)
    torch.testing.assert_close(found["a"]["gradients"][0], 2 * (2 * x.detach()).exp())


# Traces.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, in traces
def test_a_first_call_is_measured_beside_an_empty_function():
    torch._dynamo.reset()
    experiment = Traces()
    rows = []
    for name, shape, empty in (
        ("ied k=3, reference tensor", [3, 9], True),
        ("pair M", [3, 9], True),
        ("ied", [3, 9], False),
    ):
        params = {"layer": name, "shape": shape, "empty": empty}
        values = experiment.measure(CPU, **params, backend="eager", budget=1e-9)
        assert json.loads(json.dumps(values)) == values
        rows.append(Row(params, "done", values))
    *empty, found = (row.values for row in rows)
    assert [set(values) for values in empty] == [{"first"}, {"first"}]
    assert 0 < empty[1]["first"] < found["first"]
    for name in (traces.EAGER, traces.COMPILED):
        assert found[name]["forward"] > 0
        assert found[name]["backward"] > 0


def test_what_is_beyond_an_empty_function_is_held_against_the_goal():
    times = {
        "eager": {"forward": 1.0, "backward": 1.0},
        "compiled": {"forward": 1.0, "backward": 2.0},
    }
    rows = [
        Row({"layer": "ied", "shape": [64, 9], "empty": True}, "done", {"first": 0.5}),
        Row({"layer": "ied", "shape": [64, 9], "empty": False}, "done", {"first": 2.5, **times}),
        Row({"layer": "less", "shape": [64, 8, 9], "empty": True}, "failed"),
        Row({"layer": "less", "shape": [64, 8, 9], "empty": False}, "done", {"first": 9.0}),
    ]
    section = Traces().present(rows)
    found = {finding.claim: (finding.found, finding.holds) for finding in section.findings}
    assert found == {
        f"ied: {BEYOND}, most": ("2.00 s (64×9)", True),
        f"ied: {LATER}, most": ("1.50× (64×9)", False),
    }
    (table,) = section.tables
    assert table.frame.to_numpy().tolist() == [["ied", 2.0, 1.5], ["less", None, None]]
    assert Traces().present([]).tables == ()


def test_every_traced_layer_is_a_call():
    experiment = Traces()
    assert set(experiment.layers) <= set(CALLS)
    assert set(experiment.quick) < set(experiment.layers)
    shapes = [cell.params["shape"] for cell in experiment.cells("full")]
    assert {(shape[0], shape[-1]) for shape in shapes} == {(64, 9), (5, 32), (1000, 3)}
