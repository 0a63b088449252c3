"""Straight-line programs: solves and derivatives without a branch on any number.

A processor decides by the numbers what is best: how many steps, which decomposition, whether to
refine. On an accelerator every such question makes the host wait for the device, and every short
operation costs as much as a long one. So these programs take one decomposition and a fixed number
of operations on whole batches, in which masks take the place of branches. Each is a pure function
of tensors, which `torch.compile` can fuse.

Whether a result is right is a number among the results, its `Evidence`. The host reads that once,
at the end of a call, and solves by another way where it has to.
"""
