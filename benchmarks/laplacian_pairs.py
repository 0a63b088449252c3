"""Products that the ends of a Laplacian pair take: bilinear elements on a square.

    python benchmarks/laplacian_pairs.py [SIDE]

Prints, for four eigenvalues at each end, how many vectors are multiplied by the stiffness matrix
and by the mass matrix, forward and backward, and the largest relative difference from the values of
`scipy.sparse.linalg.eigsh` (with `sigma=0` for the smallest).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

import pmaf
from pmaf.operators import Sparse, WithSolve


class Counted(WithSolve):
    """A sparse matrix that counts the vectors it is multiplied with."""

    count = 0
    own = False

    @property
    def solvable(self) -> bool:
        return self.own

    def with_tensors(self, tensors: Any) -> Counted:
        self.part = self.part.with_tensors(tensors)
        return self

    def matvec(self, rows: Tensor) -> Tensor:
        self.count += rows.shape[:-1].numel()
        return super().matvec(rows)

    rmatvec = matvec


def square(side: int) -> list[Any]:
    """Stiffness and mass of bilinear elements on `side` by `side + 1` inner nodes."""

    def line(n: int) -> list[Any]:
        off: Any = scipy.sparse.eye_array(n, k=1) + scipy.sparse.eye_array(n, k=-1)
        one: Any = scipy.sparse.eye_array(n)
        return [(2 * one - off) * (n + 1), (4 * one + off) / (6 * (n + 1))]

    (K1, M1), (K2, M2) = line(side), line(side + 1)
    K = scipy.sparse.kron(K1, M2) + scipy.sparse.kron(M1, K2)
    return [x.tocsr() for x in (K, scipy.sparse.kron(M1, M2))]


def counted(x: Any, own: bool) -> Counted:
    starts, columns, data = (torch.from_numpy(part) for part in (x.indptr, x.indices, x.data))
    matrix = torch.sparse_csr_tensor(starts, columns, data, x.shape, check_invariants=True)
    factor = scipy.sparse.linalg.splu(x.tocsc())
    found = Counted(matrix, lambda rows: torch.from_numpy(factor.solve(rows.numpy().T).T))
    found.own = own
    values = found.part.tensors[0].detach().requires_grad_()
    found.part = Sparse(matrix).with_tensors([values])
    return found


def main(side: int = 100) -> None:
    pair = square(side)
    eigsh: Any = scipy.sparse.linalg.eigsh
    highest = np.sort(eigsh(pair[0], 4, M=pair[1], which="LA")[0])
    lowest = np.sort(eigsh(pair[0], 4, M=pair[1], sigma=0)[0])
    print(f"n = {pair[0].shape[0]}; vectors multiplied by stiffness and by mass")
    for name, largest, exchanged, own in [
        ("largest, conjugate gradients with M", True, False, False),
        ("largest, solve of M", True, False, True),
        ("smallest, conjugate gradients with M", False, False, False),
        ("smallest, solve of M", False, False, True),
        ("smallest, exchanged, conjugate gradients with A", False, True, False),
        ("smallest, exchanged, solve of A", False, True, True),
    ]:
        K, M = (counted(x, own) for x in pair)
        A, metric = (M, K) if exchanged else (K, M)
        values, vectors = pmaf.ied(A, 4, M=metric, largest=largest or exchanged)
        forward = K.count, M.count
        vectors[0].sum().backward()
        found = np.sort((1 / values if exchanged else values).detach().numpy())
        error = np.abs(found / (highest if largest else lowest) - 1).max()
        print(
            f"{name:48} forward {forward[0]:7,} {forward[1]:7,}  "
            f"backward {K.count - forward[0]:7,} {M.count - forward[1]:7,}  error {error:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
