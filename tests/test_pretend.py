"""The pretend device follows the rules of CUDA, as far as they are known, and counts right."""

import copy
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import pmaf
from pmaf.operators import Sparse
from pmaf.runtime.modes import plain
from tests import pretend
from tests.pretend import DEVICE, Pretend

X, INDEX = torch.randn(4, 4), torch.tensor([0, 2])
EYE = torch.eye(4)
SCALAR = torch.tensor(2.0)


def counts_of(call):
    with pretend.counted() as counts:
        call()
    return counts.launches, counts.total("wait"), counts.total("copy")


def into(target, where, value):
    target[where] = value


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        pytest.param(call, counts, id=name)
        for name, call, counts in (
            # launches, waits, copies
            ("pointwise", lambda x: x * 2 + 1, (2, 0, 0)),
            ("views", lambda x: x.mT[1:].unsqueeze(0).expand(3, -1, -1).diagonal(), (0, 0, 0)),
            ("product", lambda x: x @ x, (1, 0, 0)),
            ("reshape of a view", lambda x: x.mT.reshape(-1), (1, 0, 0)),
            ("a number", lambda x: x + 3.0, (1, 0, 0)),
            ("a number of the host", lambda x: x * SCALAR, (1, 0, 0)),
            ("where with one", lambda x: torch.where(x > 0, x, SCALAR), (2, 0, 1)),
            ("where with a constant", lambda x: torch.where(x > 0, x, 0.0), (3, 0, 0)),
            ("item", lambda x: x[0, 0].item(), (0, 1, 0)),
            ("float", lambda x: float(x[0, 0]), (0, 1, 0)),
            ("bool", lambda x: bool((x > 9).any()), (2, 1, 0)),
            ("if", lambda x: 1 if (x > 9).all() else 2, (2, 1, 0)),
            ("tolist", lambda x: x.tolist(), (0, 1, 0)),
            ("equal", lambda x: torch.equal(x, x.clone()), (3, 1, 0)),
            ("nonzero", lambda x: x.nonzero(), (4, 1, 0)),
            ("read by a mask", lambda x: x[x > -9], (6, 1, 0)),
            ("write a number by a mask", lambda x: into(x, x > 0, 0.0), (3, 0, 0)),
            ("write numbers by a mask", lambda x: into(x, x > -9, x[x > -9]), (12, 2, 0)),
            ("masked_fill", lambda x: x.masked_fill(x > 0, 1.0), (3, 0, 0)),
            ("masked_fill_", lambda x: x.clone().masked_fill_(x > 0, 1.0), (3, 0, 0)),
            ("index of the host", lambda x: x[INDEX], (1, 0, 1)),
            ("index", lambda x: x[pretend.put(INDEX)], (1, 0, 0)),
            ("gather", lambda x: x.gather(0, pretend.put(INDEX[None])), (1, 0, 0)),
            ("sort", lambda x: x.sort(), (2, 0, 0)),
            ("topk", lambda x: x.topk(2), (2, 0, 0)),
            ("to the host", lambda x: x.cpu(), (0, 1, 0)),
            ("to the device", lambda x: X.to(x.device), (0, 0, 1)),
            ("to where it is", lambda x: x.to(x.device), (0, 0, 0)),
            ("to float64", lambda x: x.double(), (1, 0, 0)),
            ("written from the host", lambda x: x.copy_(X), (0, 0, 1)),
            ("written to the host", lambda x: X.clone().copy_(x), (0, 1, 0)),
            ("constant", lambda x: torch.tensor([1.0, 2.0], device=x.device), (0, 0, 1)),
            ("constant of its kind", lambda x: x.new_tensor([1.0, 2.0]), (0, 0, 1)),
            ("zeros", lambda x: torch.zeros(3, device=x.device), (1, 0, 0)),
            ("eye", lambda x: torch.eye(3, device=x.device), (2, 0, 0)),
            ("arange", lambda x: torch.arange(3, device=x.device), (1, 0, 0)),
            ("random", lambda x: torch.randn(3, device=x.device), (1, 0, 0)),
            ("zeros of its kind", lambda x: x.new_zeros(3), (1, 0, 0)),
            ("memory", lambda x: x.new_empty(3), (0, 0, 0)),
            ("nothing", lambda x: x[:0] + 1, (0, 0, 0)),
            ("clone", lambda x: x.clone(), (1, 0, 0)),
            ("contiguous", lambda x: x.contiguous(), (0, 0, 0)),
            ("cat", lambda x: torch.cat([x, x]), (1, 0, 0)),
            ("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), (1, 0, 0)),
            ("eigh", lambda x: torch.linalg.eigh(x), (1, 1, 0)),
            ("svd", lambda x: torch.linalg.svd(x), (1, 2, 0)),
            ("inv", lambda x: torch.linalg.inv(x), (2, 1, 0)),
            ("inv_ex", lambda x: torch.linalg.inv_ex(x), (1, 0, 0)),
            ("cholesky", lambda x: torch.linalg.cholesky(x), (2, 1, 0)),
            ("cholesky_ex", lambda x: torch.linalg.cholesky_ex(x), (1, 0, 0)),
            ("solve_ex", lambda x: torch.linalg.solve_ex(x, x), (1, 0, 0)),
            ("lu_factor_ex", lambda x: torch.linalg.lu_factor_ex(x), (1, 0, 0)),
            (
                "solve_triangular",
                lambda x: torch.linalg.solve_triangular(x, x, upper=True),
                (1, 0, 0),
            ),
            ("qr", lambda x: torch.linalg.qr(x), (1, 0, 0)),
        )
    ],
)
def test_counts(call, counts):
    x = pretend.put(EYE)
    assert counts_of(lambda: call(x)) == counts


