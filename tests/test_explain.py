"""`pmaf.explain` says of a call what the call then does, and solves nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pmaf
from pmaf import explanation, native
from pmaf.autograd import eager, node
from pmaf.executors.base import Executor
from pmaf.executors.direct import Direct
from pmaf.gradients import DDN, IFT, Implicit, Unroll
from pmaf.operators import Diagonal, FromMatvec, Gram, Matrix
from pmaf.recipe import Recipe
from pmaf.reductions.base import Reduction
from pmaf.runtime.log import collected, in_words
from pmaf.solvers import (
    SVD,
    Adaptive,
    Cholesky,
    Dense,
    Krylov,
    Lanczos,
    PowerIteration,
    ProjectedGradient,
    Secular,
    SimultaneousIteration,
    Solver,
    adaptive,
    auto,
)
from pmaf.solvers import Reduction as Kernels
from pmaf.tangent.kept import NOTHING
from tests.quadratic import SphereQuadratic
from tests.test_reports import SOLVED

kernels = pytest.mark.skipif(not native.available, reason="the lines are those of the kernels")

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128


def drawn(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def symmetric(n, *batch, dtype=F32):
    """Matrices whose eigenvalues are apart."""
    q = torch.linalg.qr(drawn(*batch, n, n, dtype=dtype)).Q
    A = (q * torch.linspace(-2, 3, n).to(dtype)) @ q.mH
    return 0.5 * (A + A.mH)


def definite(n, *batch, dtype=F32):
    X = drawn(*batch, n, n, dtype=dtype, seed=7)
    return 0.5 * (X @ X.mH / n + (X @ X.mH / n).mH) + torch.eye(n, dtype=dtype)


def two(m, n, *batch, dtype=F32):
    return drawn(*batch, m, n, dtype=dtype), 5 * drawn(*batch, m, dtype=dtype, seed=1)


def weights(m, *batch, dtype=F32):
    return drawn(*batch, m, dtype=dtype, seed=2).square() + 0.1


def functional(A):
    """An operator that nothing is known of but its products."""
    return FromMatvec(lambda u, A: (A @ u.unsqueeze(-1)).squeeze(-1), A.shape, (A,))


def ied(*given, **options):
    return pmaf.ied, given, options


def less(*given, **options):
    return pmaf.less, given, options


def nullspace(*given, **options):
    return pmaf.nullspace, given, options


def isvd(*given, **options):
    return pmaf.isvd, given, options


def spectral(*given, **options):
    return pmaf.spectral, given, options


# Layers with the arguments of a call, made when they are needed.
CALLS = {
    "ied": lambda: ied(symmetric(9, 3)),
    "ied 33": lambda: ied(symmetric(33, 3, dtype=F64), 2),
    "ied bfloat16": lambda: ied(symmetric(9).bfloat16(), 2, reference=0),
    "ied complex": lambda: ied(symmetric(9, 3, dtype=C64), 2, skip=1),
    "ied complex, many": lambda: ied(symmetric(9, dtype=C128), 4),
    "ied order": lambda: ied(symmetric(9), 2, largest=False, descending=True, skip=2),
    "ied k large": lambda: ied(symmetric(9, 3), 7),
    "ied n=300": lambda: ied(symmetric(300)),
    "ied n=300, dominated": lambda: ied(drawn(300, 300).abs()),
    "ied n=150": lambda: ied(symmetric(150), 2),
    "ied n=150, dominated": lambda: ied(drawn(150, 150).abs()),
    "ied 450, several": lambda: ied(symmetric(450), 3),
    "ied general": lambda: ied(drawn(9, 9).abs(), symmetric=False),
    "ied general, large": lambda: ied(drawn(40, 40).abs(), symmetric=False),
    "ied Lanczos": lambda: ied(symmetric(90), solver=Lanczos()),
    "ied Lanczos, small": lambda: ied(symmetric(9), solver=Lanczos()),
    "ied Dense, DDN": lambda: ied(symmetric(9), solver=Dense(), gradient=DDN()),
    "ied IFT": lambda: ied(symmetric(9), gradient=IFT(exploit=False)),
    "ied Unroll": lambda: ied(symmetric(9), solver=Dense(), gradient=Unroll()),
    "ied PowerIteration": lambda: ied(drawn(9, 9).abs() + 0, solver=PowerIteration(iterations=900)),
    "ied SimultaneousIteration": lambda: ied(
        torch.diag(2.0 ** -torch.arange(9)), 2, solver=SimultaneousIteration(iterations=900)
    ),
    "ied Reduction": lambda: ied(symmetric(200), 2, solver=Kernels()),
    "ied Reduction, general": lambda: ied(drawn(9, 9).abs(), symmetric=False, solver=Kernels()),
    "ied Krylov, dense": lambda: ied(symmetric(30), solver=Krylov()),
    "ied Adaptive": lambda: ied(symmetric(9), solver=Adaptive(compiled=False)),
    "ied generator": lambda: ied(symmetric(9), 2, generator=torch.Generator()),
    "ied init": lambda: ied(symmetric(9), 2, init=drawn(9, 2)),
    "ied reference": lambda: ied(symmetric(9), 2, reference=drawn(9, 2)),
    "ied empty": lambda: ied(symmetric(9, 3)[:0]),
    "ied sparse": lambda: ied(symmetric(9).to_sparse_csr()),
    "ied Gram": lambda: ied(Gram(drawn(30, 12)), 2),
    "ied complex Gram": lambda: ied(Gram(drawn(30, 12, dtype=C64)), 2),
    "ied function": lambda: ied(functional(symmetric(9))),
    "ied Diagonal": lambda: ied(Diagonal(torch.arange(1.0, 10.0))),
    "ied M": lambda: ied(symmetric(9, 3), M=definite(9, 3)),
    "ied M, k large": lambda: ied(symmetric(9, 3), 7, M=definite(9, 3)),
    "ied M, shared": lambda: ied(symmetric(9, 3), M=definite(9)),
    "ied diagonal M": lambda: ied(symmetric(9, 3), M=Diagonal(weights(9, 3))),
    "ied diagonal M, k large": lambda: ied(symmetric(9, 3), 7, M=Diagonal(weights(9, 3))),
    "ied Matrix M": lambda: ied(symmetric(9), M=Matrix(definite(9))),
    "ied sparse M": lambda: ied(symmetric(9), M=definite(9).to_sparse_csr()),
    "ied complex M": lambda: ied(symmetric(9, dtype=C64), 4, M=definite(9, dtype=C64)),
    "ied operator, dense M": lambda: ied(Matrix(symmetric(9)), M=definite(9)),
    "ied operator, diagonal M": lambda: ied(Matrix(symmetric(9)), M=Diagonal(weights(9))),
    "ied operators": lambda: ied(Matrix(symmetric(9)) * 1, M=Diagonal(weights(9)) * 1),
    "less": lambda: less(*two(8, 5, 3)),
    "less float64": lambda: less(*two(8, 5, 3, dtype=F64)),
    "less shared": lambda: less(drawn(8, 5), 5 * drawn(3, 8)),
    "less shared, float64": lambda: less(drawn(40, 35, dtype=F64), 5 * drawn(3, 40, dtype=F64)),
    "less wide": lambda: less(*two(5, 8, 3)),
    "less bfloat16": lambda: less(*(x.bfloat16() for x in two(8, 5, 3))),
    "less complex": lambda: less(*two(8, 5, 3, dtype=C64)),
    "less radius": lambda: less(*two(8, 5, 3), radius=2),
    "less radius tensor": lambda: less(*two(8, 5), radius=torch.tensor(2.0)),
    "less ball": lambda: less(*two(8, 5, 3), ball=True),
    "less M": lambda: less(*two(8, 5, 3), M=definite(5, 3)),
    "less diagonal M": lambda: less(*two(8, 5, 3), M=Diagonal(weights(5, 3))),
    "less weights": lambda: less(*two(8, 5, 3), weights=weights(8, 3)),
    "less weights, shared": lambda: less(drawn(8, 5), drawn(3, 8), weights=weights(8)),
    "less everything": lambda: less(
        *two(8, 5, dtype=C128),
        ball=True,
        radius=torch.tensor(2.0, dtype=F64),
        M=definite(5, dtype=C128),
        weights=weights(8, dtype=F64),
    ),
    "less large": lambda: less(*two(300, 280, dtype=F64)),
    "less large, options": lambda: less(*two(300, 280), weights=weights(300)),
    "less few": lambda: less(*two(150, 140, dtype=F64)),
    "less large, wide": lambda: less(*two(270, 400, dtype=F64)),
    "less Cholesky": lambda: less(*two(40, 20), solver=Cholesky()),
    "less Cholesky, wide": lambda: less(*two(5, 8, dtype=F64), solver=Cholesky()),
    "less Secular": lambda: less(*two(8, 5), solver=Secular()),
    "less Reduction, float64": lambda: less(*two(8, 5, dtype=F64), solver=Kernels()),
    "less ProjectedGradient": lambda: less(
        torch.eye(4), drawn(4), solver=ProjectedGradient(max_iterations=500)
    ),
    "less Unroll": lambda: less(
        torch.eye(4),
        drawn(4),
        solver=ProjectedGradient(max_iterations=500),
        gradient=Unroll(),
    ),
    "less operator": lambda: less(Matrix(drawn(8, 5)), drawn(8)),
    "less operator, ball": lambda: less(Matrix(drawn(8, 5)), drawn(8), ball=True),
    "less operator, M": lambda: less(Matrix(drawn(8, 5)), drawn(8), M=definite(5)),
    "less init": lambda: less(*two(8, 5), init=drawn(5)),
    "nullspace": lambda: nullspace(drawn(3, 9, 5)),
    "nullspace weights": lambda: nullspace(drawn(3, 9, 5), weights=weights(9, 3)),
    "nullspace shared weights": lambda: nullspace(drawn(3, 9, 5), weights=weights(9)),
    "nullspace k large": lambda: nullspace(drawn(3, 9, 5), 3),
    "nullspace float64": lambda: nullspace(drawn(3, 9, 5, dtype=F64), 2, reference=0),
    "nullspace float64, weights": lambda: nullspace(
        drawn(3, 9, 5, dtype=F64), weights=weights(9, dtype=F64)
    ),
    "nullspace bfloat16": lambda: nullspace(drawn(3, 9, 5).bfloat16()),
    "nullspace complex": lambda: nullspace(drawn(3, 9, 5, dtype=C64)),
    "nullspace complex, k": lambda: nullspace(drawn(3, 9, 5, dtype=C64), 2),
    "nullspace n=300": lambda: nullspace(drawn(310, 300)),
    "nullspace SVD": lambda: nullspace(drawn(9, 5), solver=SVD()),
    "nullspace Gram": lambda: nullspace(Matrix(drawn(9, 5)), 2, weights=weights(9)),
    "isvd": lambda: isvd(drawn(3, 9, 6)),
    "isvd k=2": lambda: isvd(drawn(3, 9, 6), 2, descending=False),
    "isvd wide": lambda: isvd(drawn(3, 6, 9), 2),
    "isvd k large": lambda: isvd(drawn(3, 6, 9), 5),
    "isvd float64": lambda: isvd(drawn(3, 9, 6, dtype=F64), 2, reference=0),
    "isvd complex": lambda: isvd(drawn(3, 6, 9, dtype=C64), 2),
    "isvd operator": lambda: isvd(Matrix(drawn(9, 6)), 2),
    "isvd wide operator": lambda: isvd(Matrix(drawn(6, 9)), 2),
    "spectral": lambda: spectral(definite(9, 3), "sqrt"),
    "spectral group": lambda: spectral(definite(9, 3), "sqrt", 2),
    "spectral complex": lambda: spectral(definite(9, 3, dtype=C64), "sqrt", 2),
    "spectral complex, all": lambda: spectral(definite(9, 3, dtype=C64), "sqrt"),
    "spectral Gram": lambda: spectral(Gram(drawn(30, 12)), "sqrt", 2),
    "pool": lambda: (pmaf.PrincipalPool(2, centre=True), (drawn(3, 7, 5),), {}),
    "pool tokens": lambda: (pmaf.PrincipalPool(), (drawn(3, 7, 20),), {}),
    "pool weights": lambda: (pmaf.PrincipalPool(), (drawn(3, 7, 20),), {"weights": weights(7, 3)}),
    "pool maps": lambda: (pmaf.PrincipalPool(maps=True), (drawn(3, 5, 4, 4).half(),), {}),
    "pool products": lambda: (pmaf.PrincipalPool(path="products"), (drawn(3, 7, 5),), {}),
    "LESS": lambda: (pmaf.LESS(radius=2.0, ball=True), two(8, 5), {"M": definite(5)}),
    "LESS parameter": lambda: (pmaf.LESS(radius=nn.Parameter(torch.tensor(2.0))), two(8, 5), {}),
    "IED": lambda: (pmaf.IED(2, largest=False), (symmetric(9),), {"reference": 0}),
    "NullSpace": lambda: (pmaf.NullSpace(2), (drawn(9, 7),), {}),
    "ISVD": lambda: (pmaf.ISVD(2), (drawn(9, 7),), {}),
    "Spectral": lambda: (pmaf.Spectral("exp", 2), (symmetric(9),), {}),
}
# Numbers for which a call falls back, as it says.
FALLING = {"less shared": "eigenvectors"}
# The words of the log, where they are not those of a report.
LOGGED = {
    "pairs: compiled": "compiled kernels, a Cholesky factor of M",
    "pairs: Cholesky": "a Cholesky factor of M",
    "pairs: diagonal": "diagonal of M",
    "pairs: complex": "complex -> real embedding",
    "pairs: entries of M": "the entries of M",
    "pairs: factor and products": "in coordinates of M",
    "pairs: products": "products with both",
    "pairs: products, own solve": "products with both",
    "pairs: refined": "Newton steps",
    "spectral: group": "the eigenpairs that are asked for",
    "products: inside of the ball": "products with A",
    "pool: channels": "moments of channels",
    "pool: tokens": "moments of tokens",
    "pool: products": "products with their second moments",
}
BY_KERNELS = {"tangent: compiled", "pairs: compiled gradient"}


class Seen:
    """What a call has done: recipes that ran, methods, and what was kept and for whom."""

    def __init__(self, monkeypatch):
        self.recipes, self.kept, self.methods, self.solved = [], [], [], []
        run, end, attach, find = Recipe.run, Recipe.end, node.attach_solved, eager.find

        def ran(recipe, given):
            self.recipes.append(recipe)
            return run(recipe, given)

        def ended(recipe, *given):
            self.recipes.append(recipe)
            found = end(recipe, *given)
            self.methods.append(found.method)
            return found

        def kept(*given):
            found = find(*given)
            self.kept.append(type(found.kept))
            return found

        def attached(pull, found, held, *tensors):
            self.solved.append((pull, held))
            return attach(pull, found, held, *tensors)

        monkeypatch.setattr(Recipe, "run", ran)
        monkeypatch.setattr(Recipe, "end", ended)
        monkeypatch.setattr(eager, "find", kept)
        for name in ("eigenvectors", "least_squares", "singular"):
            monkeypatch.setattr(f"pmaf.executors.{name}.attach_solved", attached)


def with_gradients(call):
    """A layer and its arguments, of which the first tensors get gradients."""
    layer, given, options = CALLS[call]()
    leaves = []

    def leaf(x):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.numel():
            leaves.append(x.detach().clone().requires_grad_())
            return leaves[-1]
        return x

    return layer, tuple(leaf(x) for x in given), options, leaves


def loss_of(found):
    parts = found if isinstance(found, tuple) else (found,)
    parts = [x if isinstance(x, torch.Tensor) else x.tensors[0] for x in parts]
    return sum(
        (torch.view_as_real(x) if x.is_complex() else x).float().square().sum() for x in parts
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.replace(" ", "-"))
def test_a_call_does_what_it_is_said_to_do(call, monkeypatch):
    layer, given, options, leaves = with_gradients(call)
    told = []
    account = Recipe.account
    with monkeypatch.context() as patched:
        patched.setattr(
            Recipe, "account", lambda recipe, x: (told.append(recipe), account(recipe, x))[1]
        )
        found = pmaf.explain(layer, *given, **options)
    seen = Seen(monkeypatch)
    with collected() as ways:
        solved = layer(*given, **options)
    forward = list(ways)
    if "empty" in call:
        assert (found.solver, found.why) == ("no solver", "the batch is empty")
        assert not seen.recipes
        return
    # The recipe is the one that was explained, and the very one if it is a cached one.
    if seen.recipes and not found.call.endswith("spectral"):
        recipe, said = seen.recipes[0], told[-1]
        assert found.steps[-len(recipe.words) :] == recipe.words or not recipe.words
        assert type(recipe.executor) is type(said.executor)
        if isinstance(recipe.executor, Executor) and not isinstance(recipe.executor, Direct):
            assert recipe is said
        else:
            assert [*map(type, recipe.steps)] == [*map(type, said.steps)]
            assert [*map(vars, recipe.steps)] == [*map(vars, said.steps)]
    # Every method that ran was named, the first of them as the solver.
    text, words = str(found), []
    for way in forward:
        word = LOGGED.get(way) or in_words("", [way])
        words.append(word)
        assert word in text or (way == "pairs: diagonal" and "coordinates of M" in text), way
    solvers = [x for x, way in zip(words, forward) if not way.startswith(("pool", "pairs"))]
    if solvers and "Adaptive" not in found.solver:
        wanted = found.solver if call not in FALLING else text
        assert any(word in wanted for word in solvers), (forward, text)
    if seen.methods and seen.methods[0] and "spectral" not in found.call:
        assert found.solver.startswith(seen.methods[0].partition(":")[0]), seen.methods
    # What was kept was named.
    for pull, held in seen.solved:
        nothing = found.kept == NOTHING.words
        assert bool(held and any(x is not None for x in held)) != nothing, (pull, found.kept)
    if seen.kept and not isinstance(options.get("gradient"), Unroll) and not seen.solved:
        assert seen.kept[0].words in found.kept, (seen.kept, found.kept)
    # Kernels differentiated if they were said to.
    if not leaves:
        return
    with collected() as ways:
        torch.autograd.grad(loss_of(solved), leaves, allow_unused=True)
    by_kernels = bool(BY_KERNELS & set(ways))
    if by_kernels:
        assert "compiled kernels" in found.derivative, ways
    if found.derivative.startswith("Implicit(): compiled kernels"):
        assert by_kernels, ways
    if "Unroll" in call:
        assert "autograd, which has recorded every step" in found.derivative


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOLVED)
def test_a_solution_says_the_same(name):
    pose, solver, _ = SOLVED[name]
    found = pmaf.explain(pose(), solver=solver)
    method = pmaf.solve(pose(), solver=solver).method
    named, _, how = method.partition(":")
    if named == "pmaf.spectral":
        named = "Reduction()" if native.available else "Dense()"
    assert found.solver.startswith(named)
    for part in filter(None, (x.strip() for x in how.replace("pairs: ", "").split(","))):
        if part not in ("own solve", "in float64", "in other units"):
            assert part in str(found), (method, str(found))


@kernels
def test_every_line_of_the_tables_has_a_call():
    """But one, which is for traces of solves that are asked for in another way.

    `test_straight.py` explains calls on a device.
    """
    made = [call() for call in CALLS.values()]
    said = {pmaf.explain(layer, *given, **options).why for layer, given, options in made}
    posed = {pmaf.explain(pose(), solver=solver).why for pose, solver, _ in SOLVED.values()}
    tables = (auto.MINIMUM, auto.LEAST_SQUARES, auto.EIGENVECTORS, auto.SINGULAR)
    lines = {line.reason for table in tables for line in table} | {auto.DECOMPOSED_MINIMUM.reason}
    on_devices = {auto.BATCHED.reason, auto.BATCHED_MINIMUM.reason}
    assert {x.partition(",")[0] for x in lines - said - posed - on_devices} == {
        "a trace has to know in advance what a solve returns"
    }


DENSE = [
    call
    for call in CALLS
    if not re.search(r"sparse|Gram|operator|function|empty|generator|Diagonal|Matrix", call)
]


@pytest.mark.parametrize("call", DENSE)
def test_shapes_are_enough(call, monkeypatch):
    """Tensors without numbers, and those with wrong ones, are explained as others are."""
    layer, given, options = CALLS[call]()

    def blank(x):
        if isinstance(x, Diagonal):
            return Diagonal(x.d.to("meta"))
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    def wrong(x):
        return x * torch.nan if isinstance(x, torch.Tensor) else x

    found = pmaf.explain(layer, *given, **options)
    for executor in (Executor, Direct):
        monkeypatch.setattr(executor, "solve", None)
    for change in (blank, wrong):
        others = {name: change(x) for name, x in options.items()}
        again = pmaf.explain(layer, *(change(x) for x in given), **others)
        assert again == found


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "shape", [(9,), (40, 20), (40,), (150,), (240,), (230, 2), (300, 3)], ids=str
)
@pytest.mark.parametrize("k", [1, 2, 40])
def test_attempts_are_those_that_are_made(shape, compiled, k, monkeypatch):
    """Every attempt fails here, so that each of them is seen."""
    n, *batch = shape
    k, tried = min(k, n), []

    def failed(way):
        return lambda *_, **__: tried.append(way)

    monkeypatch.setattr(adaptive, "dominant", failed("power steps"))
    monkeypatch.setattr(adaptive, "dominant_of_sum", failed("power steps"))
    monkeypatch.setattr(adaptive, "_krylov", failed("Krylov space"))
    for A, general in ((symmetric(n, *batch), False), (drawn(*batch, n, n).abs(), True)):
        if general and k > 1:
            continue
        tried.clear()
        problem = pmaf.PrincipalEigenvectors(A, k, symmetric=not general)
        solver = Adaptive(compiled=compiled)
        with collected() as ways:
            solver.solve(problem)
        tried.append(in_words("", ways[:1]))
        assert [words for words, _ in solver.attempts(problem)] == tried


def test_a_problem_tells_of_its_layer_where_that_takes_another_way():
    A = symmetric(33, 2)
    found = pmaf.explain(pmaf.PrincipalEigenvectors(A, 2))
    assert (found.layer is not None) == native.available
    if found.layer is not None:
        assert found.layer.call == "pmaf.ied"
        assert found.layer.kept != found.kept
        assert str(found).startswith("pmaf.solve:\n  sign")
        assert "\npmaf.ied:\n  Reduction(): compiled kernels" in str(found)
    assert pmaf.explain(pmaf.PrincipalEigenvectors(A, 2), solver=Dense()).layer is None
    # Nothing but null vectors has a layer.
    assert pmaf.explain(pmaf.PrincipalSingularVectors(drawn(9, 5))).layer is None


def test_a_problem_of_the_user():
    found = pmaf.explain(SphereQuadratic(symmetric(6), drawn(6)))
    assert found.solver.startswith("Secular(): eigenvectors")
    assert found.layer is None
    meta = SphereQuadratic(symmetric(6).to("meta"), drawn(6).to("meta"))
    assert pmaf.explain(meta) == found


class Own(Solver):
    """A solver of a user, which says nothing of itself."""

    solves = (pmaf.solvers.Minimum,)

    def solve(self, problem, *, init=None, report=True):
        return Secular().solve(problem, init=init, report=report)


class Rule(Implicit):
    words = "the rule of the test"


def test_a_solver_and_a_rule_of_the_user():
    found = pmaf.explain(pmaf.less, *two(8, 5), solver=Own(), gradient=Rule())
    assert (found.solver, found.derivative) == ("Own()", "Rule(): the rule of the test")
    assert found.why == "it is the one that was asked for"


def test_the_text_has_a_line_for_each_part():
    found = pmaf.explain(pmaf.IED(2, skip=1, solver=Dense()), symmetric(9, dtype=C64))
    assert str(found).splitlines() == [
        "sign or phase of each vector -> chosen so that its components have a positive sum",
        "the first vector of the requested end -> left out",
        "complex -> real embedding, twice the size",
        "Dense(): decomposition",
        "  why: it is the one that was asked for",
        "  kept: all eigenvectors and eigenvalues",
        f"  gradient: Implicit(): {Implicit.words}",
    ]
    assert repr(found) == f"<explanation of pmaf.ied>\n{found}"
    # Nothing is said of what shapes decide, and where they do not, the next line is.
    found = pmaf.explain(pmaf.ied, drawn(300, 300))
    assert str(found).splitlines()[-1].startswith("  falls back to: a decomposition where")


def reductions(kind=Reduction):
    for below in kind.__subclasses__():
        yield below
        yield from reductions(below)


@pytest.mark.parametrize("kind", [*reductions()], ids=lambda kind: kind.__name__)
def test_every_step_has_words(kind):
    """A step that may have nothing to do has words where it has something to do."""
    made = {
        "End": ((1, True, True),),
        "Sign": ((True, True, True, True), (True, True, True, False)),
        "Precision": ((F32, F64),),
        "Radius": ((2.0,),),
        "RadiusAndUnits": ((1.0,), (2.0,)),
        "EmbeddedVectors": ((2, True),),
        "Squares": ((True, True),),
        "Host": ((torch.device("cpu"),),),
    }
    for arguments in made.get(kind.__name__, ((),)):
        words = kind.words if kind.__name__ == "Units" else kind(*arguments).words
        assert re.fullmatch(r"[^>]+ -> [^>]+([,;] [^>]+ -> [^>]+)?", words), words


def test_traces():
    A, traced = symmetric(9), explanation.TRACED
    assert "pmaf::solve and pmaf::pull" in traced
    assert pmaf.explain(pmaf.ied, A).traced == ""
    found = pmaf.explain(pmaf.ied, A, traced=True)
    assert found.traced == traced
    assert f"  under torch.compile: {traced}" in str(found)
    both = pmaf.explain(pmaf.PrincipalEigenvectors(symmetric(33)), traced=True)
    assert both.layer is None or both.layer.traced == both.traced == traced
    for call in ("ied Gram", "less operator", "isvd operator", "spectral Gram", "pool products"):
        layer, given, options = CALLS[call]()
        assert pmaf.explain(layer, *given, **options, traced=True).traced == explanation.UNTRACED
    layer, given, options = CALLS["ied Unroll"]()
    assert pmaf.explain(layer, *given, **options, traced=True).traced == explanation.REFUSED


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pmaf.explain(3), TypeError, "takes a problem, .*; got 3"),
        (lambda: pmaf.explain(pmaf.IED, drawn(3, 3)), TypeError, "got the class IED"),
        (lambda: pmaf.explain(torch.linalg.eigh, drawn(3, 3)), TypeError, "got <built-in"),
        (lambda: pmaf.explain(nn.Linear(3, 3), drawn(3)), TypeError, "got Linear"),
        (lambda: pmaf.explain(pmaf.less, drawn(3, 3)), TypeError, "pmaf.less: missing .*'b'"),
        (lambda: pmaf.explain(pmaf.IED(), drawn(3, 3), k=2), TypeError, "pmaf.IED: .*'k'"),
        (lambda: pmaf.explain(pmaf.PrincipalPool()), TypeError, "PrincipalPool: missing"),
        (
            lambda: pmaf.explain(pmaf.PrincipalEigenvectors(drawn(3, 3).abs()), k=2),
            TypeError,
            "solver, gradient and init of pmaf.solve; got 'k'",
        ),
        (lambda: pmaf.explain(pmaf.ied, drawn(3, 4)), ValueError, "A must be square"),
        (lambda: pmaf.explain(pmaf.ied, drawn(3, 3), 5), ValueError, "k must lie between"),
        (
            lambda: pmaf.explain(pmaf.ied, Matrix(symmetric(4)), solver=Dense()),
            TypeError,
            "needs the entries of a matrix",
        ),
        (
            lambda: pmaf.explain(pmaf.less, *two(4, 3), solver=Dense()),
            TypeError,
            "does not serve SphereLeastSquares",
        ),
    ],
)
def test_what_cannot_be_explained(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_nothing_is_looked_at_or_drawn():
    """The first matrix of a shape may still be warned of, and a generator is where it was."""
    A, generator = drawn(17, 17, dtype=F64), torch.Generator()
    before = generator.get_state()
    pmaf.explain(pmaf.ied, A, generator=generator)
    pmaf.explain(pmaf.ied, A)
    assert torch.equal(generator.get_state(), before)
    with pytest.warns(UserWarning, match="A is not symmetric"):
        pmaf.ied(A)


def test_without_kernels():
    """The same tests pass where there are no compiled kernels."""
    if not native.available:
        pytest.skip("this is the run without kernels")
    tests = ["does_what_it_is_said", "says_the_same", "shapes_are_enough"]
    words = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", __file__, "-k", " or ".join(tests)]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=os.environ | {"PMAF_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
