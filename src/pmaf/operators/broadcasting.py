"""Products of an operator that has one batch with vectors that have another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pmaf.linalg.products import broadcast


def broadcast_product(
    product: Callable[[Tensor], Tensor], batch: torch.Size, rows: Tensor
) -> Tensor:
    """A product with rows `(*, p, n)`, whose batch and that of the operator broadcast.

    Args:
        product: from rows `(*batch, p, n)` to rows `(*batch, p, m)`.
        batch: that of the operator.
        rows: of any batch that broadcasts with it.
    """
    own = rows.shape[:-2]
    if own == batch:
        return product(rows)
    whole = broadcast(own, batch)
    lead = len(whole) - len(batch)
    if lead == 0 and whole == batch:
        return product(rows.expand(*batch, *rows.shape[-2:]))
    # What the operator has no batch for becomes more rows of it.
    p, dims = rows.shape[-2], range(len(whole))
    more = [i for i in dims if i < lead or (batch[i - lead] == 1 and whole[i] != 1)]
    shared = [i for i in dims if i not in more]
    order = [*shared, *more]
    spread = rows.expand(*whole, *rows.shape[-2:]).permute(*order, -2, -1)
    image = product(spread.reshape(*batch, -1, rows.shape[-1]))
    image = image.reshape(*(whole[i] for i in order), p, image.shape[-1])
    return image.permute(*(order.index(i) for i in dims), -2, -1)
