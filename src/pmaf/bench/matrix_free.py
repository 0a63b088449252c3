"""Solves by products alone, at sizes no dense matrix has, beside what is used for them today."""

from __future__ import annotations

import math
import statistics
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

import pmaf
from pmaf.bench.present import OURS
from pmaf.experiments import Cell, Experiment, Figure, Finding, Row, Scale, Section, Table
from pmaf.experiments.measure import median_seconds, peak_resident
from pmaf.experiments.plots import Theme
from pmaf.operators import Gram, LowRank, Matrix, Operator, Sparse

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Solve = Callable[[], Any]


@dataclass(frozen=True)
class Question:
    """A matrix whose top eigenvector is asked for.

    Attributes:
        leaf: What gradients are wanted for.
        problem: The same question to us, given the leaf.
        product: With a vector `(n,)` in float64, to judge answers by.
        others: Forward passes of the competitors; they return a vector.
    """

    leaf: Tensor
    problem: Callable[[Tensor], pmaf.PrincipalEigenvectors]
    product: Callable[[Tensor], Tensor]
    others: Mapping[str, Solve]

    def residual(self, vector: Any) -> float:
        """`‖Ay − λy‖/|λ|`, in float64."""
        if not isinstance(vector, Tensor):
            vector = torch.tensor(vector.copy())  # whose strides may be negative
        y = vector.detach().double().flatten()
        y = y / y.norm()
        image = self.product(y)
        value = y @ image
        return float((image - value * y).norm() / value.abs())


class ByProducts(Experiment):
    """Times of both passes and of others' forward passes, the residual of each beside it."""

    needs = ("scipy", "sklearn", "pmaf.bench.matrix_free")
    sizes: ClassVar[Mapping[Scale, Sequence[Any]]]
    families: ClassVar[Sequence[str]]
    others: ClassVar[Sequence[str]]

    @abstractmethod
    def question(self, family: str, size: Any) -> Question: ...

    @abstractmethod
    def entries(self, size: Any) -> int:
        """Numbers that a product reads."""

    def cells(self, scale: Scale) -> list[Cell]:
        return [
            Cell({"family": family, "size": size}, cost=1 + self.entries(size) / 2e5)
            for family in self.families
            for size in self.sizes[scale]
        ]

    def measure(self, device: torch.device, *, family: str, size: Any) -> dict[str, Any]:
        asked = self.question(family, size)
        leaf = asked.leaf.requires_grad_()
        problem = asked.problem(leaf)
        found: list[pmaf.Solution] = []

        def forward() -> None:
            found[:] = [pmaf.solve(problem)]

        def backward() -> None:
            (gradient,) = torch.autograd.grad(found[0].value.sum(), leaf, retain_graph=True)
            del gradient

        options: dict[str, Any] = dict(budget=_BUDGET, repeats=_REPEATS)
        forward()
        backward()
        peak = peak_resident()
        noise = torch.randn(problem.n, generator=torch.Generator().manual_seed(1))
        near = found[0].value.detach() + 0.01 * noise / noise.norm()
        warm = pmaf.solve(problem, init=near)
        values: dict[str, Any] = {
            OURS: {
                "forward": median_seconds(forward, device, **options),
                "backward": median_seconds(backward, device, **options),
                "products": int(found[0].iterations),
                "products warm": int(warm.iterations),
                "products backward": found[0].backward and found[0].backward.iterations,
                "residual": asked.residual(found[0].value),
            },
            "peak": peak,
            "leaf": leaf.numel() * leaf.element_size(),
        }
        for name, solve in asked.others.items():
            answers: list[Any] = []

            def run(solve: Solve = solve, answers: list[Any] = answers) -> None:
                answers[:] = [solve()]

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # how far they come is in the residual
                try:
                    spent = median_seconds(run, device, **options)
                except Exception as error:  # what they cannot do is an answer, too
                    values[name] = {"skipped": f"{type(error).__name__}: {error}".splitlines()[0]}
                    continue
            values[name] = {"forward": spent, "residual": asked.residual(answers[0])}
        return values

    def present(self, rows: Sequence[Row]) -> Section:
        done = [row for row in rows if row.status == "done"]
        if not done:
            return Section()
        notes = dict.fromkeys(
            f"{name}: {entry['skipped']}."
            for row in done
            for name, entry in row.values.items()
            if isinstance(entry, dict) and "skipped" in entry
        )
        return Section(
            findings=self.findings(done),
            figures=self.figures(done),
            tables=[self.table(done)],
            notes=list(notes),
        )

    def table(self, rows: Sequence[Row]) -> Table:
        ours = ("forward, s", "backward, s", "products", "warm", "backward")
        columns = [("", "matrix"), ("", "size"), *((OURS, part) for part in ours)]
        columns += [("forward ÷ ours", other) for other in self.others]
        columns += [("residual", who) for who in (OURS, *self.others)]
        lines = []
        for row in rows:
            mine = row.values[OURS]
            line: list[Any] = [row.params["family"], self.label(row.params["size"])]
            line += [f"{mine[part]:.3f}" for part in ("forward", "backward")]
            line += [mine[f"products{part}"] for part in ("", " warm", " backward")]
            others = [row.values.get(other, {}) for other in self.others]
            line += [
                f"{other['forward'] / mine['forward']:.2f}" if "forward" in other else None
                for other in others
            ]
            line += [
                f"{entry['residual']:.0e}" if "residual" in entry else None
                for entry in (mine, *others)
            ]
            lines.append(line)
        note = "Warm: from a start that is off by 1 %; a product is one of two vectors then."
        return Table.of(f"bench-{self.name}", self.title, columns, lines, note=note)

    def label(self, size: Any) -> str:
        return f"{size:,}"

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return [
            Finding(
                f"{self.title}: {family}, fastest of the others with a residual like ours",
                "ours ahead",
                self._closest(rows, family),
                self._ahead(rows, family),
            )
            for family in self.families
        ]

    def _margins(self, rows: Sequence[Row], family: str) -> list[tuple[float, str, str]]:
        """Time of others ÷ ours, of those that are about as accurate."""
        return [
            (entry["forward"] / mine["forward"], name, self.label(row.params["size"]))
            for row in rows
            if row.params["family"] == family
            for mine in (row.values[OURS],)
            for name in self.others
            for entry in (row.values.get(name, {}),)
            if "forward" in entry and entry["residual"] <= 10 * mine["residual"]
        ]

    def _closest(self, rows: Sequence[Row], family: str) -> str:
        margins = self._margins(rows, family)
        if not margins:
            return "none is as accurate"
        least, name, size = min(margins)
        return f"{name} takes {least:.2f}× our time at {size}"

    def _ahead(self, rows: Sequence[Row], family: str) -> bool:
        return all(margin[0] >= 1 for margin in self._margins(rows, family))

    def figures(self, rows: Sequence[Row]) -> list[Figure]:
        return []


