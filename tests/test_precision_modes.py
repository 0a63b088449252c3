"""TF32 and bfloat16 in float32 products do not reach the layers, and the user's setting stays."""

import contextlib
import itertools
import threading
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pmaf
from pmaf.operators import FromMatvec, Gram, Matrix
from pmaf.runtime import precision
from pmaf.runtime.modes import full_precision
from tests.quadratic import SphereQuadratic, quadratic

CPU = torch.device("cpu")
BACKENDS = ("cuda", "mkldnn")
PLACES = [("generic", "all")] + [(x, op) for x in BACKENDS for op in ("all", "matmul")]
read = torch._C._get_fp32_precision_getter
write = torch._C._set_fp32_precision_setter


def legacy():
    """What `torch.get_float32_matmul_precision()` says; None where it complains of a mixture."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def state():
    """All that can be read of the settings, after each change of those that others inherit."""
    found = [legacy(), *(read(*place) for place in PLACES)]
    every = read("generic", "all")
    wholes = [read(backend, "all") for backend in BACKENDS]
    for other in ("ieee", "tf32", "none"):
        write("generic", "all", other)
        found += [read(*place) for place in PLACES]
    write("generic", "all", every)
    assert [read(backend, "all") for backend in BACKENDS] == wholes
    return found


def is_exact():
    reduced = any(read(backend, "matmul") not in ("none", "ieee") for backend in BACKENDS)
    return legacy() == "highest" and not reduced and not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(autouse=True)
def usual():
    yield
    write("generic", "all", "none")
    for backend in BACKENDS:
        write(backend, "all", "none")
    torch.set_float32_matmul_precision("highest")
    for backend in BACKENDS:
        write(backend, "matmul", "none")
    assert not precision.is_reduced()


def by_attribute(path, value):
    *names, last = path.split(".")

    def change():
        place = torch.backends
        for name in names:
            place = getattr(place, name)
        setattr(place, last, value)

    return change


SETTINGS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": by_attribute("cuda.matmul.allow_tf32", True),
    "cuda.matmul": by_attribute("cuda.matmul.fp32_precision", "tf32"),
    "cudnn": by_attribute("cudnn.fp32_precision", "tf32"),
    "all tf32": by_attribute("fp32_precision", "tf32"),
    "all bf16": by_attribute("fp32_precision", "bf16"),
    "mkldnn.matmul bf16": by_attribute("mkldnn.matmul.fp32_precision", "bf16"),
    "mkldnn.matmul tf32": by_attribute("mkldnn.matmul.fp32_precision", "tf32"),
}
OTHERS = {
    "": lambda: None,
    "all ieee": by_attribute("fp32_precision", "ieee"),
    "all none": by_attribute("fp32_precision", "none"),
    "cudnn ieee": by_attribute("cudnn.fp32_precision", "ieee"),
    "cuda.matmul ieee": by_attribute("cuda.matmul.fp32_precision", "ieee"),
    "cuda.matmul none": by_attribute("cuda.matmul.fp32_precision", "none"),
    "mkldnn.matmul ieee": by_attribute("mkldnn.matmul.fp32_precision", "ieee"),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
}
MIXED = list(itertools.product(SETTINGS, (*OTHERS, *SETTINGS)))
BOTH = {**OTHERS, **SETTINGS}


@pytest.mark.parametrize(("first", "then"), MIXED)
@pytest.mark.parametrize("order", [1, -1], ids=["", "swapped"])
def test_every_mixture_of_settings_is_exact_inside_and_comes_back(first, then, order):
    for name in (first, then)[::order]:
        BOTH[name]()
    before = state()
    assert is_exact() or precision.is_reduced()
    with full_precision(CPU):
        assert is_exact()
        with full_precision(CPU):
            assert is_exact()
        assert is_exact()
    assert state() == before


def test_the_usual_settings_are_not_touched(monkeypatch):
    monkeypatch.setattr(precision, "_taken", None)
    before = state()
    with full_precision(CPU):
        assert state() == before
    assert not precision.is_reduced()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_setting_comes_back_after_an_exception(setting):
    SETTINGS[setting]()
    before = state()
    with pytest.raises(KeyError), full_precision(CPU):
        raise KeyError
    assert state() == before


def test_autocast_is_off_as_well():
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision(CPU):
            assert is_exact()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == "high"


def test_the_last_thread_brings_the_setting_back():
    torch.set_float32_matmul_precision("medium")
    before, inside, leave, left = state(), threading.Barrier(2), threading.Event(), []

    def second():
        with full_precision(CPU):
            inside.wait(60)
            assert leave.wait(60)
            left.append(is_exact())

    thread = threading.Thread(target=second)
    with full_precision(CPU):
        thread.start()
        inside.wait(60)
    assert is_exact()  # the other thread is still inside
    with full_precision(CPU):  # and a third call enters while nothing seems to be reduced
        leave.set()
        thread.join(60)
        assert is_exact()
    assert left == [True]
    assert state() == before


def test_many_threads_come_and_go():
    torch.set_float32_matmul_precision("high")
    before, wrong = state(), []

    def work():
        for _ in range(300):
            with full_precision(CPU):
                if read("cuda", "matmul") != "ieee":
                    wrong.append(read("cuda", "matmul"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert state() == before


def test_what_somebody_sets_meanwhile_stays():
    torch.set_float32_matmul_precision("high")
    with full_precision(CPU):
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    with full_precision(CPU):
        SETTINGS["mkldnn.matmul tf32"]()
    assert read("mkldnn", "matmul") == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_the_setting_of_intel_graphics_cards_is_taken_away_and_comes_back(monkeypatch):
    setting = [True]
    monkeypatch.setattr(precision, "HAS_XPU", True)
    monkeypatch.setattr(precision, "onednn_tf32", lambda: setting[0])
    monkeypatch.setattr(torch._C, "_set_onednn_allow_tf32", lambda x: setting.__setitem__(0, x))
    assert precision.is_reduced()
    with full_precision(CPU):
        assert setting == [False]
    assert setting == [True]


# The layers.

PLACES_OF_PRODUCTS = [
    (torch.Tensor, "__matmul__"),
    (torch.Tensor, "addmm_"),
    *((place, name) for place in (torch.Tensor, torch) for name in ("matmul", "mm", "bmm")),
    *((torch, name) for name in ("baddbmm", "addmm")),
    (torch.linalg, "solve_triangular"),
]
SHORT = (torch.float32, torch.complex64)


class Watch(TorchDispatchMode):
    """Sees the products inside of derivatives that autograd has by itself."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        short = any(isinstance(x, torch.Tensor) and x.dtype in SHORT for x in args)
        if short and name in ("mm", "bmm", "addmm", "baddbmm"):
            self.seen.append(is_exact())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def products(monkeypatch):
    """Whether each product of short numbers that Python calls was exact."""
    seen = []

    def watched(original):
        def product(*args, **options):
            if any(isinstance(x, torch.Tensor) and x.dtype in SHORT for x in args):
                seen.append(is_exact())
            return original(*args, **options)

        return product

    for place, name in PLACES_OF_PRODUCTS:
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    return seen


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def hermitian(*shape, dtype=torch.float32):
    A = drawn(*shape, dtype=dtype)
    return A + A.mH + 3 * torch.diag(torch.arange(shape[-1])).to(dtype)


