"""The tables of the pages, one function each, from a record to Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pmaf_lab.figures.record import NOTHING, Entry, Number, Record, three_digits, two_digits

Make = Callable[[Record], str]


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column is aligned to the left."""
    right = "|".join([":--", *["--:"] * (len(heads) - 1)])
    rows = [f"| {' | '.join(line)} |" for line in (heads, *lines)]
    return "\n".join([rows[0], f"|{right}|", *rows[1:]])


def _missing(*races: str) -> str:
    return f"*Not measured yet: `pmaf bench {' '.join(races)} --figures docs/figures.json`.*"


def _text(x: Number | None, form: Callable[[Number], str] = three_digits) -> str:
    return NOTHING if x is None else form(x)


def _ratio(x: Number | None) -> str:
    """With as many digits as others of a column, so that they stand below each other."""
    return NOTHING if x is None else f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def _milliseconds(x: Number | None) -> str:
    return NOTHING if x is None else two_digits(1e3 * x)


def _last(size: str) -> int:
    """The number of columns of a matrix."""
    return int(size.split("×")[-1].replace(",", ""))


class Part(NamedTuple):
    """The rows of a race in a table.

    Attributes:
        label: What is computed, as the first column says it.
        baseline: The competitor that ours is held against.
        family: The one whose times and errors are shown.
        chosen: Whether a size belongs to the table.
    """

    label: str
    race: str
    baseline: str
    family: str
    chosen: Callable[[str], bool] = lambda size: True

    def lines(self, record: Record, line: Callable[[Part, Entry, str], list[str]]) -> list:
        entry = record.entries.get(self.race)
        if entry is None:
            return []
        return [line(self, entry, size) for size in entry.sizes() if self.chosen(size)]


def _parts(
    parts: Sequence[Part],
    heads: Sequence[str],
    line: Callable[[Part, Entry, str], list[str]],
    record: Record,
) -> str:
    """The rows of several races, and what is missing of them."""
    lines = [found for part in parts for found in part.lines(record, line)]
    absent = [part.race for part in parts if part.race not in record.entries]
    table = [markdown(heads, lines)] if lines else []
    return "\n\n".join(table + ([_missing(*absent)] if absent else []))


def _large(size: str) -> bool:
    return _last(size) >= 512


_EIGEN = (
    Part("1", "ied-users", "eigh", "goe"),
    Part("1", "ied", "eigh", "goe", _large),
    Part("3", "ied-users-k", "eigh", "goe"),
    Part("4", "ied-k", "eigh", "goe", _large),
    Part("1, nonsymmetric", "ied-nonsymmetric", "eig", "paper", lambda size: size.startswith("5×")),
)
_EIGEN_HEADS = (
    "vectors", "batch×n", "forward, ms", "backward, ms", "`eigh` ÷ ours, least", "median",
    "error of vectors", "of `eigh`", "of gradients", "of `eigh`",
)  # fmt: skip


def _eigen_line(part: Part, entry: Entry, size: str) -> list[str]:
    times = [entry.pick(size, f"ours {x}", part.family) for x in ("forward", "backward")]
    ratios = [entry.pick(size, f"{part.baseline} both", x) for x in ("least", "median")]
    errors = [
        entry.pick(size, f"{who} {error} error", part.family)
        for error in ("vector", "gradient")
        for who in ("ours", part.baseline)
    ]
    return [
        part.label,
        size,
        *map(_milliseconds, times),
        *map(_ratio, ratios),
        *map(_text, errors),
    ]


_LESS = (
    Part("", "less-users", "lstsq", "outer"),
    Part("", "less", "lstsq", "outer", lambda size: _last(size) >= 256),
)
_LESS_HEADS = (
    "batch×m×n", "forward, ms", "backward, ms", "`lstsq` ÷ ours, forward, least", "median",
    "both passes, least", "median", "error of gradients",
)  # fmt: skip


def _less_line(part: Part, entry: Entry, size: str) -> list[str]:
    times = [entry.pick(size, f"ours {x}", part.family) for x in ("forward", "backward")]
    ratios = [
        entry.pick(size, f"{part.baseline} {x}", how)
        for x in ("forward", "both")
        for how in ("least", "median")
    ]
    error = entry.pick(size, "ours gradient error", part.family)
    return [size, *map(_milliseconds, times), *map(_ratio, ratios), _text(error)]


# Who computes the same, by family: with ARPACK, and in another way.
_OTHERS = {
    "adjacency": ("eigsh", "lobpcg"),
    "PageRank": ("eigs", ""),
    "Gram": ("TruncatedSVD arpack", "TruncatedSVD randomized"),
    "centred": ("PCA arpack", "PCA randomized"),
}
_PRODUCTS_HEADS = (
    "matrix", "size", "forward, s", "backward, s", "products", "warm", "backward",
    "ARPACK ÷ ours", "LOBPCG or randomized ÷ ours", "residual", "of ARPACK", "of the other",
)  # fmt: skip


def _products(record: Record) -> str:
    lines = [
        _products_line(family, entry, size)
        for race, families in (("graphs", ("adjacency", "PageRank")), ("pca", ("Gram", "centred")))
        if (entry := record.entries.get(race)) is not None
        for family in families
        for size in entry.sizes()
    ]
    absent = [race for race in ("graphs", "pca") if race not in record.entries]
    table = [markdown(_PRODUCTS_HEADS, lines)] if lines else []
    return "\n\n".join(table + ([_missing(*absent)] if absent else []))


def _products_line(family: str, entry: Entry, size: str) -> list[str]:
    def pick(column: str) -> str:
        return _text(entry.pick(size, column, family))

    names = ("forward", "backward", "products", "products warm", "products backward")
    return [
        family,
        size,
        *(pick(f"ours {name}") for name in names),
        *(_ratio(entry.pick(size, f"{other} forward", family)) for other in _OTHERS[family]),
        *(pick(f"{who} residual") for who in ("ours", *_OTHERS[family])),
    ]


def _families(race: str, baseline: str, record: Record) -> str:
    """The ratio of every family, one line a size."""
    entry = record.entries.get(race)
    if entry is None:
        return _missing(race)
    families = list(dict.fromkeys(place.family for place in entry.rows))
    lines = [
        [size, *(_ratio(entry.pick(size, f"{baseline} both", family)) for family in families)]
        for size in entry.sizes()
    ]
    return markdown(["batch×n", *families], lines)


TABLES: dict[str, Make] = {
    "eigenvectors": partial(_parts, _EIGEN, _EIGEN_HEADS, _eigen_line),
    "least squares": partial(_parts, _LESS, _LESS_HEADS, _less_line),
    "products": _products,
    "hermitian": partial(_families, "hermitian", "eigh"),
    "pairs": partial(_families, "pairs", "Cholesky and eigh"),
}
