"""Data classes as trees of tensors, so that transforms of torch look inside of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

# What is not a tensor: the names of the leaves, and all other fields with their values.
_Context = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]


def register_tree(kind: type, name: str, leaves: tuple[str, ...] | None = None) -> None:
    """Make a data class a tree, whose other fields stay with it as they are.

    Args:
        kind: the class; nothing is checked where an instance is put together again.
        name: of the class in an exported program.
        leaves: the fields that are leaves; unless given, those that contain tensors.
    """

    def flatten(x: Any) -> tuple[list[Any], _Context]:
        names = leaves or getattr(x, _LEAVES, None) or _tensor_fields(x)
        others = tuple((f.name, getattr(x, f.name)) for f in fields(x) if f.name not in names)
        return [getattr(x, name) for name in names], (names, others)

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], _Context]:
        values, context = flatten(x)
        return [(GetAttrKey(name), value) for name, value in zip(context[0], values)], context

    def unflatten(values: Iterable[Any], context: _Context) -> Any:
        names, others = context
        x = object.__new__(kind)
        for field, value in (*zip(names, values), *others):
            object.__setattr__(x, field, value)
        if leaves is None:
            # torch puts numbers in the place of tensors, and takes such a tree apart again.
            object.__setattr__(x, _LEAVES, names)
        return x

    def read(context: Any) -> _Context:
        names, others = context
        return tuple(names), tuple((field, value) for field, value in others)

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=name,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=read,
        flatten_with_keys_fn=flatten_with_keys,
    )


# The attribute of an instance that was put together: the names of its leaves.
_LEAVES = "_leaves"


def _tensor_fields(x: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(x) if isinstance(getattr(x, f.name), Tensor))
