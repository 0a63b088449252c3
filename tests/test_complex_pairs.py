"""Pairs of Hermitian matrices, complex least squares with options, and phases by a component."""

import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

import pmaf
from pmaf.operators import Diagonal
from tests.test_complex import C64, C128, EPS, F64, drawn, hermitian


def definite(*shape, seed=0):
    X = drawn(*shape, seed=seed)
    return X @ X.mH + torch.eye(shape[-1], dtype=X.dtype)


def layer(k, **options):
    """The layer on the Hermitian parts, which differences of single entries leave otherwise."""
    return lambda A, M: pmaf.ied(0.5 * (A + A.mH), k, M=0.5 * (M + M.mH), **options)


OPTIONS = {
    "one": (None, {}),
    "smallest two": (2, {"largest": False}),
    "one column": (1, {}),
    "three": (3, {}),
    "smallest, one column": (1, {"largest": False}),
    "smallest three": (3, {"largest": False}),
    "skip": (2, {"skip": 1}),
    "component": (None, {"reference": 1}),
    "largest component": (2, {"reference": "largest"}),
}


@pytest.mark.parametrize(("k", "options"), OPTIONS.values(), ids=OPTIONS)
class TestPairs:
    def test_values_are_those_of_scipy(self, k, options):
        A, M = hermitian(4, 5, 5), definite(4, 5, 5, seed=1)
        values, vectors = pmaf.ied(A, k, M=M, descending=True, **options)
        if k is None:
            values, vectors = values.unsqueeze(-1), vectors.unsqueeze(-1)
        count, skip = values.shape[-1], options.get("skip", 0)
        for i in range(4):
            known = scipy.linalg.eigh(A[i].numpy(), M[i].numpy(), eigvals_only=True)
            ends = known[:count][::-1] if "largest" in options else known[::-1][skip:][:count]
            wanted = torch.tensor(ends.copy())
            bound = 100 * EPS * torch.linalg.cond(M[i]) * A[i].norm()
            assert (values[i] - wanted).abs().max() <= bound
        rest = A @ vectors - M @ vectors * values.unsqueeze(-2)
        assert rest.abs().max() <= 1e3 * EPS * torch.linalg.cond(M).max() * A.norm()
        unit = vectors.mH @ M @ vectors - torch.eye(count, dtype=C128)
        assert unit.abs().max() <= 100 * EPS * torch.linalg.cond(M).max()

    def test_derivatives(self, k, options):
        A, M = hermitian(4, 4).requires_grad_(), definite(4, 4, seed=1).requires_grad_()
        assert gradcheck(layer(k, **options), (A, M))
        assert gradgradcheck(layer(k, **options), (A, M))

    def test_the_report_and_the_certificate(self, k, options):
        problem = pmaf.PrincipalEigenvectors(hermitian(5, 5), k, M=definite(5, 5), **options)
        solution = pmaf.solve(problem)
        assert solution.converged
        assert solution.gap > 0
        assert pmaf.certify(problem, solution).holds(1e4 * EPS)

    def test_a_map_over_a_batch_is_a_loop(self, k, options):
        A, M = hermitian(3, 4, 4), definite(3, 4, 4, seed=1)
        mapped = torch.func.vmap(layer(k, **options))(A, M)
        for found, wanted in zip(mapped, layer(k, **options)(A, M), strict=True):
            torch.testing.assert_close(found, wanted)


def test_a_diagonal_metric_is_the_dense_one():
    A, d = hermitian(5, 5), torch.rand(5, dtype=F64).add(0.5).to(C128)
    found, wanted = pmaf.ied(A, 2, M=Diagonal(d)), pmaf.ied(A, 2, M=torch.diag(d))
    torch.testing.assert_close(found, wanted)


def test_generalised_beamforming():
    """The filter of the largest signal-to-noise ratio, from two spatial covariances."""
    speech, noise = drawn(257, 6, 20, seed=1), drawn(257, 6, 40, seed=2)
    S, N = (speech @ speech.mH / 20).to(C64), (noise @ noise.mH / 40).to(C64)
    S.requires_grad_()
    ratio, w = pmaf.ied(S, M=N, reference=0)
    top = torch.linalg.eigvals(torch.linalg.solve(N.to(C128), S.detach().to(C128))).real.amax(-1)
    assert (ratio.double() - top).abs().max() <= 1e-3 * top.max()
    assert (w[:, 0].real > 0).all()
    assert w[:, 0].imag.abs().max() <= 10 * torch.finfo(torch.float32).eps * w.abs().max()
    w.abs().sum().backward()
    assert S.grad.isfinite().all()


