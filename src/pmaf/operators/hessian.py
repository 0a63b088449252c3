"""The Hessian of a loss, by products with vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from pmaf.operators.base import Operator


class Hessian(Operator):
    """The second derivatives of a scalar loss in its parameters, as a symmetric matrix `(n, n)`.

    Its vectors are flat, with the entries of all parameters one after another; `unflatten` gives
    them the shapes of the parameters. A product takes about as long as four evaluations of the
    loss, and the matrix is never formed. Gradients of an eigenvalue reach the parameters: they are
    third derivatives of the loss, which torch computes wrongly for `layer_norm`, and for
    `batch_norm` and `instance_norm` in training. With these, a gradient raises an error.

    Args:
        loss: from `params` to a scalar tensor. It is evaluated in every product, so it has to be
            the same each time: no dropout, no new minibatch.
        params: a tensor; or dictionaries, lists and tuples of tensors; or a module, with those of
            its parameters that require a gradient. A module is passed to `loss` itself, and its
            buffers, such as running averages, are left as they are.

    >>> import torch, pmaf
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian = pmaf.operators.Hessian(lambda x: (x**4).sum(), x)  # diag(12x²)
    >>> sharpness = pmaf.ied(hessian).values
    >>> sharpness.backward()
    >>> sharpness.detach().round(decimals=3), x.grad.round(decimals=3)
    (tensor(48.), tensor([ 0., 48.]))
    """

    symmetric = True
    _is_differentiated = False  # whether the products are, in the parameters

    def __init__(self, loss: Callable[[Any], Tensor], params: Any) -> None:
        if not callable(loss) or (isinstance(loss, nn.Module) and isinstance(params, Tensor)):
            hint = " of the parameters" if callable(loss) else ""
            raise TypeError(
                f"loss must be a function{hint}, loss(params); got {type(loss).__name__}; for a "
                "module pass Hessian(lambda module: criterion(module(x), y), module)"
            )
        self._loss, self._module = loss, params if isinstance(params, nn.Module) else None
        if self._module is not None:
            params = {k: x for k, x in self._module.named_parameters() if x.requires_grad}
            self._of_module = tuple(params.values())
        leaves, spec = tree_flatten(params)
        self._tensors = _checked(leaves, self._module)
        # The containers of the parameters, with the number of each in its place.
        self._places = tree_unflatten(range(len(leaves)), spec)

    @property
    def shape(self) -> torch.Size:
        n = sum(x.numel() for x in self._tensors)
        return torch.Size((n, n))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    def with_tensors(self, tensors: Sequence[Tensor]) -> Hessian:
        other = copy(self)
        other._tensors = tuple(tensors)
        return other

    def pullback(self, left: Tensor, right: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        other = copy(self)
        other._is_differentiated = True
        return Operator.pullback(other, left, right, needs)

    def unflatten(self, vector: Tensor) -> Any:
        """A flat vector in the shapes of `params`; of a module, a dictionary by parameters' names.

        Args:
            vector: `(*, n)`, such as an eigenvector; for k of them, `(n, k)`, pass the transpose.

        >>> import torch
        >>> from pmaf.operators import Hessian
        >>> params = {"a": torch.ones(2), "b": torch.ones(())}
        >>> hessian = Hessian(lambda p: p["a"].prod() * p["b"], params)
        >>> hessian.unflatten(torch.arange(3.0))
        {'a': tensor([0., 1.]), 'b': tensor(2.)}
        """
        n = self.shape[-1]
        if not isinstance(vector, Tensor) or vector.dim() == 0 or vector.shape[-1] != n:
            got = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            hint = "; pass the transpose of columns" if n in getattr(vector, "shape", ()) else ""
            raise ValueError(f"a vector of {self!r} has shape (*, {n}); got {got}{hint}")
        return self._tree(self._parts(vector))

    def matvec(self, rows: Tensor) -> Tensor:
        given = self._tensors
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (rows, *given))
        # The solvers search without recording, and maybe in inference mode.
        with torch.inference_mode(False), torch.enable_grad():
            rows = rows.clone() if rows.is_inference() else rows
            leaves = [x if recorded and x.requires_grad else _leaf(x) for x in given]
            gradients = self._gradients(leaves)
            # A loss may be linear in some parameters.
            second = [(i, g) for i, g in enumerate(gradients) if g.requires_grad]
            images = [
                self._second(second, leaves, row, recorded).reshape(rows.shape[-1])
                for row in rows.reshape(-1, rows.shape[-1])
            ]
            return torch.stack(images).reshape(rows.shape)

    def _second(
        self, gradients: list[tuple[int, Tensor]], leaves: list[Tensor], row: Tensor, recorded: bool
    ) -> Tensor:
        """The derivative of `gradientᵀ row`, flat."""
        if not gradients:
            return torch.zeros_like(row)
        parts = self._parts(row)
        found = torch.autograd.grad(
            [g for _, g in gradients],
            leaves,
            [parts[i] for i, _ in gradients],
            retain_graph=True,
            create_graph=recorded,
            materialize_grads=True,
        )
        return torch.cat([x.reshape(-1) for x in found])

    def _gradients(self, leaves: list[Tensor]) -> Sequence[Tensor]:
        value = self._value(leaves)
        if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"a tensor of shape {tuple(value.shape)} and {value.dtype}; take its mean()"
            raise TypeError(f"loss must return one real number as a tensor; got {got}")
        if not value.requires_grad:
            raise RuntimeError(
                "autograd sees no way from the parameters to the loss; compute it from the "
                "argument of loss, and not under torch.no_grad()"
            )
        if self._is_differentiated:
            _require_third_derivatives(value)
        return torch.autograd.grad(
            value.reshape(()), leaves, create_graph=True, materialize_grads=True
        )

    def _value(self, leaves: list[Tensor]) -> Any:
        if self._module is None:
            return self._loss(self._tree(leaves))
        with _parameters(self._module, self._of_module, leaves):
            return self._loss(self._module)

    def _tree(self, items: Sequence[Tensor]) -> Any:
        """One tensor for each parameter, in the containers of the parameters."""
        return tree_map(lambda i: items[i], self._places)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """A flat vector as one tensor for each parameter."""
        lead = vector.shape[:-1]
        parts = vector.split([x.numel() for x in self._tensors], -1)
        return [part.reshape((*lead, *x.shape)) for part, x in zip(parts, self._tensors)]


@contextmanager
def _parameters(
    module: nn.Module, parameters: Sequence[Tensor], others: Sequence[Tensor]
) -> Iterator[None]:
    """Other tensors in the place of the parameters of a module, and copies of its buffers.

    Parameters and modules that occur twice do so with the others. With `torch.func.functional_call`
    a module that occurs twice would keep the other tensors.
    """
    new: dict[int, Any] = {id(x): y for x, y in zip(parameters, others)}
    parts = list(module.modules())
    before = [(dict(part._parameters), dict(part._buffers)) for part in parts]
    try:
        for part, (own, buffers) in zip(parts, before):
            part._parameters.update({name: new.get(id(x), x) for name, x in own.items()})
            part._buffers.update({k: None if x is None else x.clone() for k, x in buffers.items()})
        yield
    finally:
        for part, (own, buffers) in zip(parts, before):
            part._parameters.update(own)
            part._buffers.update(buffers)


def _require_third_derivatives(value: Tensor) -> None:
    """No operation of the loss is one whose third derivative torch computes wrongly.

    The second derivatives of these normalisations use a mean and a variance that were saved, and
    that count as constants when they are differentiated again.
    """
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [x for x, _ in node.next_functions]
        todo += following
        name = node.name().partition("Backward")[0]
        saved = name == "NativeLayerNorm" or (
            name.endswith("BatchNorm") and getattr(node, "_saved_training", True)
        )
        if saved and following[0] is not None:  # its input depends on the parameters
            raise RuntimeError(
                f"the loss contains {name}, whose third derivatives torch computes wrongly, so "
                "that the gradient of an eigenvalue would be wrong; write this normalisation with "
                "mean() and var(), use RMSNorm or GroupNorm, or module.eval() if it is a BatchNorm"
            )


def _leaf(x: Tensor) -> Tensor:
    x = x.clone() if x.is_inference() else x
    return x.detach().requires_grad_()


def _checked(leaves: list[Any], module: nn.Module | None) -> tuple[Tensor, ...]:
    """The parameters, which are real tensors of one dtype and one device."""
    if not leaves:
        what = "a module without" if module is not None else "no"
        raise ValueError(
            f"params has nothing to differentiate in: {what} parameters that require a gradient"
        )
    first = leaves[0]
    for x in leaves:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                "params must be a real floating-point tensor, a module, or dictionaries, lists and "
                f"tuples of such tensors; got {got}"
            )
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise TypeError(
                f"params have {first.dtype} on {first.device} and {x.dtype} on {x.device}; "
                "convert them to one dtype and one device with .to()"
            )
    if all(x.numel() == 0 for x in leaves):
        raise ValueError("params has nothing to differentiate in: all tensors are empty")
    return tuple(leaves)