@pytest.mark.parametrize(
    ("name", "call", "many"),
    [
        ("eigh", torch.linalg.eigh, 1),
        ("svd", torch.linalg.svd, 1),
        ("eig", torch.linalg.eig, 7),
        ("qr", torch.linalg.qr, 7),
        ("cholesky_ex", torch.linalg.cholesky_ex, 1),
    ],
)
def test_calls_of_cusolver_for_a_batch(name, call, many):
    with pretend.counted() as counts:
        call(pretend.put(torch.eye(5).expand(7, 5, 5)))
    assert counts.by_call("linalg") == {name: many}


def test_svd_is_a_loop_beyond_32():
    with pretend.counted() as counts:
        torch.linalg.svd(pretend.put(torch.randn(3, 33, 4)))
    assert counts.decompositions == "svd×3"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name)
        for name, call in (
            ("pointwise", lambda x: x + X),
            ("two numbers of the host", lambda x: torch.addcmul(x, SCALAR, SCALAR)),
            ("an outer product with one", lambda x: torch.outer(x[0], SCALAR[None])),
            ("product", lambda x: x @ X),
            ("product from the left", lambda x: X @ x),
            ("batched product", lambda x: torch.bmm(x[None], X[None])),
            ("cat", lambda x: torch.cat([x, X])),
            ("stack", lambda x: torch.stack([X, x])),
            ("into the host", lambda x: X.clone().add_(x)),
            ("one number into the host", lambda x: X.clone().add_(x[0, 0])),
            ("mask of the host", lambda x: x.masked_fill(X > 0, 0.0)),
            ("index of the device", lambda x: X[pretend.put(INDEX)]),
            ("gather", lambda x: x.gather(0, INDEX[None])),
            ("values of the host", lambda x: into(x, INDEX, X[INDEX])),
            ("solve", lambda x: torch.linalg.solve_ex(x, X)),
            ("where", lambda x: torch.where(X > 0, x, x)),
        )
    ],
)
def test_devices_do_not_mix(call):
    with pytest.raises(RuntimeError, match=r"found at least two devices, pretend:0 and cpu!"):
        call(pretend.put(EYE))


def test_a_tensor_says_where_it_is():
    x = pretend.put(X)
    assert x.device == DEVICE == torch.device("pretend", 0)
    assert x.device.type == "pretend"
    assert not any((x.is_cpu, x.is_cuda, x.is_meta))
    assert plain(x)
    assert plain(nn.Parameter(x))
    assert repr(x) == "Pretend((4, 4), torch.float32)"
    assert torch._C._len_torch_dispatch_stack() == 0


def test_what_needs_memory_of_the_host_complains():
    x = pretend.put(X)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        np.asarray(x)
    with pytest.raises(RuntimeError, match="memory of the device"):
        x.data_ptr()
    with pytest.raises(RuntimeError, match="'pretend' device type for generator"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="'pretend' device type for generator"):
        x.normal_(generator=torch.Generator())


def test_numbers_are_those_of_the_cpu():
    x = pretend.put(X)
    for call in (torch.linalg.pinv, torch.linalg.qr, lambda x: (x @ x.mT).tanh().sum(0)):
        found = torch.utils._pytree.tree_map(Pretend.cpu, call(x))
        torch.testing.assert_close(found, call(X), rtol=0, atol=0)


