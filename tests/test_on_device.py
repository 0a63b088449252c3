"""What `pytest --device` does to arguments, results and tests."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import pmaf
from pmaf.operators import FromMatvec, Gram, Sparse
from tests import pretend
from tests.on_device import FILES, TESTS, changed

HERE = Path(__file__).parent


def sent(x):
    return changed(x, lambda x: x.to(pretend.DEVICE))


def test_arguments_move_with_all_that_they_hold():
    x, A = torch.randn(4), torch.diag(torch.arange(1.0, 5.0))
    moved = sent((x, [x], 3, "largest", None, pmaf.PrincipalEigenvectors(A, 2, reference=x)))
    assert moved[0].device == moved[1][0].device == pretend.DEVICE
    assert moved[2:5] == (3, "largest", None)
    assert moved[5].matrix.device == moved[5].reference.device == pretend.DEVICE
    for operator in (
        Sparse(A.to_sparse_csr()),
        Gram(A),
        FromMatvec(lambda x, A: x @ A, (4, 4), [A]),
    ):
        there = sent(operator)
        assert type(there) is type(operator)
        assert all(x.device == pretend.DEVICE for x in there.tensors)
        assert all(x.is_cpu for x in operator.tensors)
        torch.testing.assert_close(there(sent(x)).cpu(), operator(x))


def test_gradients_come_back():
    A = torch.diag(torch.arange(1.0, 5.0)).requires_grad_()
    found = changed(pmaf.ied(sent(A)), torch.Tensor.cpu)
    assert type(found) is pmaf.Eigenpairs
    found.values.backward()
    torch.testing.assert_close(A.grad, torch.diag(torch.tensor([0.0, 0, 0, 1])))


def test_the_files_that_are_left_out_exist():
    names = {path.name for path in HERE.glob("test_*.py")}
    assert names >= FILES.keys()
    for part in TESTS:
        file, _, test = part.partition("::")
        text = (HERE / f"{file}.py").read_text()
        assert all(f" {name.partition('[')[0]}(" in text or f"class {name}:" in text
                   for name in test.split("::"))  # fmt: skip


def test_a_run_on_the_pretend_device():
    """In a process of its own, because layers are wrapped in the whole process."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "pretend"),
            *("--no-doubles", "--default-device", "--tf32", str(HERE / "test_definite.py")),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PMAF_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=HERE.parent,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "= on pretend =" in run.stdout
