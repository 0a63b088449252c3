"""A pretend accelerator, on which eager PyTorch code runs as on one, and is counted.

Neither a GPU nor another build of torch is needed. To torch the device is "pretend:0", of the
type that it keeps for backends from outside (PrivateUse1), with its own thread of the autograd
engine. A tensor there (`Pretend`) wraps a tensor of the CPU, which computes its numbers, so that
results can be compared. Every ATen call below autograd, in both passes, comes to the wrapper:

* CUDA's error is raised where tensors of two devices meet (`rules`).
* A *launch* is a kernel that ATen is known to start on CUDA (`costs`). A decomposition is one
  launch, and is listed by name with the number of calls of cuSOLVER, each of which starts tens to
  thousands of kernels.
* A *wait* is where the host waits for the device: `item`, `bool`, boolean masks, copies to the
  CPU, decompositions that read their `info`, and shapes that depend on numbers.
* A *copy* comes from pageable memory of the host, and the host waits for it, too.
* Each is an `Event` with the lines of the library that caused it (`counts`).

So the numbers of launches are lower bounds. No dispatch mode is involved: with one on the stack,
the library would take the call for a trace, and threads of the backward pass would not have it.

>>> import torch
>>> from tests import pretend
>>> x = pretend.put(torch.randn(3, 3)).requires_grad_()
>>> with pretend.counted() as counts:
...     print((x @ x + 1).relu().sum() > 1e6)
Pretend((), torch.bool)
>>> counts.launches, counts.waits
(5, 0)
"""

from tests.pretend.counts import CaptureError, Counts, Event, counted, launched
from tests.pretend.device import DEVICE, NAME, Pretend, on_host, options, put, take_doubles

__all__ = [
    "DEVICE",
    "NAME",
    "CaptureError",
    "Counts",
    "Event",
    "Pretend",
    "counted",
    "launched",
    "on_host",
    "options",
    "put",
    "take_doubles",
]