def test_writing_to_a_view_writes_to_the_tensor():
    x = pretend.put(X)
    y = x.mT[1]
    y.zero_()
    assert not x[:, 1].any()
    assert x._version == y._version == 1
    assert x.clone().unsqueeze_(0).shape == (1, 4, 4)


def test_deep_copies():
    layer = nn.Linear(4, 2).to(DEVICE)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert type(other.weight) is Pretend
    assert isinstance(other.weight, nn.Parameter)
    assert other.weight.any()


def test_the_copy_on_the_device_is_one():
    given = X.clone()
    x = pretend.put(given)
    given.zero_()
    assert x.any()


def test_autograd():
    x = pretend.put(X).requires_grad_()
    with pretend.counted() as counts:
        (gradient,) = torch.autograd.grad((x @ x).tanh().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
    y = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad((y @ y).tanh().sum(), y, create_graph=True)
    (wanted_second,) = torch.autograd.grad(wanted.square().sum(), y)
    assert type(gradient) is type(second) is Pretend
    torch.testing.assert_close(gradient.detach().cpu(), wanted.detach(), rtol=0, atol=0)
    torch.testing.assert_close(second.cpu(), wanted_second, rtol=0, atol=0)
    assert counts.waits == 0
    assert counts.by_call("launch")["mm"] > 3


def test_gradients_pass_between_devices():
    x = X.clone().requires_grad_()
    (x.to(DEVICE) * 3).cpu().sum().backward()
    assert type(x.grad) is torch.Tensor
    assert bool((x.grad == 3).all())


def test_backward_passes_run_in_a_thread_of_the_device():
    threads = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            threads.append(threading.get_ident())
            return grad * 2

    x = pretend.put(X).requires_grad_()
    with pretend.counted() as counts:
        Seen.apply(x).sum().backward()
    assert threads != [threading.get_ident()]
    assert counts.by_call("launch")["mul"] == 2


def test_other_threads_are_counted():
    x = pretend.put(X)
    with pretend.counted() as counts:
        thread = threading.Thread(target=lambda: x + 1)
        thread.start()
        thread.join()
    assert counts.launches == 1


def test_a_context_of_counts_inside_of_another():
    x = pretend.put(X)
    with pretend.counted() as outer:
        x = x + 1
        with pretend.counted() as inner:
            x = x + 1
        x = x + 1
    assert (outer.launches, inner.launches) == (3, 1)


def test_lines_of_the_library_are_named():
    A = torch.randn(70, 40, 40)
    A = pretend.put(A + A.mT)
    with pretend.counted() as counts:
        pmaf.ied(A)
    assert all(line.partition(":")[2].isdigit() for line in counts.by_line("launch"))
    (line,) = counts.by_line("linalg")
    assert line.startswith("linalg/")
    assert {x.stack[-1].partition(":")[0] for x in counts.events} == {"layers/ied.py"}


def test_a_kernel_counts_as_one_launch():
    x = pretend.put(X)
    with pretend.counted() as counts:
        x.inner.mul_(2)
        pretend.launched("double")
    assert counts.by_call("launch") == {"double": 1}
    torch.testing.assert_close(x.cpu(), 2 * X, rtol=0, atol=0)


@pytest.mark.parametrize("by", ["context", "default"])
def test_as_the_default_device(by):
    with torch.device("pretend") if by == "context" else nullcontext():
        try:
            if by == "default":
                torch.set_default_device("pretend")
            found = (
                *(torch.zeros(2), torch.eye(2), torch.randn(2), torch.full((2,), 1.0)),
                *(torch.tensor(3.0), torch.tensor([1, 2]), torch.as_tensor([0.5]), torch.arange(3)),
                torch.empty(2, 3),
            )
        finally:
            torch.set_default_device(None)
    assert all(type(x) is Pretend for x in found)


def test_modules_move():
    layer = nn.Linear(4, 2).to(DEVICE)
    assert all(type(x) is Pretend for x in layer.parameters())
    layer(pretend.put(X)).sum().backward()
    assert type(layer.weight.grad) is Pretend


def test_capture():
    x = pretend.put(EYE)
    with pretend.options(capture=True):
        torch.linalg.cholesky_ex(x @ x)
        for call in (lambda: x.sum().item(), lambda: torch.linalg.eigh(x), lambda: X.to(DEVICE)):
            with pytest.raises(pretend.CaptureError):
                call()
    x.sum().item()


def test_without_float64():
    x = pretend.put(X)
    with pretend.options(doubles=False):
        for call in (x.double, lambda: torch.zeros(2, dtype=torch.float64, device=DEVICE)):
            with pytest.raises(TypeError, match="MPS framework doesn't support"):
                call()
        assert x.to(torch.complex64).is_complex()
    assert x.double().dtype == torch.float64


def product_error(call, *given):
    with torch.no_grad():
        found = call(*map(pretend.put, given)).cpu()
    return float((found - call(*given)).abs().max())


def test_tf32_follows_the_settings_of_the_process():
    left, right = torch.randn(20, 30), torch.randn(30, 20)
    assert product_error(torch.mm, left, right) == 0
    torch.set_float32_matmul_precision("high")
    try:
        for call in (
            torch.mm,
            lambda x, y: (x[None] @ y[None])[0],
            lambda x, y: torch.addmm(x.new_ones(20, 20), x, y),
            lambda x, y: torch.baddbmm(x.new_ones(1, 20, 20), x[None], y[None]),
            lambda x, y: x.to(torch.complex64) @ y.to(torch.complex64),
        ):
            assert 1e-4 < product_error(call, left, right) < 3e-2
        # Vectors have routines of their own, and so has float64.
        assert product_error(lambda x, y: x @ y[:, 0], left, right) == 0
        assert product_error(lambda x, y: x.double() @ y.double(), left, right) == 0
    finally:
        torch.set_float32_matmul_precision("highest")
    assert product_error(torch.mm, left, right) == 0


def test_tf32_has_ten_bits():
    x = torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-12, torch.inf, torch.nan, -(2.0**-130)])
    found = pretend.tf32.rounded(x)
    torch.testing.assert_close(found[:2], x[:2], rtol=0, atol=0)
    assert found[2] == 1
    assert found[3] == torch.inf
    assert found[4].isnan()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout):
    dense = torch.diag(torch.tensor([3.0, 1.0, 2.0, 0.5]))
    make = torch.Tensor.to_sparse_coo if layout == "coo" else torch.Tensor.to_sparse_csr
    A, x = make(dense), pretend.put(X)
    moved = A.to(DEVICE)
    assert moved.layout == A.layout
    assert moved.device == DEVICE
    assert type(moved.values() if layout == "csr" else moved.coalesce().values()) is Pretend
    torch.testing.assert_close((moved @ x).cpu(), A @ X)
    operator = Sparse(moved)
    values = operator.tensors[0].clone().requires_grad_()
    found = pmaf.ied(operator.with_tensors([values]))
    (gradient,) = torch.autograd.grad(found.values, values)
    torch.testing.assert_close(gradient.cpu(), torch.tensor([1.0, 0, 0, 0]), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_made_on_the_device():
    A = torch.eye(3).to_sparse_csr()
    parts = [pretend.put(x) for x in (A.crow_indices(), A.col_indices(), A.values())]
    found = torch.sparse_csr_tensor(*parts, (3, 3), device=DEVICE)
    assert found.layout == torch.sparse_csr
    torch.testing.assert_close((found @ pretend.put(X[:3])).cpu(), X[:3])
    index = pretend.put(torch.tensor([[0, 1], [1, 0]]))
    found = torch.sparse_coo_tensor(index, pretend.put(torch.ones(2)), (2, 2), device=DEVICE)
    assert found.layout == torch.sparse_coo


def test_the_operators_of_the_library_run_on_the_device():
    """A call that cannot be followed, such as this one under `vmap`, goes through `pmaf::solve`."""
    A = pretend.put((X + X.mT).expand(3, 4, 4))
    with pretend.counted() as counts:
        found = torch.func.vmap(lambda A: pmaf.ied(A).values)(A)
    assert type(found) is Pretend
    assert any("runtime/opaque.py" in line for x in counts.events for line in x.stack)
    torch.testing.assert_close(found.cpu(), torch.linalg.eigvalsh(X + X.mT)[-1].expand(3))


def test_inference_mode():
    x = pretend.put(X)
    with torch.inference_mode():
        assert counts_of(lambda: x.mT[0] + 1) == (1, 0, 0)
        assert type(x.mT[0] + 1) is Pretend
        assert type(x.cpu()) is torch.Tensor
        assert counts_of(x.tolist) == (0, 1, 0)
        assert counts_of(lambda: x.cpu().to(DEVICE)) == (0, 1, 1)
        assert type(pmaf.less(x, x[0])) is Pretend
