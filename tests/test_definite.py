"""The proof by probes, against eigenvalues."""

import pytest
import torch

from pmaf.linalg.definite import is_definite

T = torch.float64


def matrices(least, n=40, count=200):
    """Definite matrices with one small eigenvalue, and its eigenvector."""
    g = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(count, n, n, generator=g, dtype=T)).Q
    values = torch.linspace(1, 5, n, dtype=T)
    values[0] = least
    return (Q * values) @ Q.mT, Q[..., :1]


def proved(K, near):
    return is_definite(lambda rows: rows @ K, torch.linalg.cholesky(near))


@pytest.mark.parametrize("least", [1.0, 1e-3, 1e-8])
def test_a_factor_of_the_matrix_itself_proves_it(least):
    K, _ = matrices(least)
    assert proved(K, K).all()


@pytest.mark.parametrize("least", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize("value", [0.0, -1e-12, -0.5, -100.0])
def test_no_indefinite_matrix_is_taken_for_a_definite_one(least, value):
    """The factor is that of a definite matrix, as one of a rounded Gram matrix may be."""
    near, e = matrices(least)
    K = near - least * (1 - value) * e @ e.mT
    assert (torch.linalg.eigvalsh(K)[:, 0] <= 1e-14).all()
    assert not proved(K, near).any()


@pytest.mark.parametrize(("share", "expected"), [(0.01, True), (0.5, False)])
def test_the_error_of_the_factor_is_measured_beside_the_least_eigenvalue(share, expected):
    """An error of half of it leaves too much to chance, though the matrix is definite."""
    near, e = matrices(1e-4)
    K = near - share * 1e-4 * e @ e.mT
    assert (proved(K, near) == expected).float().mean() >= 0.9


def test_a_rounded_factor_proves_a_matrix_of_float64():
    K, _ = matrices(1e-2)
    rounded = torch.linalg.cholesky(K.float()).double()
    assert is_definite(lambda rows: rows @ K, rounded).all()
    assert not is_definite(lambda rows: rows @ (K - 2e-2 * torch.eye(40, dtype=T)), rounded).any()
