r"""
Normalised cuts that learn from a few strokes
=============================================

Shi and Malik cut a photograph in two by an eigenvector of a graph: pixels are its nodes, the weight
of an edge says how alike two pixels are, :math:`D` holds the sums of weights at each node, and the
second smallest pair of :math:`(D - W)y = \lambda Dy` divides the nodes. How alike two pixels are
depends on a few widths. People set them by hand, because the solvers in use do not help to find
them: SciPy's ``eigsh`` has no gradient, and that of ``torch.linalg.eigh`` takes all eigenvectors of
a dense matrix, 0.4 GB for the 7,200 pixels below.

``pmaf.ied`` finds the one vector by products with the sparse graph, and its gradient in the weights
of all edges by products, too. So the widths can be learnt, here from twelve strokes of five pixels.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import skimage
import torch
from scipy import ndimage, sparse
from scipy.sparse.linalg import eigsh
from scipy.spatial import cKDTree
from skimage import filters, io, segmentation, transform
from sklearn.linear_model import LogisticRegression

import pmaf
from pmaf.operators import Diagonal, Sparse

# %%
# The photograph
# --------------
# Coins lie on a cloth that is as bright at the top left as some coins are at the bottom. The
# reference is the mask of a scikit-image tutorial, at full resolution: a watershed of the strength
# of contours, flooded from the darkest and the brightest pixels. Only the evaluation uses it.
coins = io.imread(Path(skimage.__file__).parent / "data" / "coins.png") / 255
seeds = 1 * (coins < 30 / 255) + 2 * (coins > 150 / 255)
reference = ndimage.binary_fill_holes(segmentation.watershed(filters.sobel(coins), seeds) == 2)
image = transform.downscale_local_mean(coins[:300], 4)  # 75×96
mask = transform.downscale_local_mean(reference[:300], 4) > 0.5
n = image.size

# %%
# The graph
# ---------
# Edges join all pixels less than three apart, and one in twenty, at random, of the pairs up to
# sixteen apart. An edge has five squared differences of its ends: of brightness, of smoothed
# brightness and of the strength of contours nearby, in standard deviations, and of row and column,
# in units of sixteen. Every width is one in these units, until it is learnt.
position = np.indices(image.shape).reshape(2, n)
pairs = cKDTree(position.T).query_pairs(16, output_type="ndarray").T
distance = np.hypot(*(position[:, pairs[0]] - position[:, pairs[1]]))
pairs = pairs[:, (distance < 3) | (np.random.default_rng(0).random(len(distance)) < 0.05)]
edges = torch.tensor(np.concatenate([pairs, pairs[::-1]], 1))

texture = transform.downscale_local_mean(ndimage.gaussian_filter(filters.sobel(coins), 6)[:300], 4)
features = [f.ravel() / f.std() for f in (image, ndimage.gaussian_filter(image, 1), texture)]
features = torch.tensor(np.stack([*features, *position / 16]))
differences = (features[:, edges[0]] - features[:, edges[1]]).square()

# %%
# The cut, as a layer
# -------------------
# The loss is the part of the labels of the strokes that no affine function of the vector explains.
# It does not depend on sign and scale, which an eigenvector does not have. The best affine function
# also says which side of the cut has the coins: where it is positive.
coin = [(12, 11), (31, 26), (9, 84), (65, 12), (50, 88), (49, 52)]
cloth = [(5, 20), (22, 50), (40, 5), (57, 60), (20, 60), (72, 50)]
stroke = torch.tensor([r * image.shape[1] + c + d for r, c in coin + cloth for d in range(-2, 3)])
label = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(30)


def graph(widths):
    weights = torch.exp(-torch.exp(-2 * widths) @ differences) + 1e-6
    W = torch.sparse_coo_tensor(edges, weights, (n, n), check_invariants=True)
    return W.coalesce(), torch.zeros(n, dtype=weights.dtype).index_add(0, edges[0], weights)


def cut(widths):
    W, degrees = graph(widths)
    D = Diagonal(degrees)
    y = pmaf.ied(D - Sparse(W), M=D, skip=1, largest=False).vectors
    centred = y - y[stroke].mean()
    slope = (centred[stroke] @ label) / (centred[stroke] @ centred[stroke])
    return y, slope * centred, 1 - slope * (centred[stroke] @ label) / len(label)


def overlap(side):
    """Intersection of the coins found and the coins of the reference, over their union."""
    found = np.asarray(side).reshape(image.shape) > 0
    return (found & mask).sum() / (found | mask).sum()


widths = torch.zeros(5, dtype=torch.float64, requires_grad=True)  # their logarithms
optimizer = torch.optim.Adam([widths], lr=0.15)
sides, gradients = [], []
for _ in range(11):
    _, side, loss = cut(widths)
    gradients.append(torch.autograd.grad(loss, widths)[0])
    sides.append(side.detach().numpy())
    widths.grad = gradients[-1]
    optimizer.step()

# %%
# What came out
# -------------
# The vector is that of SciPy, the gradient that of central differences. With the guessed widths the
# cut follows the light on the cloth; after ten steps it follows the coins, also those without a
# stroke. Otsu's threshold takes bright cloth for coins. Logistic regression, with the same strokes
# and features but without neighbours, finds coins that are a pixel too wide.
with torch.no_grad():
    W, degrees = graph(widths)
    steps = 1e-4 * torch.eye(5, dtype=torch.float64)
    central = torch.stack([(cut(step)[2] - cut(-step)[2]) / 2e-4 for step in steps])
    ours = cut(widths)[0].numpy()
error = (gradients[0] - central).norm() / central.norm()
A, D = sparse.csc_matrix((W.values(), W.indices().numpy())), sparse.diags(degrees.numpy()).tocsc()
theirs = eigsh(A, 2, M=D, which="LA")[1][:, 0]  # the same pair, as Wy = (1 − λ)Dy
cosine = abs(theirs @ D @ ours)

regression = LogisticRegression().fit(features[:, stroke].T, label).decision_function(features.T)
others = overlap(image - filters.threshold_otsu(image)), overlap(regression)
course = [overlap(side) for side in sides]
print(f"overlap of Otsu's threshold {others[0]:.3f}, of logistic regression {others[1]:.3f}")
print(f"of the cut with guessed widths {course[0]:.3f}, with learnt ones {course[-1]:.3f}")
print(f"1 − |cos| to SciPy {1 - cosine:.0e}; error of the gradient {error:.0e}")
assert cosine > 1 - 1e-6
assert error < 1e-5  # differences have an error of about their step squared, 1e-8, times curvature
assert course[-1] > 0.9 > max(others) > 0.5 > course[0]

# %%
figure, axes = plt.subplots(2, 2, figsize=(8, 6.6), facecolor="white", layout="constrained")
axes[0, 0].imshow(image, cmap="gray")
for points, colour in (coin, "#FFB000"), (cloth, "#40B0FF"):
    for r, c in points:
        axes[0, 0].plot([c - 2, c + 2], [r, r], color=colour, lw=4, solid_capstyle="round")
for ax, side in (axes[0, 1], sides[0]), (axes[1, 0], sides[-1]):
    most = np.abs(side).max()
    ax.imshow(side.reshape(image.shape), cmap="PuOr_r", vmin=-most, vmax=most)
    ax.contour(mask, [0.5], colors="black", linewidths=0.8)
for ax, title in zip(axes.flat, ("photograph, twelve strokes", "guessed widths", "learnt widths")):
    ax.set(xticks=[], yticks=[], title=title)
axes[1, 1].plot(course, "o-", color="#B35806", label="normalised cut")
axes[1, 1].axhline(others[1], color="black", ls="--", label="logistic regression")
axes[1, 1].axhline(others[0], color="black", ls=":", label="Otsu's threshold")
axes[1, 1].set(xlabel="steps of training", title="overlap with the reference", ylim=(0, 1))
axes[1, 1].legend(loc="lower right", frameon=False)
plt.show()