def simulated_array(channels=6, bins=20, frames=40):
    """A speaker in front of a line of microphones: steering vectors, and their covariances."""
    delay = 0.9 * torch.arange(channels, dtype=F64)
    frequency = torch.linspace(0.2, 3, bins, dtype=F64)
    gain = 1 + 0.3 * torch.cos(delay)
    steering = torch.polar(gain.expand(bins, -1), -frequency[:, None] * delay)
    source = drawn(bins, 1, frames, seed=3)
    noise = 0.05 * drawn(bins, channels, frames, seed=4)
    mixture = steering.unsqueeze(-1) * source + noise
    return steering, mixture @ mixture.mH / frames


def rtf_evd(psd_s):
    """`torchaudio.functional.rtf_evd`, from its documentation: the principal eigenvector."""
    return torch.linalg.eigh(psd_s)[1][..., -1]


class TestRelativeTransferFunctions:
    def test_they_are_those_of_torchaudio_up_to_phase(self):
        _, psd = simulated_array()
        found, theirs = pmaf.ied(psd).vectors, rtf_evd(psd)
        turn = (theirs.conj() * found).sum(-1, keepdim=True)
        values = torch.linalg.eigvalsh(psd)
        bound = 16 * EPS * float((values[:, -1] / (values[:, -1] - values[:, -2])).max())
        assert (turn.abs() - 1).abs().max() <= bound
        assert (found - turn * theirs).abs().max() <= bound

    def test_towards_a_microphone_they_are_the_steering_vectors(self):
        """Of the first microphone, whose component is real, the estimate is off by the noise."""
        steering, psd = simulated_array()
        psd = psd.requires_grad_()
        rtf = pmaf.ied(psd, reference=0).vectors
        rtf = rtf / rtf[..., :1]
        truth = steering / steering[..., :1]
        # The noise is 1/20 of the source, in 40 frames; a vector moves by noise over signal.
        assert (rtf - truth).abs().max() <= 4 * 0.05 / 40**0.5 * truth.abs().max() * 6**0.5
        # A loss that depends on phases, for which eigh has no gradient.
        loss = (rtf - truth).abs().square().sum()
        (gradient,) = torch.autograd.grad(loss, psd)
        v = rtf_evd(psd)
        with pytest.raises(RuntimeError, match="ill-defined"):
            torch.autograd.grad((v - truth).abs().square().sum(), psd)
        # Divided by a component, the phase of eigh cancels, and its gradient exists.
        theirs = v / v[..., :1]
        (wanted,) = torch.autograd.grad((theirs - truth).abs().square().sum(), psd)
        values = torch.linalg.eigvalsh(psd.detach())
        gap = values[:, -1] - values[:, -2]
        # The loss has a small slope, a difference of numbers of size one, whose errors the
        # derivative of six components over one of them, 1/gap, multiplies.
        bound = 64 * EPS * 6 * float((values[:, -1] / gap).max() ** 2 / gap.min())
        wanted = 0.5 * (wanted + wanted.mH)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=bound)

    def test_a_filter_of_the_pair_keeps_the_speaker(self):
        """GEV: the ratio of output powers is the eigenvalue, and no other filter has a larger."""
        _, psd = simulated_array()
        noise = definite(20, 6, 6, seed=8)
        ratio, w = pmaf.ied(psd, M=noise, reference=0)

        def power(w, R):
            return torch.real((w.conj() * (R @ w.unsqueeze(-1)).squeeze(-1)).sum(-1))

        bound = 100 * EPS * float(torch.linalg.cond(noise).max())
        torch.testing.assert_close(power(w, psd) / power(w, noise), ratio, rtol=bound, atol=0)
        for seed in range(5):
            other = drawn(20, 6, seed=20 + seed)
            assert (power(other, psd) / power(other, noise) <= ratio * (1 + bound)).all()


def test_errors():
    A, M = hermitian(4, 4), definite(4, 4)
    with pytest.raises(ValueError, match="not positive definite"):
        pmaf.ied(A, M=-M)
    with pytest.raises(TypeError, match="make both complex"):
        pmaf.ied(A, M=M.real)
    with pytest.raises(TypeError, match="complex"):
        pmaf.less(drawn(4, 2), drawn(4), weights=drawn(4))


