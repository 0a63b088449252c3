"""What a solve keeps: it changes how a bordered system is solved, and not the solution."""

import pytest
import torch

from pmaf.gradients.eigenvectors import _ShiftedSystem
from pmaf.gradients.minimum import GramSystem
from pmaf.gradients.singular import SingularSystem
from pmaf.gradients.triplets import _both, _PairSystem
from pmaf.linalg.singular import pair_basis, singular_basis
from pmaf.tangent import kept
from pmaf.tangent.bordered import State
from pmaf.tangent.kept import Basis, Decomposition, Factor, Kept, Nothing, Rate, SingularBasis

T = torch.float64
KINDS = [
    x
    for x in vars(kept).values()
    if isinstance(x, type) and issubclass(x, Kept) and "words" in vars(x)
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=T)


def least_squares():
    """The system of a point on the sphere, and its solution by a matrix."""
    A, y, v = random(2, 8, 4), random(2, 1, 4, seed=1), random(2, 1, 4, seed=2)
    y, shift = y / y.norm(dim=-1, keepdim=True), torch.full((2, 1), 0.5, dtype=T)
    gram = A.mT @ A
    values, vectors = torch.linalg.eigh(gram)
    H = gram + shift.unsqueeze(-1) * torch.eye(4, dtype=T)
    forms = {
        Nothing: kept.NOTHING,
        Basis: Basis(vectors.mT, values - values[:, :1]),
        Factor: Factor(torch.linalg.cholesky(H + y.mT @ y)),
    }
    state = State(shift, values[:, 0] + 0.5, kept.NOTHING)
    return GramSystem(), forms, v, y, (A,), state, bordered(H.unsqueeze(1), y, v)


def eigenvectors():
    A, v = random(2, 6, 6), random(2, 1, 6, seed=1)
    A = A @ A.mT
    values, vectors = torch.linalg.eigh(A)
    y, shift = vectors[..., -1:].mT, values[:, -1:]
    H = shift.unsqueeze(-1) * torch.eye(6, dtype=T) - A
    forms = {
        Nothing: kept.NOTHING,
        Decomposition: Decomposition(vectors.mT, values),
        Factor: Factor(torch.linalg.cholesky(H + y.mT @ y)),
        Rate: Rate(values[:, -2] / values[:, -1], A),
    }
    state = State(shift, values[:, -1] - values[:, -2], kept.NOTHING)
    return _ShiftedSystem(), forms, v, y, (A,), state, bordered(H.unsqueeze(1), y, v)


def singular_vectors():
    A, v = random(2, 8, 5), random(2, 2, 5, seed=1)
    rows, values = singular_basis(A)
    y, shift = rows[:, :2], values[:, :2]
    forms = {Nothing: kept.NOTHING, SingularBasis: SingularBasis(rows, values)}
    square = shift.square()[..., None, None]
    H = square * torch.eye(5, dtype=T) - (A.mT @ A).unsqueeze(1)
    state = State(shift, values[:, 1] - values[:, 2], kept.NOTHING)
    wanted = torch.stack(
        [bordered(H[:, j : j + 1], y[:, j : j + 1], v[:, j : j + 1])[:, 0] for j in (0, 1)], 1
    )
    return SingularSystem(True, False), forms, v, y, (A,), state, wanted


def triplets():
    A, v = random(2, 8, 5), random(2, 1, 13, seed=1)
    rows, values = pair_basis(A)
    y, shift = _both(rows[:, :1], 8), values[:, :1]
    forms = {Nothing: kept.NOTHING, SingularBasis: SingularBasis(rows, values)}
    zero = torch.zeros(2, 8, 8, dtype=T), torch.zeros(2, 5, 5, dtype=T)
    J = torch.cat([torch.cat([zero[0], A], -1), torch.cat([A.mT, zero[1]], -1)], -2)
    H = shift.unsqueeze(-1) * torch.eye(13, dtype=T) - J
    state = State(shift, values[:, 0] - values[:, 1], kept.NOTHING)
    return _PairSystem(True, False), forms, v, y, (A,), state, bordered(H.unsqueeze(1), y, v)


def bordered(H, y, v):
    """`z` of the bordered system, of which all rows of `y` are the border."""
    q = y.shape[-2]
    border = y.unsqueeze(1)
    zero = torch.zeros(*border.shape[:-2], q, q, dtype=T)
    matrix = torch.cat([torch.cat([H, border.mT], -1), torch.cat([border, zero], -1)], -2)
    right = torch.cat([v, torch.zeros(*v.shape[:-1], q, dtype=T)], -1)
    return torch.linalg.solve(matrix, right)[..., : v.shape[-1]]


CASES = [
    (pose, kind)
    for pose in (least_squares, eigenvectors, singular_vectors, triplets)
    for kind in pose()[1]
]


@pytest.mark.parametrize(("pose", "kind"), CASES, ids=lambda x: x.__name__)
def test_what_was_kept_solves_the_system_it_was_kept_for(pose, kind):
    system, forms, v, y, tensors, state, wanted = pose()
    found = forms[kind].solve(system, v, y, tensors, state._replace(kept=forms[kind]))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_all_kinds_that_solve_are_tested():
    # Or by straight-line programs: `test_straight.py`.
    by_kernels = {kept.Exact, kept.Tridiagonal, kept.Reduced, kept.Congruence, kept.Whole}
    assert {kind for _, kind in CASES} | by_kernels == set(KINDS)


def test_units_scale_what_was_kept():
    """In units of 4 a matrix of degree two is multiplied by 16, and its factor by 4."""
    unit, ones = torch.tensor([4.0], dtype=T), torch.ones(1, 3, 3, dtype=T)
    for kind in (Basis, Decomposition, SingularBasis):
        rows, numbers = kind(ones, ones[:, 0]).in_units(unit, 2)
        assert torch.equal(rows, ones)
        assert torch.equal(numbers, 16 * ones[:, 0])
    assert torch.equal(Factor(ones).in_units(unit, 2).lower, 4 * ones)
    assert kept.NOTHING.in_units(unit, 2) is kept.NOTHING
