"""How many calls into ATen the common calls make: for small matrices they are the cost.

A count that rises is a regression, as a time that rises would be, and is the same on every machine.
"""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import pmaf
from pmaf import native


def count(call):
    """The calls of the second time, which finds all caches filled."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        call()
    found = [event for event in record.events() if event.name.startswith("aten::")]
    outer = [
        event.name
        for event in found
        if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    ]
    return Counter(outer)


def symmetric(*shape):
    A = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return A + A.mT


def least_squares(m, n):
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, m, n, generator=g), torch.randn(5, m, generator=g)


CALLS = {
    "ied, 5×8": (lambda A: pmaf.ied(A).vectors, (symmetric(5, 8, 8),), 22, 23),
    "ied, one 8×8": (lambda A: pmaf.ied(A).vectors, (symmetric(8, 8),), 23, 23),
    "ied, smallest": (lambda A: pmaf.ied(A, largest=False).vectors, (symmetric(5, 8, 8),), 24, 24),
    # Without kernels, the parts of the gradient inside and outside of the span are many calls.
    "ied, k=3": (
        lambda A: pmaf.ied(A, 3).vectors,
        (symmetric(5, 16, 16),),
        24,
        82,
    ),
    # Newton's method on the secular equation may take two steps more or less, of eight calls.
    "less, 5×8×3": (pmaf.less, least_squares(8, 3), 200 + 16, 116),
}
if native.available:
    # The kernels write into tensors that the calls make, and call nothing else.
    for name, counts in {
        "ied, 5×8": (2, 1),
        "ied, one 8×8": (2, 1),
        "ied, smallest": (2, 1),
        "ied, k=3": (2, 3),
        "less, 5×8×3": (6, 2),
    }.items():
        CALLS[name] = (*CALLS[name][:2], *counts)


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    layer, inputs, forward, backward = CALLS[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    calls = count(lambda: layer(*leaves))
    assert sum(calls.values()) <= forward, calls
    out = layer(*leaves)
    ones = torch.ones_like(out)
    calls = count(lambda: torch.autograd.grad(out, leaves, ones, retain_graph=True))
    assert sum(calls.values()) <= backward, calls