LEAST_SQUARES = {
    "weights": {"weights": torch.tensor([0.5, 0, 1, 2, 0.1, 0.7], dtype=F64)},
    "ellipsoid": {"M": definite(3, 3)},
    "ball, active": {"ball": True, "radius": 0.2},
    "ball, inactive": {"ball": True, "radius": 30.0},
    "radius": {"radius": torch.tensor(1.5, dtype=F64)},
    "diagonal": {"M": Diagonal(torch.tensor([1, 2, 0.5], dtype=C128))},
}


@pytest.mark.parametrize("options", LEAST_SQUARES.values(), ids=LEAST_SQUARES)
def test_least_squares_with_options(options):
    A, b = drawn(6, 3).requires_grad_(), drawn(6, seed=1).requires_grad_()

    def call(A, b):
        return pmaf.less(A, b, **options)

    problem = pmaf.SphereLeastSquares(A.detach(), b.detach(), **options)
    assert pmaf.certify(problem, call(A, b)).holds(1e4 * EPS)
    assert gradcheck(call, (A, b))
    assert gradgradcheck(call, (A, b))


def test_gradients_of_weights_are_those_of_scaled_rows():
    A, b = drawn(6, 3), drawn(6, seed=1)
    w = torch.linspace(0.2, 1.4, 6, dtype=F64).requires_grad_()
    direct = pmaf.less(A, b, weights=w)
    scaled = pmaf.less(w.sqrt().unsqueeze(-1) * A, w.sqrt() * b)
    torch.testing.assert_close(direct, scaled)
    ours, known = (torch.autograd.grad(x.abs().sum(), w)[0] for x in (direct, scaled))
    torch.testing.assert_close(ours, known)


def test_a_diagonal_ellipsoid_is_a_change_of_columns():
    A, b, d = drawn(6, 3), drawn(6, seed=1), torch.tensor([1, 2, 0.5], dtype=F64)
    direct = pmaf.less(A, b, M=Diagonal(d.to(C128)))
    torch.testing.assert_close(direct, pmaf.less(A / d.sqrt(), b) / d.sqrt())


@pytest.mark.parametrize(("ball", "radius"), [(False, 1.5), (True, 0.2), (True, 30.0)])
@pytest.mark.parametrize("wide", [False, True])
def test_derivatives_in_everything_that_least_squares_take(ball, radius, wide):
    """Both orders, in A, b, the radius, M and the weights; the last ball is not reached."""
    m, n = (2, 3) if wide else (5, 3)
    if wide and not ball:
        radius = 0.2  # on a larger sphere the solutions of the wide system are not unique
    A, b = drawn(m, n).requires_grad_(), drawn(m, seed=1).requires_grad_()
    rho = torch.tensor(radius, dtype=F64).requires_grad_()
    M = definite(n, n, seed=2).requires_grad_()
    w = (0.3 + drawn(m, seed=3).abs()).requires_grad_()

    def call(A, b, rho, M, w):
        metric = 0.5 * (M + M.mH)
        problem = pmaf.SphereLeastSquares(A, b, rho, ball, metric, w)
        found = pmaf.solve(problem)
        return found.value, found.multiplier

    inputs = (A, b, rho, M, w)
    assert (float(call(*inputs)[1].detach()) == 0) == (ball and radius > 1)
    assert gradcheck(call, inputs)
    assert gradgradcheck(call, inputs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("ball", [False, True])
def test_weights_of_zero_have_a_derivative(ball):
    """The derivative towards positive weights, against one-sided differences."""
    A, b = drawn(5, 3), drawn(5, seed=1)
    w = torch.tensor([0.0, 0.7, 0.0, 1.2, 0.4], dtype=F64).requires_grad_()
    (mine,) = torch.autograd.grad(
        pmaf.less(A, b, weights=w, radius=0.3, ball=ball).abs().square()[0], w
    )
    step = 1e-4
    for i in (0, 2):
        ends = []
        for move in (step, 2 * step):
            moved = w.detach().clone()
            moved[i] = move
            ends.append(pmaf.less(A, b, weights=moved, radius=0.3, ball=ball).abs().square()[0])
        start = pmaf.less(A, b, weights=w.detach(), radius=0.3, ball=ball).abs().square()[0]
        # One-sided, of second order. The error is that of the third derivative, of which a
        # rational function of weights of at least 0.1 has ten times the second, and rounding.
        near = (4 * (ends[0] - start) - (ends[1] - start)) / (2 * step)
        first = (ends[0] - start) / step
        bound = step * abs(float(near - first)) * 10 + 64 * EPS / step
        assert abs(float(mine[i]) - float(near)) <= bound