def definite(*shape):
    A = drawn(*shape)
    return A @ A.mT / shape[-1] + torch.eye(shape[-1])


def learned(A, p):
    return pmaf.spectral(A, lambda x: p * (1 + x * x).sqrt())


PAIR = (hermitian(3, 9, 9), definite(3, 9, 9))
RECTANGLE = (drawn(3, 12, 8),)
WEIGHTS = drawn(3, 12).abs() + 0.5
SYSTEM = (drawn(3, 12, 8), drawn(3, 12))
SQUARE = (hermitian(3, 9, 9),)
COMPLEX = (hermitian(2, 6, 6, dtype=torch.complex64),)
LAYERS = {
    "less": (pmaf.less, SYSTEM),
    "less Secular": (lambda A, b: pmaf.less(A, b, solver=pmaf.solvers.Secular()), SYSTEM),
    "less Cholesky": (lambda A, b: pmaf.less(A, b, solver=pmaf.solvers.Cholesky()), SYSTEM),
    "less ball": (lambda A, b: pmaf.less(A, b, ball=True), SYSTEM),
    "less complex": (pmaf.less, tuple(drawn(*x.shape, dtype=torch.complex64) for x in SYSTEM)),
    "ied": (pmaf.ied, SQUARE),
    "ied large": (pmaf.ied, (hermitian(150, 150),)),
    "ied k": (lambda A: pmaf.ied(A, 3), SQUARE),
    "ied Dense": (lambda A: pmaf.ied(A, 3, solver=pmaf.solvers.Dense()), SQUARE),
    "ied general": (lambda A: pmaf.ied(A, symmetric=False), (drawn(3, 9, 9).abs(),)),
    "ied complex": (lambda A: pmaf.ied(A, 2), COMPLEX),
    "pair": (lambda A, M: pmaf.ied(A, M=M), PAIR),
    "pair k": (lambda A, M: pmaf.ied(A, 3, M=M), PAIR),
    "nullspace": (pmaf.nullspace, RECTANGLE),
    "nullspace k": (lambda A: pmaf.nullspace(A, 2), RECTANGLE),
    "isvd": (pmaf.isvd, RECTANGLE),
    "isvd k": (lambda A: pmaf.isvd(A, 3), RECTANGLE),
    "spectral": (lambda A: pmaf.spectral(A, "sqrt"), (definite(3, 9, 9),)),
    "spectral k": (lambda A: pmaf.spectral(A, "exp", 2), (definite(3, 9, 9),)),
    "spectral complex": (lambda A: pmaf.spectral(A, "exp"), COMPLEX),
    "spectral learned": (learned, (*SQUARE, torch.ones(()))),
    "projector": (lambda A: pmaf.ied(A).projector(), SQUARE),
    "projector k": (lambda A: pmaf.ied(A, 3).projector(), SQUARE),
    "pool": (pmaf.PrincipalPool(), (drawn(3, 20, 6),)),
    "pool k": (pmaf.PrincipalPool(k=2, path="tokens"), (drawn(3, 5, 12),)),
    "pool weights": (pmaf.PrincipalPool(scale="root"), (drawn(3, 12, 6), WEIGHTS)),
    "declared": (lambda Q, c: quadratic(0.5 * (Q + Q.mT), c), (*SQUARE, drawn(3, 9))),
    "solve": (lambda A: pmaf.solve(pmaf.PrincipalEigenvectors(A, 2)).value, SQUARE),
    "Gram": (lambda X: pmaf.ied(Gram(X)), (drawn(20, 40),)),
    "operator less": (lambda A, b: pmaf.less(Matrix(A), b), (drawn(30, 8), drawn(30))),
    "operator less M": (
        lambda A, b, M: pmaf.less(Matrix(A), b, M=M),
        (drawn(30, 8), drawn(30), definite(8, 8)),
    ),
    "operator pair": (lambda X, M: pmaf.ied(Gram(X), M=M), (drawn(20, 40), definite(40, 40))),
    "operator isvd": (lambda A: pmaf.isvd(Matrix(A), 2), (drawn(40, 12),)),
    "operator spectral": (lambda X: pmaf.spectral(Gram(X), "sqrt", 2).left, (drawn(20, 40),)),
    "unrolled": (
        lambda A: pmaf.ied(
            A, solver=pmaf.solvers.PowerIteration(), gradient=pmaf.gradients.Unroll()
        ),
        (definite(3, 4, 4),),
    ),
}
ONCE = {"Gram", "operator less", "operator less M", "operator pair", "operator isvd"}
ONCE |= {"operator spectral"}


