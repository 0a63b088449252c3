"""What a trace contains of a call: one operator, and one for its derivative."""

import gc
import subprocess
import sys
import time
import weakref

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pmaf
from pmaf.autograd.traced import Whole
from pmaf.gradients import DDN
from pmaf.operators import Diagonal
from tests.transforms import COLUMNS, SIZED, Column

pytestmark = [
    # Tracing and compiling raise torch's own deprecation warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*complex operators:UserWarning"),
    pytest.mark.filterwarnings("ignore:A is not symmetric:UserWarning"),
    pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning"),
]
T = torch.float64
# Functions without a name are traced by their formulas. The others have constants beside inputs.
KNOWN = [x for x in COLUMNS if x not in SIZED and not x.name.startswith("spectral")]
OPAQUE = [x for x in KNOWN if not x.eager_only]


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=T)


def operators(graph: torch.fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("pmaf")]


def steps(call, *inputs):
    """The operator of each solve in a trace, with its operands, as `opcheck` takes them."""
    graph = make_fx(lambda *x: call(*x), tracing_mode="fake")(*inputs)
    found = [node for node in graph.graph.nodes if str(node.target) == "pmaf.solve.default"]
    values = {node.name: x for node, x in zip(graph.graph.nodes, inputs)}
    return [([x and values.get(x.name) for x in node.args[0]], node.args[1]) for node in found]


def both(call):
    """From leaves to the gradients of the sum of squares."""

    def gradients(*inputs):
        return torch.autograd.grad(call(*inputs).square().sum(), inputs)

    return gradients


def leaves(*tensors):
    return tuple(x.clone().requires_grad_() for x in tensors)


def close(found, expected, tolerance=1e-9):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * (1 + float(y.abs().max())))


@pytest.mark.parametrize("column", OPAQUE, ids=lambda column: column.name)
def test_a_call_is_one_operator_and_its_derivative_another(column: Column):
    inputs = leaves(*column.inputs())
    gradients = both(column.call)
    graph = make_fx(gradients, tracing_mode="fake")(*inputs)
    assert operators(graph) == ["pmaf.solve.default", "pmaf.pull.default"]
    close(graph(*inputs), gradients(*inputs), 1e-6)


