"""The rooms of the library, and which of them may know of which."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pmaf.linalg import decompositions
from pmaf.linalg.products import broadcast
from pmaf.runtime.modes import constant_in_traces

SOURCE = Path(__file__).parent.parent / "src"
# A room imports from those before it, and from itself.
ROOMS = [
    "errors",
    "runtime",
    "linalg",
    "native",
    "launched",
    "metrics",
    "tangent",
    "krylov",
    "operators",
    "solvers",
    "gradients",
    "solution",
    "certificate",
    "reductions",
    "autograd",
    "problem",
    "executors",
    "recipe",
    "solving",
    "layers",
    "explanation",
    "__init__",
]
FILES = sorted((SOURCE / "pmaf").rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def room_of(module: str) -> str:
    """The room of a module; the package itself is the last one."""
    return [*module.split("."), "__init__"][1]


def imports(path: Path) -> list[tuple[str, str]]:
    """Modules and names that a file imports, at the top, inside functions and for types."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things are"
            found += [(node.module or "", alias.name) for alias in node.names]
    # `from pmaf import errors` imports a module, not a name of the package.
    return [
        (f"pmaf.{name}", "") if module == "pmaf" and name in ROOMS else (module, name)
        for module, name in found
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path):
    here = room_of(name_of(path))
    if here == "__main__":  # the command, which finds the laboratory or names the extra
        return
    for module, name in imports(path):
        assert not module.startswith("pmaf_lab"), f"the library imports {module}"
        if module.split(".")[0] != "pmaf":
            continue
        there = room_of(module)
        assert ROOMS.index(there) <= ROOMS.index(here), f"{here} imports {module}, which is above"
        if there != here:
            parts = [*module.split("."), name]
            private = [part for part in parts if part.startswith("_") and part != "__init__"]
            assert not private, f"{here} reaches into {module} for {name}"


# Why a file imports inside of functions.
LATE = {
    "pmaf.__main__": "the command names the extra that it needs",
    "pmaf.launched.__init__": "Triton takes long to import, and may be missing",
    "pmaf.runtime.ranks": "torch.distributed takes long to import, and may be missing",
}


def late_imports(path: Path) -> list[int]:
    """The lines of imports inside of functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node.lineno
        for function in ast.walk(tree)
        if isinstance(function, functions)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_are_at_the_top(path):
    assert bool(late_imports(path)) == (name_of(path) in LATE), late_imports(path)


def test_no_module_of_the_root_is_private():
    names = {path.name for path in (SOURCE / "pmaf").glob("_*.py")}
    assert names == {"__init__.py", "__main__.py"}


def test_every_room_has_its_place():
    found = {room_of(name_of(path)) for path in FILES}
    assert found - {"__main__"} == set(ROOMS)


def test_the_laboratory_uses_public_names():
    for path in sorted((SOURCE / "pmaf_lab").rglob("*.py")):
        for module, name in imports(path):
            if module.split(".")[0] == "pmaf":
                parts = [*module.split("."), name]
                assert not any(x.startswith("_") and x != "__version__" for x in parts), path


def test_one_module_decomposes_symmetric_matrices():
    """So that a limit of a device, or a faster routine, is a matter of one file."""
    calls = re.compile(r"linalg\.(eigh|eigvalsh|cholesky|cholesky_ex)\(")
    found = [name_of(path) for path in FILES if calls.search(path.read_text(encoding="utf-8"))]
    assert found == ["pmaf.linalg.decompositions"]


def test_a_device_with_a_limit_gets_a_batch_in_parts(monkeypatch):
    A = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    A = A @ A.mT + torch.eye(4, dtype=torch.float64)
    sizes = []

    def counted(A):
        sizes.append(A.shape[:-2].numel())
        return torch.linalg.eigh(A)

    monkeypatch.setattr(decompositions, "MOST_MATRICES", 4)
    monkeypatch.setattr(decompositions, "limited", lambda A: True)
    values, vectors = decompositions.in_pieces(counted, A)
    assert sizes == [4, 4, 4, 3]
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, A)
    torch.testing.assert_close(decompositions.eigenvalues(A), torch.linalg.eigvalsh(A))
    lower, info = decompositions.cholesky(A)
    torch.testing.assert_close(lower @ lower.mT, A)
    assert not info.any()


# What a script sees that imports the library and calls every layer, beyond `import torch`.
SCRIPT = """
import json, sys
import torch
known, loaded = set(sys.modules), {}

