"""
Two views: weights of matches, learnt through the eight-point algorithm
=======================================================================

Two photographs of a scene are related by a fundamental matrix: the match of a point of the first
lies on a line in the second. The eight-point algorithm finds it as the null vector of a matrix with
a row for each match, and wrong matches spoil it. RANSAC, which tries random samples of eight, has
no gradient. Instead, matches can have weights that are learnt through the null vector.
``pmaf.nullspace(rows, weights=w)`` has the exact gradient in the weights. It also has that of a
sample of eight matches, where ``torch.linalg.svd`` returns zero, without a warning.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import skimage
import torch
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation
from skimage import feature, io, measure, transform

import pmaf

# %%
# Pairs of views
# --------------
# A pair of the Middlebury benchmark comes with the true place of each pixel in the second view. It
# is rectified: right matches have the same row, which keypoints on whole pixels meet exactly. So we
# turn the second camera, by a homography of its coordinates, and move its keypoints by up to half a
# pixel. Training sees six turns and the left half of the scene, the test six other turns and the
# right half. A keypoint is matched with the most similar one, often wrongly. The features of a
# match: the distance of descriptors, its ratio to the second best, and whether it is mutual.
folder = Path(skimage.__file__).parent / "data"
left, right = (io.imread(folder / f"motorcycle_{s}.png", True) for s in ("left", "right"))
disparity = np.load(folder / "motorcycle_disp.npz")["arr_0"]
known = np.argwhere(np.isfinite(disparity))[:, ::-1]
camera = np.array([[994.978, 0, 342.279], [0, 994.978, 254.877], [0, 0, 1]])
random = np.random.default_rng(0)
first, second = (feature.ORB(n_keypoints=1500, fast_threshold=0.02) for _ in range(2))
first.detect_and_extract(left)
second.detect_and_extract(right)
distance = cdist(first.descriptors, second.descriptors, "hamming")
match = distance.argmin(1)
best, next_best = np.partition(distance, 1)[:, :2].T
mutual = distance.argmin(0)[match] == np.arange(len(match))
features = np.stack([10 * best, 10 * best / next_best, mutual], 1)
found, matched = first.keypoints[:, ::-1], second.keypoints[match, ::-1]


def views(half):
    """Matches in both views and their features, and 1,000 true places in both, of six turns."""
    x, y = random.choice(known[(known[:, 0] >= 370) == half], 1000, replace=False).T
    mine = (found[:, 0] >= 370) == half
    points = found[mine], matched[mine], np.stack([x, y], 1), np.stack([x - disparity[y, x], y], 1)
    p, q, here, there = (np.insert(d.astype(float), 2, 1, axis=1) for d in points)
    angles = random.uniform([-15, -5, -5], [15, 5, 5], (6, 3))
    turns = camera @ Rotation.from_euler("zyx", angles, True).as_matrix() @ np.linalg.inv(camera)
    q, there = (d @ turns.swapaxes(1, 2) for d in (q, there))
    q, there = q / q[..., 2:], there / there[..., 2:]
    q[..., :2] += random.uniform(-0.5, 0.5, q[..., :2].shape)
    return [torch.tensor(d).expand(6, -1, -1) for d in (p, q, features[mine], here, there)]


train, test = views(False), views(True)


# %%
# The layer
# ---------
# Coordinates are normalised as by Hartley; a second null vector makes the matrix singular, as it
# has to be. The first weights depend on the features; three times, they are found again with the
# distances of matches from the lines of the last matrix. There are nine parameters, three for
# features, three widths and three powers, and the gradient goes through all rounds.
def normalised(points):
    centre = points[..., :2].mean(-2)
    scale = 2**0.5 / (points[..., :2] - centre.unsqueeze(-2)).norm(dim=-1).mean(-1)
    T = torch.diag_embed(torch.stack([scale, scale, torch.ones_like(scale)], -1))
    T[..., :2, 2] = -scale.unsqueeze(-1) * centre
    return points @ T.mT, T


def eight_points(p, q, weights):
    (p, P), (q, Q) = normalised(p), normalised(q)
    rows = (q.unsqueeze(-1) * p.unsqueeze(-2)).flatten(-2)
    F = pmaf.nullspace(rows, weights=weights).unflatten(-1, (3, 3))
    v = pmaf.nullspace(F).unsqueeze(-1)
    return Q.mT @ (F - F @ v @ v.mT) @ P, rows


def off(F, p, q):
    """Distances of points from their epipolar lines in pixels, the mean of both views."""
    lines, back = p @ F.mT, q @ F
    distance = (q * lines).sum(-1).abs()
    return distance * (1 / lines[..., :2].norm(dim=-1) + 1 / back[..., :2].norm(dim=-1)) / 2


def find(p, q, features):
    """The matrices after each weighting, and the last weights."""
    weights = (features @ parameters[0]).softmax(-1)
    matrices = [eight_points(p, q, weights)[0]]
    for width, power in parameters[1:].T:
        distance = off(matrices[-1], p, q) / width.exp()
        weights = (features @ parameters[0] - power * distance.square().log1p()).softmax(-1)
        matrices.append(eight_points(p, q, weights)[0])
    return torch.stack(matrices), weights


parameters = torch.tensor([[0.0] * 3, [1.0] * 3, [1.0] * 3], dtype=torch.float64)
guessed = find(*test[:3])[0]
optimizer = torch.optim.Adam([parameters.requires_grad_()], lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    off(find(*train[:3])[0], *train[3:]).log1p().mean().backward()
    optimizer.step()
learnt, weights = (result.detach() for result in find(*test[:3]))

# %%
# What came out
# -------------
# Of each method and pair we take the median distance of 1,000 true places from their lines. Learnt
# weights are hundreds of times better than even or guessed ones. RANSAC, with 300 samples of mutual
# matches, is as good; the layer adds a gradient, in weights and in the 8×9 matrix of a sample.
mutual = test[2][0, :, 2] > 0
models = [
    measure.ransac(pair, transform.FundamentalMatrixTransform, 8, 1, max_trials=300, rng=0)[0]
    for pair in zip(*(points[:, mutual, :2].numpy() for points in test[:2]))
]
results = {"even weights": guessed[0], "guessed weights": guessed[-1], "learnt weights": learnt[-1]}
results["RANSAC"] = torch.tensor(np.stack([model.params for model in models]))
errors = {name: off(F, *test[3:]).median(-1).values.numpy() for name, F in results.items()}
print("pixels, median of six pairs:", {k: f"{np.median(e):.2f}" for k, e in errors.items()})
even, guessed, learnt, _ = errors.values()
assert learnt.max() < 0.1 * min(even.min(), guessed.min())

p, q, _, *truth = (d[0] for d in test)
eight = weights[0].topk(120).indices[::15]
A = eight_points(p[eight], q[eight], None)[1].requires_grad_()
(by_svd,) = torch.autograd.grad(torch.linalg.svd(A).Vh[-1, 0].square(), A)
logarithms, entries = weights[0].log(), A.detach().flatten()
for x, step, function in (
    (logarithms, 3e-4, lambda x: off(eight_points(p, q, x.exp())[0], *truth).square().mean(-1)),
    (entries, 1e-6, lambda x: pmaf.nullspace(x.unflatten(-1, (8, 9)))[..., 0].square()),
):
    (gradient,) = torch.autograd.grad(function(x.requires_grad_()), x)
    steps = step * torch.eye(len(x), dtype=x.dtype)
    central = ((function(x + steps) - function(x - steps)) / (2 * step)).detach()
    error = (gradient - central).norm() / central.norm()
    print(f"gradient {gradient.norm():.1e}, relative distance from differences {error:.0e}")
    assert error < 1e-6 < gradient.norm()
print(f"gradient of eight matches by svd: {by_svd.norm()}")
assert by_svd.norm() == 0

# %%
figure, (top, below) = plt.subplots(2, height_ratios=(5, 2), layout="constrained")
figure.set(size_inches=(8, 6.4), facecolor="white")
order = weights[0].argsort()
weight = (len(p) * weights[0][order]).log10().clamp(-3, 1).numpy()
here, there = (points[found[:, 0] >= 370][order] for points in (found, matched))
style = dict(angles="xy", scale_units="xy", scale=1, headaxislength=0, headlength=0, width=0.003)
top.imshow(left, cmap="gray", vmax=1.6)
lines = top.quiver(*here.T, *(there - here).T, weight, alpha=0.3 + (weight + 3) / 6, **style)
figure.colorbar(lines, ax=top, label="learnt weight / even weight, log10")
top.set(xlim=(150, 740), ylim=(420, 0), xticks=[], yticks=[], title="keypoints to matches")
for height, error in enumerate(errors.values()):
    below.plot(error, np.full(6, height), "o", color="#785EF0", alpha=0.6)
below.set(xscale="log", yticks=range(4), yticklabels=errors, ylim=(3.5, -0.5))
below.set(xlabel="pixels from true places to their lines, six pairs")
plt.show()