NAMED = {
    "spectral": lambda S: pmaf.spectral(S @ S.mT, "sqrt"),
    "spectral, k": lambda S: pmaf.spectral(S @ S.mT, "exp", 2, largest=False),
    "Spectral": lambda S: pmaf.Spectral("square")(S),
    "solve SpectralFunction": lambda S: pmaf.solve(pmaf.SpectralFunction(S @ S.mT, "sqrt")).value,
    "solve": lambda S: pmaf.solve(pmaf.SphereLeastSquares(S, S[..., 0])).value,
    "ied, M": lambda S: pmaf.ied(S, 2, M=Diagonal(S[..., 0].square() + 1)).vectors,
    "ied, reference": lambda S: pmaf.ied(S, reference=S[..., 0].detach()).vectors,
    "less, radius": lambda S: pmaf.less(S, S[..., 0], radius=2.5, ball=True),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", [torch.float32, T], ids=str)
def test_named_functions_and_problems_are_one_operator(name, dtype):
    (S,) = leaves(seeded(3, 4, 4).to(dtype))
    gradients = both(NAMED[name])
    graph = make_fx(gradients, tracing_mode="fake")(S)
    assert operators(graph) == ["pmaf.solve.default", "pmaf.pull.default"]
    tolerance = 1e-9 if dtype is T else 1e-4
    close(graph(S), gradients(S), tolerance)
    torch._dynamo.reset()
    compiled = torch.compile(NAMED[name], fullgraph=True, backend="aot_eager")
    close(both(compiled)(S), gradients(S), tolerance)


@pytest.mark.parametrize("name", ["ied, k=3", "ied, k=2, diagonal M", "isvd"])
def test_opcheck_of_a_whole_call(name):
    (column,) = (x for x in COLUMNS if x.name == name)
    inputs = column.inputs()
    ((operands, call),) = steps(column.call, *inputs)
    assert len([x for x in operands if x is not None]) == len(inputs)
    torch.library.opcheck(torch.ops.pmaf.solve.default, (operands, call))


@pytest.fixture
def solves(monkeypatch):
    """How often a call was solved inside of an operator."""
    runs, run = [], Whole._run
    monkeypatch.setattr(Whole, "_run", lambda self, *given: (runs.append(1), run(self, *given))[1])
    return runs


def compiled_less(backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(lambda A, b: pmaf.less(A, b), fullgraph=True, backend=backend)


def test_the_derivative_uses_the_record_of_the_solve(solves):
    A, b = leaves(seeded(6, 5, 3), seeded(6, 5))
    layer = compiled_less()
    found = both(layer)(A, b)
    del solves[:]
    found = both(layer)(A, b)
    assert len(solves) == 1
    close(found, both(pmaf.less)(A, b))


def test_a_lost_record_is_found_again(solves):
    A, b = seeded(6, 5, 3), seeded(6, 5)
    ((_, call),) = steps(pmaf.less, *leaves(A, b))
    operands = [A, b, None, None, None, None]
    y, _, seen = torch.ops.pmaf.solve(operands, call)
    needs = [True, True, *[False] * 4]
    found = torch.ops.pmaf.pull(operands, seen, [2 * y, None], needs, call)
    assert len(solves) == 1
    again = torch.ops.pmaf.pull(operands, seen.clone(), [2 * y, None], needs, call)
    assert len(solves) == 2
    close(again, found)
    close(found, both(pmaf.less)(*leaves(A, b)))


def test_a_record_lives_as_long_as_its_tensor():
    A, b = seeded(6, 5, 3), seeded(6, 5)
    ((_, call),) = steps(pmaf.less, *leaves(A, b))
    found = torch.ops.pmaf.solve([A, b, None, None, None, None], call)
    known = weakref.ref(found[-1].record.leaves[0])
    assert known() is not None
    del found
    gc.collect()
    assert known() is None


def test_memory_may_be_used_again_after_the_solve():
    A, b = seeded(6, 5, 3), seeded(6, 5)
    expected = both(pmaf.less)(*leaves(A, b))
    ((_, call),) = steps(pmaf.less, *leaves(A, b))
    operands = [A, b, None, None, None, None]
    y, _, seen = torch.ops.pmaf.solve(operands, call)
    incoming = 2 * y
    for x in (A, b, y):
        x.fill_(7)
    needs = [True, True, *[False] * 4]
    close(torch.ops.pmaf.pull(operands, seen, [incoming, None], needs, call), expected)


def test_numbers_are_checked_inside_of_the_operator():
    A, b = seeded(6, 5, 3), seeded(6, 5)
    torch._dynamo.reset()
    layer = torch.compile(
        lambda A, b, w: pmaf.less(A, b, weights=w), fullgraph=True, backend="aot_eager"
    )
    layer(A, b, b.abs())
    with pytest.raises(ValueError, match="weights must not be negative"):
        layer(A, b, -b.abs())


@pytest.mark.parametrize("only", [0, 1, None])
def test_mapped_inside_of_a_trace(only):
    A, b = seeded(4, 5, 3), seeded(4, 5)
    given = tuple(x if only in (None, i) else x[0] for i, x in enumerate((A, b)))
    dims = tuple(0 if only in (None, i) else None for i in range(2))
    torch._dynamo.reset()
    mapped = vmap(pmaf.less, dims)
    found = torch.compile(mapped, fullgraph=True, backend="aot_eager")(*given)
    close([found], [mapped(*given)])
    # The operators themselves have rules for the gradients of each entry, too.
    ((operands, call),) = steps(pmaf.less, *leaves(A[0], b[0]))
    needs = [True, True, *[False] * 4]

    def gradient(A, b):
        given = [A, b, *operands[2:]]
        y, _, seen = torch.ops.pmaf.solve(given, call)
        return tuple(torch.ops.pmaf.pull(given, seen, [y.cos(), None], needs, call))

    each = grad(lambda A, b: pmaf.less(A, b).sin().sum(), (0, 1))
    close(vmap(gradient, dims)(*given), vmap(each, dims)(*given))


def test_jacobians_of_a_compiled_call_solve_once(solves):
    (A,) = leaves(seeded(4, 4))
    torch._dynamo.reset()
    jacobian = jacrev(lambda A: pmaf.ied(A).vectors)
    compiled = torch.compile(jacobian, fullgraph=True, backend="aot_eager")
    close([compiled(A.detach())], [jacobian(A.detach())])
    del solves[:]
    compiled(A.detach())
    assert len(solves) == 1


def test_forward_mode_inside_of_a_trace():
    A, E = seeded(4, 4), seeded(4, 4).flip(0)
    for layer in (
        lambda A: pmaf.ied(A).vectors,
        lambda A: pmaf.less(A, A[0]),
        lambda A: pmaf.spectral(A @ A.mT, "sqrt"),
    ):
        torch._dynamo.reset()

        def tangent(A, E, layer=layer):
            return jvp(layer, (A,), (E,))[1]

        found = torch.compile(tangent, backend="aot_eager")(A, E)
        close([found], [tangent(A, E)])


def test_a_trace_that_is_no_compilation_goes_on_to_second_derivatives():
    A, b = leaves(seeded(5, 3), seeded(5))

    def second(layer, A, b):
        (dA,) = torch.autograd.grad(layer(A, b).sin().sum(), A, create_graph=True)
        return torch.autograd.grad(dA.square().sum(), (A, b))

    expected = second(pmaf.less, A, b)
    graph = make_fx(lambda A, b: second(pmaf.less, A, b), tracing_mode="fake")(A, b)
    close(graph(A, b), expected)
    for backend in ("eager", "aot_eager"):
        with pytest.raises(RuntimeError, match=r"double backward|does not require grad"):
            second(compiled_less(backend), A, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own
def test_compiled_autograd():
    A, b = leaves(seeded(6, 5, 3), seeded(6, 5))
    layer = compiled_less()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        layer(A, b).square().sum().backward()
    close((A.grad, b.grad), both(pmaf.less)(*leaves(A, b)))


def test_offloaded_tensors():
    A, b = leaves(seeded(6, 5, 3), seeded(6, 5))
    layer = compiled_less()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        found = both(layer)(A, b)
    close(found, both(pmaf.less)(A, b))


def test_lazy_conjugates_inside_of_a_compiled_graph():
    A = torch.complex(seeded(3, 4, 4), seeded(3, 4, 4).mT)
    A = A + A.mH

    def layer(A):
        return pmaf.ied(A, 2).vectors

    torch._dynamo.reset()
    close([torch.compile(layer, fullgraph=True, backend="aot_eager")(A)], [layer(A)])


def test_rules_of_the_paper_are_compiled():
    A, b = leaves(seeded(6, 5, 3), seeded(6, 5))

    def layer(A, b):
        return pmaf.less(A, b, gradient=DDN(exploit=False))

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(both(compiled)(A, b), both(layer)(A, b))


LOADED = """
import sys, torch{imports}
program = torch.export.load(sys.argv[1])
print(program.module()(torch.eye(3), torch.ones(3)).tolist())
"""


def test_a_graph_of_another_process_finds_its_recipe(tmp_path):
    program = torch.export.export(pmaf.LESS(radius=2.0), (torch.eye(3), torch.ones(3)))
    file = tmp_path / "layer.pt2"
    torch.export.save(program, file)

    def run(imports):
        script = LOADED.format(imports=imports)
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(file)],
            capture_output=True,
            text=True,
        )

    assert run(", pmaf").stdout.split("[")[1].startswith("1.15")
    assert "pmaf" in run("").stderr


def test_an_unknown_class_in_a_graph_is_named():
    text = "{'class': 'models.Missing'}"
    with pytest.raises(LookupError, match=r"models\.Missing is not defined here; import"):
        torch.ops.pmaf.solve([torch.ones(3)], text)


def test_different_options_are_different_texts():
    A, b = leaves(seeded(5, 3), seeded(5))
    calls = (
        lambda A, b: pmaf.less(A, b),
        lambda A, b: pmaf.less(A, b, radius=2.0),
        lambda A, b: pmaf.less(A, b, ball=True),
        lambda A, b: pmaf.less(A, b, solver=pmaf.solvers.Secular()),
        lambda A, b: pmaf.less(A, b, gradient=DDN()),
        lambda A, b: pmaf.less(A.detach(), b),
    )
    texts = {steps(call, A, b)[0][1] for call in calls}
    assert len(texts) == len(calls)


@pytest.mark.parametrize("name", ["weights", "ied", "isvd", "spectral"])
def test_a_first_call_takes_seconds(name):
    A, w = leaves(seeded(6, 5, 3), seeded(6, 5).abs())
    layer = {
        "weights": lambda A, w: pmaf.less(A, w, weights=w),
        "ied": lambda A, w: pmaf.ied(A.mT @ A, 2, M=Diagonal(w[..., :3])).vectors,
        "isvd": lambda A, w: pmaf.isvd(w.unsqueeze(-1) * A, 2).left,
        "spectral": lambda A, w: pmaf.spectral(A.mT @ (w.unsqueeze(-1) * A), "sqrt"),
    }[name]
    torch.compile(lambda x: x.sin(), backend="aot_eager")(A)  # imports the compiler
    torch._dynamo.reset()
    start = time.process_time()
    both(torch.compile(layer, fullgraph=True, backend="aot_eager"))(A, w)
    assert time.process_time() - start < 3


def test_the_vmap_of_several_gradients_has_rules_for_steps():
    """The vmap of torch.func is another."""
    A, b = leaves(seeded(3, 6, 4), seeded(3, 6))
    for solver in (pmaf.solvers.Secular(), pmaf.solvers.Cholesky()):
        y = pmaf.less(A, b, solver=solver)
        rows = seeded(4, *y.shape)
        found = torch.autograd.grad(y, (A, b), rows, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(y, (A, b), v, retain_graph=True) for v in rows]
        close(found, [torch.stack(parts) for parts in zip(*each)])


def test_a_compiler_leaves_the_operators_out_of_cuda_graphs():
    """`is_cudagraph_unsafe_fx_node` of torch._inductor.utils decides this.

    It says so for an operator with the tag: "isinstance(target, torch._ops.OpOverload) and
    torch._C.Tag.cudagraph_unsafe in target.tags". The scheduler then ends a partition of the graph
    before such a node, and without partitions the whole graph is not captured.
    """
    from torch._inductor import utils

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    usual = graph.call_function(torch.ops.aten.mm.default, (x, x))
    assert not utils.is_cudagraph_unsafe_fx_node(usual)
    operators = torch.ops.pmaf.solve.default, torch.ops.pmaf.pull.default
    for operator in operators:
        node = graph.call_function(operator, (x,))
        assert utils.is_cudagraph_unsafe_fx_node(node)
        module = torch.fx.GraphModule({}, graph)
        assert utils.get_first_incompatible_cudagraph_node(module) is not None
        graph.erase_node(node)
    module = torch.fx.GraphModule({}, graph)
    assert utils.get_first_incompatible_cudagraph_node(module) is None
