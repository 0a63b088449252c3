"""Solvers and problems as text.

A traced solve runs inside an opaque PyTorch operator, whose arguments are tensors, numbers and
strings. Solvers and problems are passed to it as text: the qualified name of their class, and their
options. The text survives `torch.export`, and a fresh process can read it.
"""

from __future__ import annotations

import ast
import functools
import math
import numbers
import operator
from dataclasses import dataclass, fields
from typing import Any, ClassVar


class Named:
    """A class that can be found again by its name.

    A class that is defined again, as in a notebook cell that runs twice, gets a name of its
    own, so that each instance is decoded to its own class.
    """

    _kinds: ClassVar[dict[str, type[Named]]] = {}
    kind: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        version = sum(known.partition("@")[0] == name for known in Named._kinds)
        cls.kind = f"{name}@{version + 1}" if version else name
        Named._kinds[cls.kind] = cls

    @classmethod
    def read(cls, options: dict[str, Any]) -> Any:
        """The instance with these options."""
        return cls(**options)


@dataclass(frozen=True)
class Configured(Named):
    """A frozen set of options that can be written as text and read back."""

    def __post_init__(self) -> None:
        # The text is written when the object is made. Under torch.compile with dynamic shapes
        # the numbers may be symbolic by the time it is needed.
        try:
            text = repr(_written(self))
        except TypeError as error:
            text, reason = None, str(error)
            object.__setattr__(self, "unwritten", reason)
        object.__setattr__(self, "text", text)

    # Attributes of each instance; not fields, so neither compared nor printed.
    text: ClassVar[str | None]
    unwritten: ClassVar[str]


def encode(x: Configured) -> str:
    """A solver as text: a literal, in which each class is named."""
    if x.text is None:
        raise TypeError(
            f"{x!r} cannot be traced, transformed or exported: {x.unwritten}; "
            "make its options numbers, strings, or sequences of them, or call it in eager mode"
        )
    return x.text


def abbreviated(x: Configured) -> str:
    """A solver as the user may write it: without the options that have their defaults."""
    given = []
    for field in fields(x):
        value = getattr(x, field.name)
        if value != field.default:
            word = abbreviated(value) if isinstance(value, Configured) else repr(value)
            given.append(f"{field.name}={word}")
    return f"{type(x).__name__}({', '.join(given)})"


def encode_options(kind: str, options: dict[str, Any]) -> str:
    """The same for a class and its options, inside a trace, where numbers may be symbolic."""
    words = [f"'{_KIND}': '{kind}'"]
    for name, x in options.items():
        if isinstance(x, int) and not isinstance(x, bool):
            x = operator.index(x)
        elif isinstance(x, float):
            numerator, denominator = x.as_integer_ratio()
            x = numerator / denominator
        words.append("'" + name + "': " + repr(x))
    return "{" + ", ".join(words) + "}"


def joined(kind: str, **texts: str) -> str:
    """The text of an object whose options are texts of their own."""
    words = [f"'{_KIND}': '{kind}'", *(f"'{name}': {text}" for name, text in texts.items())]
    return "{" + ", ".join(words) + "}"


# The key under which the name of a class stands beside its options, which are identifiers.
_KIND = "class"


def _written(x: Any) -> Any:
    """`x` with literals only; a set of options becomes a dictionary."""
    if isinstance(x, Configured):
        names = type(x).__match_args__  # pyright: ignore[reportAttributeAccessIssue]
        return {_KIND: x.kind, **{name: _written(getattr(x, name)) for name in names}}
    if isinstance(x, (tuple, list)):
        return type(x)(_written(item) for item in x)
    if x is None or isinstance(x, (bool, str)):
        return x
    if isinstance(x, numbers.Integral):  # NumPy's numbers print as calls
        return int(x)
    if isinstance(x, numbers.Real) and not math.isnan(x):
        return _Number(x)
    raise TypeError(f"{x!r} has no literal")


class _Number(float):
    """A number whose text can be read: infinity has no literal."""

    def __repr__(self) -> str:
        if math.isinf(self):
            return "1e999" if self > 0 else "-1e999"
        return float.__repr__(self)


@functools.lru_cache(maxsize=256)
def decode(text: str) -> Any:
    """The object that a text describes."""
    return _read(ast.literal_eval(text))


def _read(x: Any) -> Any:
    if isinstance(x, dict):
        options = {name: _read(value) for name, value in x.items() if name != _KIND}
        return _class_named(x[_KIND]).read(options)
    return type(x)(_read(item) for item in x) if isinstance(x, (tuple, list)) else x


def _class_named(kind: str) -> type[Named]:
    # In a fresh process a class that had been defined twice is defined once.
    for name in (kind, kind.partition("@")[0]):
        if name in Named._kinds:
            return Named._kinds[name]
    raise LookupError(
        f"the class {kind} is not defined here; import its module before running the program"
    )