def leaves(inputs):
    return tuple(x.clone().requires_grad_() for x in inputs)


def total(found):
    """Neither the lengths of vectors alone, nor something with a derivative that does not exist."""
    parts = [found] if isinstance(found, torch.Tensor) else [*found]
    reals = [torch.view_as_real(x) if x.is_complex() else x for x in parts if x.requires_grad]
    return torch.stack([(x**3 / (1 + x.detach().abs().amax()) ** 2).sum() for x in reals]).sum()


def quiet(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pmaf.ConvergenceWarning)
        return call()


@pytest.mark.parametrize("setting", ["medium", "cudnn"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_product_of_a_layer_is_exact(name, setting, products):
    call, inputs = LAYERS[name]
    given = leaves(inputs)
    SETTINGS[setting]()
    before = state()
    value = total(quiet(lambda: call(*given)))
    again = name not in ONCE
    if name == "spectral learned":
        # Nobody but the user knows the parameters, so that no node can have them for inputs.
        again = False
    with contextlib.nullcontext() if again else Watch(products):
        first = quiet(lambda: torch.autograd.grad(value, given, create_graph=again))
    assert all(products)
    if again:
        with Watch(products):
            quiet(lambda: torch.autograd.grad(total(first), given, allow_unused=True))
    assert all(products), f"{products.count(False)} of {len(products)}"
    assert state() == before


@pytest.mark.parametrize("name", [x for x in LAYERS if x not in ONCE])
def test_derivatives_are_those_of_the_usual_setting(name):
    """What becomes one node of the graph has the right derivatives, up to the third."""
    call, inputs = LAYERS[name]
    inputs = tuple(x.to(torch.promote_types(x.dtype, torch.float64)) for x in inputs)

    def derivatives():
        given = leaves(inputs)
        seen = [*given]
        value, found = total(quiet(lambda: call(*given))), []
        for _ in range(ORDERS.get(name, 3)):
            seen = torch.autograd.grad(value, given, create_graph=True, allow_unused=True)
            seen = [x for x in seen if x is not None and x.requires_grad]
            found += seen
            value = total(seen)
        return found

    wanted = quiet(derivatives)
    SETTINGS["high"]()
    for x, y in zip(quiet(derivatives), wanted, strict=True):
        size = float(y.detach().abs().amax())
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * size)


ORDERS = {"spectral learned": 2}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("name", ["less", "ied", "ied k", "nullspace", "spectral", "pair"])
def test_transforms_are_exact_inside(name, products):
    call, inputs = LAYERS[name]
    SETTINGS["medium"]()
    before = state()

    def scalar(first):
        found = call(first, *inputs[1:])
        return (found if isinstance(found, torch.Tensor) else found[0]).pow(3).sum()

    torch.func.grad(scalar)(inputs[0])
    torch.func.vmap(torch.func.grad(scalar))(inputs[0][None])
    assert all(products)
    with Watch(products):
        torch.func.jvp(scalar, inputs[:1], inputs[:1])
    assert all(products)
    assert state() == before


SEEN = []


class Probed(SphereQuadratic):
    """Looks at the settings wherever the library calls it."""

    def force(self, u, Q, c):
        see()
        return super().force(u, Q, c)

    def curvature(self, rows):
        see()
        return super().curvature(rows)


def see():
    if not torch.compiler.is_compiling():
        SEEN.append((torch.get_float32_matmul_precision(), read("cuda", "matmul")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in traces
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("setting", ["high", "cuda.matmul"])
def test_a_declared_problem_sees_exact_products_in_both_passes(compiled, setting):
    def layer(Q, c):
        return pmaf.solve(Probed(Q, c)).value

    torch._dynamo.reset()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    SETTINGS[setting]()
    SEEN.clear()
    given = leaves((*SQUARE, drawn(3, 9)))
    value = call(*given)
    forward = len(SEEN)
    torch.autograd.grad(value.pow(3).sum(), given)
    assert 0 < forward < len(SEEN)
    assert {*SEEN} == {("highest", "ieee")}
    torch._dynamo.reset()


def test_the_products_of_a_user_are_exact_inside():
    seen, rows = [], drawn(40, 3)

    def product(x, d):
        seen.append((torch.get_float32_matmul_precision(), read("mkldnn", "matmul")))
        return d * x + rows @ (rows.mT @ x)

    d = torch.linspace(1, 2, 40).square().requires_grad_()
    SETTINGS["medium"]()
    vector = pmaf.ied(FromMatvec(product, (40, 40), [d])).vectors
    forward = len(seen)
    vector.pow(3).sum().backward()
    assert 0 < forward < len(seen)
    assert {*seen} == {("highest", "ieee")}
    problem = pmaf.PrincipalEigenvectors(FromMatvec(product, (40, 40), [d.detach()]))
    pmaf.certify(problem, vector.detach())
    assert {*seen} == {("highest", "ieee")}
    assert torch.get_float32_matmul_precision() == "medium"


def test_an_error_inside_of_a_layer_brings_the_setting_back():
    SETTINGS["medium"]()
    before = state()
    with pytest.raises(ValueError, match="finite"):
        pmaf.less(torch.full((9, 3), torch.nan), torch.ones(9), solver=pmaf.solvers.Secular())

    def broken(x, d):
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        pmaf.ied(FromMatvec(broken, (40, 40), [torch.ones(40)]))
    assert state() == before


def test_a_backward_pass_in_another_thread_is_exact():
    given = leaves(SQUARE)
    value = pmaf.solve(Probed(given[0], drawn(3, 9))).value.pow(3).sum()
    SETTINGS["medium"]()
    SEEN.clear()
    thread = threading.Thread(target=torch.autograd.grad, args=(value, given))
    thread.start()
    thread.join(60)
    assert {*SEEN} == {("highest", "ieee")}
    assert torch.get_float32_matmul_precision() == "medium"


def test_hooks_on_tensors_run_once():
    A, calls = leaves(SQUARE)[0], []
    A.register_hook(calls.append)
    SETTINGS["high"]()
    (first,) = torch.autograd.grad(total(pmaf.ied(A, 2)), A, create_graph=True)
    total([first]).backward()
    assert len(calls) == 2
