"""
Pooling images by their principal direction
===========================================

A network ends with many features for each image, one for every position, which have to become one
vector. Average pooling takes their mean, in which features of opposite signs cancel. Second-order
pooling takes all products of channels, a vector of channels² numbers. In between is the
principal eigenvector of these products: the direction that most features share, a vector as short
as the mean.

Today that vector comes from `torch.linalg.eigh`. Its gradient divides by all differences of
eigenvalues, and images have eigenvalues that repeat: an empty row or column is enough for a zero,
two of them for a division by zero. `pmaf.ied` divides only by differences to the eigenvalue that
is asked for, and `pmaf.PrincipalPool` is a layer made of it.
"""

# %%
# Gradients of real images
# ------------------------
# The digits of scikit-learn are 1,797 images of 8×8 pixels. The eight columns of an image are its
# channels, and we differentiate the top eigenvector of their second moments.

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import pmaf

torch.set_num_threads(1)  # matrices and network are too small for more
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
c = torch.cos(torch.arange(8.0))


def gradients(vector, images):
    """The derivative of the product of c and a vector of each image."""
    moments = (images.mT @ images).requires_grad_()
    return torch.autograd.grad((vector(moments) @ c.to(images)).sum(), moments)[0]


theirs = gradients(lambda A: torch.linalg.eigh(A).eigenvectors[..., -1], images)
ours = gradients(lambda A: pmaf.ied(A).vectors, images)
lost = ~theirs.isfinite().all(-1).all(-1)
print(f"images without a gradient: {int(lost.sum())} by eigh, {int((~ours.isfinite()).sum())} here")
assert lost.sum() > len(images) / 2
assert ours.isfinite().all()

# %%
# Finite is not enough. For an image that `eigh` has no gradient for, central differences in double
# precision agree with ours.

image = images[lost][0].double()
moments, step = image.mT @ image, 1e-5 * torch.eye(64, dtype=torch.float64).reshape(64, 8, 8)
up, down = (pmaf.ied(moments + s).vectors @ c.double() for s in (step, -step))
difference = ((up - down) / 2e-5).reshape(8, 8)
exact = gradients(lambda A: pmaf.ied(A).vectors, image)
assert (exact - difference).norm() < 1e-6 * difference.norm()

# %%
# A small network
# ---------------
# Two convolutions, a pooling layer and a linear classifier are trained on 300 images, from six
# seeds. The pooled features come after a ReLU, so that none is negative, or without it.


class SecondOrder(nn.Module):
    """All products of channels, averaged over positions."""

    def forward(self, maps):
        X = maps.flatten(-2)
        first, second = torch.triu_indices(X.shape[-2], X.shape[-2])
        return (X @ X.mT / X.shape[-1])[:, first, second]


CHANNELS, SEEDS = 16, 6
POOLS = {
    "average": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), CHANNELS),
    "principal": (pmaf.PrincipalPool(maps=True, scale="root"), CHANNELS),
    "second-order": (SecondOrder(), CHANNELS * (CHANNELS + 1) // 2),
}


def accuracy(pool, size, relu, seed):
    """The share of test images that are recognised after training."""
    torch.manual_seed(seed)
    order = torch.randperm(len(images))
    train, test = order[:300], order[300:]
    network = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU() if relu else nn.Identity(),
        pool,
        nn.BatchNorm1d(size),
        nn.Linear(size, 10),
    )
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(40):
        for batch in train[torch.randperm(len(train))].split(100):
            optimiser.zero_grad()
            scores = network(images[batch].unsqueeze(1))
            nn.functional.cross_entropy(scores, labels[batch]).backward()
            optimiser.step()
    assert all(x.isfinite().all() for x in network.parameters())
    with torch.no_grad():
        found = network.eval()(images[test].unsqueeze(1)).argmax(-1)
    return float((found == labels[test]).double().mean())


results = {}
for relu in (True, False):
    for name, (pool, size) in POOLS.items():
        found = [accuracy(pool, size, relu, seed) for seed in range(SEEDS)]
        results[name, relu] = 100 * np.array(found)
        where = "after ReLU" if relu else "signed"
        print(f"{where}, {name}, {size}: {np.mean(found):.1%} ± {np.std(found, ddof=1):.1%}")

# %%
# After a ReLU the three do about equally well. Without it, features of opposite signs cancel in the
# mean and not in the principal vector, which here comes out between the mean and second-order
# pooling; the latter has 136 numbers instead of 16. None of this is a law: the spread is large.

assert results["principal", True].mean() > 85

GREY, BLUE, GREEN = "#666666", "#0072B2", "#009E73"
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
tiles = np.ones((80, 80, 3))
for tile, (row, column) in enumerate(np.ndindex(8, 8)):
    ink = images[tile].numpy()[..., None]
    color = np.array([0.90, 0.62, 0.0] if lost[tile] else [0.2, 0.2, 0.2])
    tiles[10 * row + 1 : 10 * row + 9, 10 * column + 1 : 10 * column + 9] = 1 - ink * (1 - color)
left.imshow(tiles)
left.set_axis_off()
left.set_title(f"orange: no gradient by eigh ({int(lost.sum()):,} of {len(images):,} images)")
for place, ((name, relu), found) in enumerate(results.items()):
    color = (GREY, BLUE, GREEN)[place % 3]
    x = place + place // 3 + np.linspace(-0.15, 0.15, SEEDS)
    label = f"{name}, {POOLS[name][1]} numbers" if relu else None
    right.plot(x, found, "o", color=color, alpha=0.7, label=label)
    right.hlines(found.mean(), x[0] - 0.15, x[-1] + 0.15, color=color)
right.set_xticks([1, 5], ["features after ReLU", "features of both signs"])
right.set(ylabel="test accuracy (%)", title=f"300 training images, {SEEDS} seeds and their mean")
right.legend(frameon=False, loc="lower left")
plt.show()