def record(step):
    loaded[step] = sorted(set(sys.modules) - known)
    known.update(sys.modules)

import pmaf
record("import")
A = torch.randn(3, 5, 5)
A = (A + A.mT).requires_grad_()
M, b = torch.diag(torch.arange(1.0, 6.0)), torch.randn(3, 5)
sparse = M.to_sparse()
calls = {
    "ied": lambda: pmaf.ied(A, 2).vectors,
    "pair": lambda: pmaf.ied(A, M=M).vectors,
    "general": lambda: pmaf.ied(A.abs(), symmetric=False).vectors,
    "power iteration": lambda: pmaf.ied(A @ A, solver=pmaf.solvers.PowerIteration()).vectors,
    "less": lambda: pmaf.less(A, b),
    "ellipsoid": lambda: pmaf.less(A, b, M=M),
    "nullspace": lambda: pmaf.nullspace(A, 2),
    "isvd": lambda: pmaf.isvd(A, 2).left,
    "spectral": lambda: pmaf.spectral(A, "exp"),
    "group": lambda: pmaf.spectral(A, "exp", 2),
    "pool": lambda: pmaf.PrincipalPool()(A),
    "pool by products": lambda: pmaf.PrincipalPool(path="products")(A),
    "operator": lambda: pmaf.ied(pmaf.operators.Gram(A), 2).vectors,
    "sparse pair": lambda: pmaf.ied(sparse, M=sparse).vectors + 0 * A.sum(),
    "solve": lambda: pmaf.solve(pmaf.SphereLeastSquares(A, b)).value,
}
for step, call in calls.items():
    torch.manual_seed(0)
    call().square().sum().backward()
    record(step)
print(json.dumps(loaded))
"""


def test_neither_an_import_nor_a_call_loads_the_compiler():
    """`torch._dynamo` and what it brings take longer to import than torch and the library.

    Nothing that torch itself has not loaded is needed, besides the standard library. A call may
    load parts of torch that are small.
    """
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    loaded = json.loads(ended.stdout.splitlines()[-1])
    ours = {"pmaf", *sys.stdlib_module_names}
    for step, modules in loaded.items():
        others = [name for name in modules if name.split(".")[0] not in ours]
        if step != "import":
            others = [name for name in others if not name.startswith("torch.") or heavy(name)]
        assert not others, (step, others)


HEAVY = ("_dynamo", "_inductor", "distributed", "onnx", "fx.experimental", "export", "testing")


def heavy(name: str) -> bool:
    return name.removeprefix("torch.").startswith(HEAVY)


def test_constants_are_marked_as_torch_marks_them():
    def ours(): ...

    def theirs(): ...

    assert vars(constant_in_traces(ours)) == vars(torch.compiler.assume_constant_result(theirs))
    assert vars(ours)


def test_common_shapes_are_those_of_torch():
    shapes = [torch.Size(x) for n in range(4) for x in itertools.product((0, 1, 2, 3), repeat=n)]
    for first, second in itertools.product(shapes, shapes):
        try:
            expected = torch.broadcast_shapes(first, second)
        except RuntimeError:
            with pytest.raises(RuntimeError, match=r"[Ss]hape"):
                broadcast(first, second)
        else:
            assert broadcast(first, second) == expected
            assert broadcast(first, second, first) == expected