class Graphs(ByProducts):
    name = "graphs"
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


class PrincipalComponents(ByProducts):
    name = "pca"
    title = "IED of XᵀX without forming it"
    about = (
        "The first principal direction of m×n data in float32, ten factors and noise: "
        "ied(Gram(X)), and the same of centred data. The others run forward only; "
        "TruncatedSVD does not centre, PCA does."
    )
    reduced = "up to four million numbers."
    families = ("Gram", "centred")
    others = ("PCA randomized", "PCA arpack", "TruncatedSVD randomized", "TruncatedSVD arpack")
    sizes: ClassVar[Mapping[Scale, Sequence[list[int]]]] = {
        "quick": [[20_000, 100], [2_000, 2_000]],
        "full": [[200_000, 100], [20_000, 2_000], [2_000, 20_000], [2_000, 200_000]],
    }

    def entries(self, size: list[int]) -> int:
        return math.prod(size) // 10

    def label(self, size: list[int]) -> str:
        return "×".join(f"{side:,}" for side in size)

    def question(self, family: str, size: list[int]) -> Question:
        X = factors(*size)
        m = len(X)

        def problem(X: Tensor) -> pmaf.PrincipalEigenvectors:
            if family == "Gram":
                return pmaf.PrincipalEigenvectors(Gram(X))
            centred = Matrix(X) - LowRank(torch.ones(1, m), X.mean(0, keepdim=True))
            return pmaf.PrincipalEigenvectors(Gram(centred))

        mean = torch.zeros(X.shape[1]).double()
        if family == "centred":
            mean = sum(part.double().sum(0) for part in X.split(_ROWS)) / m

        def product(y: Tensor) -> Tensor:
            total = torch.zeros_like(y)
            for part in X.detach().split(_ROWS):
                rows = part.double() - mean
                total += rows.mT @ (rows @ y)
            return total

        return Question(X, problem, product, self._others(family, X))

    def _others(self, family: str, X: Tensor) -> dict[str, Solve]:
        from sklearn.decomposition import PCA, TruncatedSVD

        data = X.detach().numpy()
        if family == "centred":
            return {
                f"PCA {way}": lambda way=way: (
                    PCA(1, svd_solver=way, random_state=0).fit(data).components_
                )
                for way in ("randomized", "arpack")
            }
        return {
            f"TruncatedSVD {way}": lambda way=way: (
                TruncatedSVD(1, algorithm=way, random_state=0).fit(data).components_
            )
            for way in ("randomized", "arpack")
        }

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        largest = max(
            (row for row in rows if row.params["family"] == "Gram"),
            key=lambda row: row.values["leaf"],
            default=None,
        )
        if largest is None or largest.values["peak"] is None:
            return super().findings(rows)
        beside = largest.values["peak"] - 2 * largest.values["leaf"]
        memory = Finding(
            f"{self.title}: memory of the process at {self.label(largest.params['size'])}, "
            "beyond X and its gradient",
            "at most 2 GB",
            f"{beside / 1e9:.2f} GB",
            beside <= 2e9,
        )
        return [memory, *super().findings(rows)]


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


def factors(m: int, n: int) -> Tensor:
    """Ten factors of falling weight, noise, and a mean."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(m, n, generator=generator)
    weights = torch.linspace(1, 0.1, 10) * 2 * (1 + (m / n) ** 0.5) / m**0.5
    scores = torch.randn(m, 10, generator=generator) * weights
    loadings = torch.randn(10, n, generator=generator)
    return torch.addmm(X, scores, loadings, out=X).add_(0.1)


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


# A pass is repeated for so many seconds, at most so many times.
_BUDGET, _REPEATS = 4.0, 5
# Rows in float64 at a time.
_ROWS = 200
