"""Principal vectors of sparse graphs, beside SciPy and `torch.lobpcg`."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf.operators import LowRank, Operator, Sparse
from pmaf_lab.bench.matrix_free import ByProducts, Question, Solve
from pmaf_lab.bench.present import OURS
from pmaf_lab.experiments import Figure, Finding, Row, Scale
from pmaf_lab.experiments.plots import Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


class Graphs(ByProducts):
    name = "graphs"
    needs = ("scipy", "pmaf_lab.bench.graphs")
    title = "IED of sparse graphs"
    about = (
        "A random graph with ten entries a node and a ring that connects it, in float32: the "
        "symmetric normalised adjacency matrix, and PageRank with a damping of 0.85 as the "
        "nonsymmetric case. Gradients reach every stored entry. The others run forward only."
    )
    reduced = "up to a hundred thousand entries."
    families = ("adjacency", "PageRank")
    others = ("eigsh", "lobpcg", "eigs")
    sizes: ClassVar[Mapping[Scale, Sequence[int]]] = {
        "quick": [10_000, 30_000, 100_000],
        "full": [100_000, 300_000, 1_000_000, 3_000_000, 10_000_000],
    }

    def entries(self, size: int) -> int:
        return size

    def question(self, family: str, size: int) -> Question:
        index, degrees = random_graph(size)
        i, j = index
        n = len(degrees)
        if family == "adjacency":
            values = (degrees[i] * degrees[j]).rsqrt()
        else:
            values = degrees[j].reciprocal()
        pattern = Sparse(_coo(index, values, n))
        flat = torch.ones(1, n) / n**0.5

        def problem(values: Tensor) -> pmaf.PrincipalEigenvectors:
            A: Operator = pattern.with_tensors([values])
            if family == "PageRank":
                A = 0.85 * A + 0.15 * LowRank(flat, flat)
            return pmaf.PrincipalEigenvectors(A, symmetric=family == "adjacency")

        exact = _scipy(index, values.double(), n)

        def product(y: Tensor) -> Tensor:
            image = torch.from_numpy(exact @ y.numpy())
            return 0.85 * image + 0.15 * y.mean() if family == "PageRank" else image

        return Question(values, problem, product, self._others(family, index, values, flat))

    def _others(self, family: str, index: Tensor, values: Tensor, flat: Tensor) -> dict[str, Solve]:
        import scipy.sparse.linalg as linalg

        n = flat.shape[-1]
        theirs = _scipy(index, values, n)
        start = torch.randn(n, generator=torch.Generator().manual_seed(0))
        if family == "PageRank":
            return {"eigs": lambda: _eigs(theirs, start)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CSR tensors are in beta
            csr = _coo(index, values, n).to_sparse_csr()
        return {
            "eigsh": lambda: linalg.eigsh(theirs, k=1, which="LA", v0=start.numpy())[1],
            "lobpcg": lambda: torch.lobpcg(csr, k=1, X=start.unsqueeze(-1))[1],
        }

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        slopes = [
            Finding(
                f"{family}, {part}: time grows with the number of entries to the power of",
                "1 or less, within 0.1",
                f"{slope:.2f}",
                slope <= 1.1,
            )
            for family in self.families
            for part in ("forward", "backward")
            if (slope := self.slope(rows, family, part)) is not None
        ]
        return [*slopes, *super().findings(rows)]

    def slope(self, rows: Sequence[Row], family: str, part: str) -> float | None:
        points = [
            (math.log(row.params["size"]), math.log(row.values[OURS][part]))
            for row in rows
            if row.params["family"] == family
        ]
        return statistics.linear_regression(*zip(*points)).slope if len(points) > 2 else None

    def figures(self, rows: Sequence[Row]) -> list[Figure]:
        caption = (
            "Seconds against the number of stored entries; ten entries a node. The slopes are "
            "fitted to the logarithms."
        )
        return [Figure("graphs", caption, lambda theme: self._draw(rows, theme))]

    def _draw(self, rows: Sequence[Row], theme: Theme) -> Drawing:
        import matplotlib.pyplot as plt

        figure, grid = plt.subplots(
            1, 2, figsize=(7.6, 3.6), layout="constrained", sharey=True, squeeze=False
        )
        colours = {"eigsh": theme.grey, "lobpcg": theme.green, "eigs": theme.grey}
        for axes, family in zip(grid[0], self.families):
            mine = [row for row in rows if row.params["family"] == family]
            for other in self.others:
                points = [
                    (row.params["size"], row.values[other]["forward"])
                    for row in mine
                    if "forward" in row.values.get(other, {})
                ]
                if points:
                    axes.plot(*zip(*points), marker="s", color=colours[other], label=other)
            for part, style in (("forward", "-"), ("backward", "--")):
                points = [(row.params["size"], row.values[OURS][part]) for row in mine]
                slope = self.slope(rows, family, part)
                label = f"ours, {part}" + ("" if slope is None else f" (slope {slope:.2f})")
                axes.plot(*zip(*points), style, marker="o", color=theme.ours, label=label)
            axes.set(xscale="log", yscale="log", title=family, xlabel="stored entries")
            axes.legend(loc="upper left")
        grid[0, 0].set_ylabel("seconds")
        plt.close(figure)
        return figure


def random_graph(entries: int) -> tuple[Tensor, Tensor]:
    """Entries `(2, e)` of a symmetric pattern, sorted, and the degrees of its nodes."""
    n = entries // 10
    generator = torch.Generator().manual_seed(0)
    ring = torch.arange(n)
    pairs = torch.randint(0, n, (2, entries // 2 - n), generator=generator)
    pairs = torch.cat([pairs, torch.stack([ring, (ring + 1) % n])], 1)
    keys = torch.cat([pairs[0] * n + pairs[1], pairs[1] * n + pairs[0]]).unique()
    index = torch.stack([keys // n, keys % n])
    return index, torch.bincount(index[0], minlength=n).float()


def _coo(index: Tensor, values: Tensor, n: int) -> Tensor:
    return torch.sparse_coo_tensor(index, values, (n, n), is_coalesced=True, check_invariants=False)


def _eigs(links: Any, start: Tensor) -> Any:
    """PageRank by SciPy, in the precision of its links."""
    from scipy.sparse.linalg import LinearOperator, eigs

    class Walk(LinearOperator):
        def _matvec(self, x: Any) -> Any:
            return 0.85 * (links @ x) + links.dtype.type(0.15) * x.mean()

    found: Any = eigs(Walk(links.dtype, links.shape), k=1, v0=start.numpy())
    return found[1].real


def _scipy(index: Tensor, values: Tensor, n: int) -> Any:
    from scipy.sparse import csr_array

    i, j = (x.int().numpy() for x in index)
    return csr_array((values.detach().numpy(), (i, j)), shape=(n, n))
