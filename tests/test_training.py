"""Layers in training loops: three hundred steps, and nothing that is kept from one to the next."""

import gc
import weakref

import pytest
import torch

import pmaf

STEPS = 300


def solve_node(node):
    """The node of the layer itself: the first that is written in Python."""
    while not isinstance(node, torch.autograd.function.BackwardCFunction):
        node = node.next_functions[0][0]
    return node


def tensors_alive():
    gc.collect()
    # By type: some objects of torch warn when they are asked for their class.
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def train(step):
    """Run the steps; as many tensors are alive at the end as after the first few."""
    first = None
    graphs = []
    for i in range(STEPS):
        out = step()
        graphs.append(weakref.ref(solve_node(out.grad_fn)))
        out.square().mul(
            torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        ).sum().backward()
        if i == 5:
            first = tensors_alive()
    assert tensors_alive() <= first
    alive = sum(ref() is not None for ref in graphs)
    assert alive <= 2  # the last, which the loop still holds


def parameter(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("given", ["init", "reference", "both"])
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (6, dict()),
        (6, dict(k=2)),
        (6, dict(k=2, largest=False)),
        (6, dict(solver=pmaf.solvers.PowerIteration(iterations=50))),
        (6, dict(k=2, solver=pmaf.solvers.Lanczos())),
        (6, dict(symmetric=False)),
        (130, dict()),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
def test_eigenvectors_from_step_to_step(n, options, given):
    W = parameter(n, n)
    optimiser = torch.optim.SGD([W], lr=1e-3)
    last = {}

    def step():
        optimiser.step()
        optimiser.zero_grad()
        A = W.abs() if options.get("symmetric") is False else W @ W.T
        vectors = pmaf.ied(A, **options, **last).vectors
        names = ("init", "reference") if given == "both" else (given,)
        last.update(dict.fromkeys(names, vectors))
        return vectors

    train(step)


@pytest.mark.parametrize(
    "solver",
    [None, pmaf.solvers.Secular(), pmaf.solvers.ProjectedGradient(max_iterations=20)],
    ids=repr,
)
@pytest.mark.parametrize("m", [6, 2])
@pytest.mark.filterwarnings("ignore::pmaf.ConvergenceWarning")
def test_least_squares_from_step_to_step(m, solver):
    A, b = parameter(m, 4), parameter(m)
    optimiser = torch.optim.SGD([A, b], lr=1e-3)
    last = {}

    def step():
        optimiser.step()
        optimiser.zero_grad()
        last["init"] = u = pmaf.less(A, b, solver=solver, **last)
        return u

    train(step)


def test_modules_from_step_to_step():
    W = parameter(5, 5)
    layer, last = pmaf.IED(k=2), None

    def step():
        nonlocal last
        last = layer(W @ W.T, reference=last, init=last).vectors
        return last

    train(step)


def test_start_and_reference_get_no_gradient():
    A = parameter(5, 5)
    start = parameter(5)
    found = pmaf.ied(A @ A.T, init=start, reference=start, solver=pmaf.solvers.PowerIteration())
    (found.vectors.sum() + found.values).backward()
    assert start.grad is None
    assert A.grad is not None
