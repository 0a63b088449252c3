"""Null vectors inside kornia's geometry, found by `pmaf.nullspace` instead.

make test-clients
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import pmaf

kornia = pytest.importorskip("kornia", reason="kornia is in the extra `clients`: make test-clients")
calibration = pytest.importorskip("kornia.geometry.calibration.pnp")
fundamental = pytest.importorskip("kornia.geometry.epipolar.fundamental")
triangulation = pytest.importorskip("kornia.geometry.epipolar.triangulation")
quaternion = pytest.importorskip("kornia.geometry.quaternion")
homography = pytest.importorskip("kornia.geometry.homography")

T = torch.float64
EPS = torch.finfo(T).eps


def cameras(points: int, noise: float, batch: int = 3) -> dict[str, Tensor]:
    """Points in front of two cameras, and their noisy images."""
    generator = torch.Generator().manual_seed(points)
    world = torch.rand(batch, points, 3, generator=generator, dtype=T) + torch.tensor([0, 0, 4.0])
    angle = torch.tensor(0.3, dtype=T)
    turn = torch.eye(3, dtype=T)
    turn[0, 0] = turn[2, 2] = angle.cos()
    turn[0, 2], turn[2, 0] = angle.sin(), -angle.sin()
    first = torch.eye(3, 4, dtype=T)
    second = torch.cat([turn, torch.tensor([[-1.0], [0.1], [0.2]], dtype=T)], -1)
    images = []
    for camera in (first, second):
        seen = world @ camera[:, :3].mT + camera[:, 3]
        exact = seen[..., :2] / seen[..., 2:]
        images.append(exact + noise * torch.randn(exact.shape, generator=generator, dtype=T))
    weights = torch.rand(batch, points, generator=generator, dtype=T) + 0.5
    return {
        "world": world,
        "first": first.expand(batch, 3, 4),
        "second": second.expand(batch, 3, 4),
        "left": images[0],
        "right": images[1],
        "weights": weights,
    }


@contextlib.contextmanager
def design_solved(module: object, rows: str, weights: Tensor | None) -> Iterator[None]:
    """Inside, eigenvectors of the normal equations of `module` are null vectors of its rows."""
    seen: list[Tensor] = []
    build = getattr(module, rows)

    def recorded(*points: Tensor) -> Tensor:
        seen.append(build(*points))
        return seen[-1]

    def null(*_: object) -> Tensor:
        A = seen[-1]
        each = None if weights is None else weights
        if each is not None and A.shape[-2] != each.shape[-1]:
            each = each.repeat_interleave(2, -1)
        return pmaf.nullspace(A, weights=each)

    names = {"_eight_point_null_vector", "_svd_null_vector"} & set(vars(module))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, rows, recorded))
        for name in names:
            stack.enter_context(mock.patch.object(module, name, null))
        eigh = lambda M: (None, null().unsqueeze(-1))  # noqa: E731
        stack.enter_context(mock.patch.object(torch.linalg, "eigh", eigh))
        yield


def svd_by_nullspace(A: Tensor, **_: object) -> tuple[None, None, Tensor]:
    """The last right singular vector, which is the only one that is used."""
    return None, None, pmaf.nullspace(A).unsqueeze(-1)


def conditioning(call, inputs: tuple[Tensor, ...]) -> float:
    """How much relative changes of the inputs by 1e-8 change the result, over 1e-8."""
    generator = torch.Generator().manual_seed(5)
    exact, worst = call(*inputs).detach(), 1.0
    for _ in range(5):
        moved = [
            x.detach() * (1 + 1e-8 * torch.randn(x.shape, generator=generator, dtype=T))
            for x in inputs
        ]
        change = (call(*moved).detach() - exact).abs().max() / exact.abs().max()
        worst = max(worst, float(change) / 1e-8)
    return worst


def check(theirs, ours, inputs: tuple[Tensor, ...]) -> None:
    """Equal to rounding, times the conditioning; gradients equal to central differences."""
    wanted, found = theirs(*inputs), ours(*inputs)
    bound = 1e3 * EPS * conditioning(theirs, inputs)
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(wanted.shape, generator=generator, dtype=T)
    gradients = torch.autograd.grad((ours(*leaves) * direction).sum(), leaves)
    for i, x in enumerate(inputs):
        along = torch.randn(x.shape, generator=generator, dtype=T)
        step = 1e-6

        def moved(sign: float, i=i, along=along, step=step) -> float:
            others = [x + sign * step * along if j == i else x for j, x in enumerate(inputs)]
            return float((theirs(*others) * direction).sum())

        slope = (moved(1) - moved(-1)) / (2 * step)
        assert gradients[i].isfinite().all()
        size = float(gradients[i].norm() * along.norm())
        assert abs(float((gradients[i] * along).sum()) - slope) <= 1e-5 * size


@pytest.mark.parametrize("points", [8, 9, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_eight_point_algorithm(points, weighted):
    data = cameras(points, 1e-3)
    weights = data["weights"] if weighted else None

    def theirs(left: Tensor, right: Tensor) -> Tensor:
        return kornia.geometry.find_fundamental(left, right, weights)

    def ours(left: Tensor, right: Tensor) -> Tensor:
        with design_solved(fundamental, "_epipolar_design_rows", weights):
            return theirs(left, right)

    check(theirs, ours, (data["left"], data["right"]))


@pytest.mark.parametrize("points", [4, 5, 20])
@pytest.mark.parametrize("weighted", [False, True])
def test_homographies(points, weighted):
    data = cameras(points, 0.0)
    flat = data["left"] - data["left"].mean(-2, keepdim=True)
    other = flat @ torch.tensor([[0.9, 0.2], [-0.1, 1.1]], dtype=T) + 0.3 * flat.square()
    weights = data["weights"] if weighted else None

    def theirs(left: Tensor, right: Tensor) -> Tensor:
        return kornia.geometry.find_homography_dlt(left, right, weights, solver="svd")

    def ours(left: Tensor, right: Tensor) -> Tensor:
        with design_solved(homography, "_homography_design_rows", weights):
            return theirs(left, right)

    check(theirs, ours, (flat, other))


@pytest.mark.parametrize("solver", ["svd", "eigh"])
def test_triangulation(solver):
    data = cameras(30, 1e-3)

    def theirs(P1: Tensor, P2: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return kornia.geometry.triangulate_points(P1, P2, left, right, solver)

    def ours(P1: Tensor, P2: Tensor, left: Tensor, right: Tensor) -> Tensor:
        with mock.patch.object(triangulation, "_torch_svd_cast", svd_by_nullspace):
            return kornia.geometry.triangulate_points(P1, P2, left, right, "svd")

    check(theirs, ours, (data["first"], data["second"], data["left"], data["right"]))


def test_pose_from_points():
    data = cameras(12, 1e-3)
    K = torch.eye(3, dtype=T).expand(3, 3, 3)

    def theirs(world: Tensor, image: Tensor) -> Tensor:
        return kornia.geometry.solve_pnp_dlt(world, image, K)

    def ours(world: Tensor, image: Tensor) -> Tensor:
        with mock.patch.object(calibration, "_torch_svd_cast", svd_by_nullspace):
            return theirs(world, image)

    check(theirs, ours, (data["world"], data["right"]))


def test_averages_of_equal_rotations():
    """The mean of equal quaternions has a gradient, which is NaN by way of eigh."""
    q = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=T)
    Q = q.repeat(5, 1).requires_grad_()
    theirs = torch.autograd.grad(
        quaternion.average_quaternions(quaternion.Quaternion(Q)).data.sum(), Q
    )[0]
    assert theirs.isnan().any()
    mean = pmaf.ied(Q.mT @ Q, reference=q[0]).vectors
    torch.testing.assert_close(mean, q[0])
    (ours,) = torch.autograd.grad(mean.sum(), Q)
    # Each rotation moves the mean by a fifth of its own movement across the mean.
    across = torch.ones(4, dtype=T) - q[0] * q[0].sum()
    torch.testing.assert_close(ours, (across / 5).expand(5, 4))
