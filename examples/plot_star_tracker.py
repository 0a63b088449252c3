"""
A star tracker that knows its errors
====================================

A spacecraft finds out where it points by comparing the directions of stars in its camera with those
of a catalogue. Davenport's q-method, in use since the 1970s, makes that an eigenvalue problem: the
attitude, a quaternion, is the top eigenvector of a symmetric 4 × 4 matrix. SciPy solves the same
problem (``Rotation.align_vectors``, by an SVD) for one picture and without a derivative.

As a layer, it comes in batches and with a derivative. The Jacobian turns the noise of the camera
into error bars of the attitude. The gradient in the weights of the stars finds stars that were
taken for others. And it is right where ``eigh`` has NaN: in the average of equal rotations.
"""

import ephem.stars
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.spatial.transform import Rotation

import pmaf

# %%
# A picture of Orion
# ------------------
#
# A camera of unknown attitude sees stars of PyEphem's catalogue within 40° of Orion's belt, with an
# error of an arc minute. For a star, qᵀKq is the cosine between it and where q says it should be.

torch.set_default_dtype(torch.float64)
ARC_MINUTE = torch.pi / 180 / 60
stars = [ephem.star(name, "2026/1/1") for name in ephem.stars.stars]
stars = list({round(star.a_ra, 4): star for star in stars}.values())  # some have two names
names, ra, dec = zip(*[(star.name, star.a_ra, star.a_dec) for star in stars])
names, ra, dec = np.array(names), torch.tensor(ra), torch.tensor(dec)
catalogue = torch.stack([dec.cos() * ra.cos(), dec.cos() * ra.sin(), dec.sin()], -1)
seen = catalogue @ catalogue[names == "Alnilam"][0] > 0.766  # the cosine of 40°
names, catalogue, generator = names[seen], catalogue[seen], torch.Generator().manual_seed(0)
truth = Rotation.from_rotvec([0.3, -1.1, 0.7])
exact, true = torch.from_numpy(truth.apply(catalogue)), torch.from_numpy(truth.as_quat())


def photograph(*batch):
    noise = torch.randn(*batch, *exact.shape, generator=generator)
    return torch.nn.functional.normalize(exact + ARC_MINUTE * noise, dim=-1)


def davenport(observed, catalogue):
    outer = observed[..., :, None] * catalogue[..., None, :]
    cosine = (observed * catalogue).sum(-1)[..., None, None]
    cross = torch.linalg.cross(catalogue.expand_as(observed), observed)[..., None]
    rows = torch.cat([outer + outer.mT - cosine * torch.eye(3), cross], -1)
    return torch.cat([rows, torch.cat([cross.mT, cosine], -1)], -2)


def attitude(K, weights):  # reference=3: the real part, the last one, is positive
    return pmaf.ied((weights[:, None, None] * K).sum(-3), reference=3).vectors


observed, equal = photograph(), torch.ones(len(names)) / len(names)
q = attitude(davenport(observed, catalogue), equal)
scipy = torch.from_numpy(Rotation.align_vectors(observed, catalogue, weights=equal)[0].as_quat())
print(f"{len(names)} stars; largest difference to SciPy: {(q - scipy).abs().max():.0e}")
assert (q - scipy).abs().max() < 1e-13

# %%
# Error bars
# ----------
#
# The error of an attitude is a small rotation: two angles across the axis of the camera, and a roll
# about it. The Jacobian carries the noise over (ellipses: 1, 2, 3 σ); 2,000 photographs check it.

axis, north = exact[names == "Alnilam"][0], torch.from_numpy(truth.apply([0, 0, 1]))
west = torch.nn.functional.normalize(torch.linalg.cross(axis, north), dim=0)
frame = torch.stack([torch.linalg.cross(west, axis), west, axis])


def difference(q, reference):
    """The rotation between two attitudes that are close, in arc minutes along `frame`."""
    v, back = q[..., :3], -reference[:3].expand_as(q[..., :3])
    rotation = q[..., 3:] * back + reference[3] * v + torch.linalg.cross(v, back)
    return 2 / ARC_MINUTE * rotation @ frame.mT


jacobian = torch.autograd.functional.jacobian(
    lambda picture: difference(attitude(davenport(picture, catalogue), equal), q), observed
).flatten(1)
covariance = ARC_MINUTE**2 * jacobian @ jacobian.mT
errors = difference(attitude(davenport(photograph(2000), catalogue), equal), true)
predicted, measured = covariance.diagonal().sqrt(), errors.std(0)
print("standard deviations (across, across, roll):", predicted.numpy().round(3), "arc minutes")
print("of 2,000 photographs:", measured.numpy().round(3))
assert (measured / predicted - 1).abs().max() < 0.1  # measuring alone has an error of 1.6 %

# %%
# Five stars taken for others
# ---------------------------
#
# Five stars are mistaken for one another, and the attitude is off by degrees. The weights of stars
# are learnt through the layer, so that stars are near their places, with a few large exceptions.

mistaken = ["Procyon", "Menkar", "Sirius", "Alhena", "Aldebaran"]
wrong = torch.tensor([list(names).index(name) for name in mistaken])
K = davenport(observed, catalogue.index_copy(0, wrong, catalogue[wrong.roll(1)]))
logits = torch.zeros(len(names), requires_grad=True)
optimiser = torch.optim.Adam([logits], lr=0.2)
for _ in range(60):
    weights = logits.softmax(0)
    learnt = attitude(K, weights)
    ((2 - 2 * learnt @ K @ learnt) / (60 * ARC_MINUTE) ** 2).log1p().mean().backward()
    optimiser.step()
    optimiser.zero_grad()
light, lightest = weights.detach().sort()
naive, better = (difference(x.detach(), true).norm() for x in (attitude(K, equal), learnt))
print(f"error of the attitude: {naive / 60:.1f}° with equal weights, {better:.1f}′ learnt")
print(f"largest weight of a mistaken star: {light[4]:.4f}, smallest of the others: {light[5]:.4f}")
assert set(lightest[:5].tolist()) == set(wrong.tolist())
assert better < naive / 30

# %%
# The average of equal rotations
# ------------------------------
#
# The average of quaternions is the top eigenvector of the sum of their outer products. If they are
# equal, the other three eigenvalues are zero, and ``eigh`` divides by their differences.

target = torch.tensor([0.3, -0.2, 0.5, 0.1])  # the gradient is a tenth of its tangent part
same = torch.eye(4)[3].repeat(10, 1).requires_grad_()
M = same.mT @ same
averages = torch.linalg.eigh(M).eigenvectors[:, -1], pmaf.ied(M, reference=3).vectors
theirs, ours = (torch.autograd.grad(y @ target, same, retain_graph=True)[0] for y in averages)
print("gradient of the average: by eigh", theirs[0].numpy(), "here", ours[0].numpy())
assert theirs.isnan().any()
torch.testing.assert_close(ours[0], target / 10 * torch.tensor([1, 1, 1, 0]))

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4), width_ratios=[2, 1], layout="tight")
place = observed @ frame[[1, 0]].mT
for star, other in zip(wrong, wrong.roll(1)):
    left.annotate("", place[other], place[star], arrowprops=dict(arrowstyle="->", color="#D55E00"))
dots = left.scatter(*place.mT, c=weights.detach(), norm="log", edgecolor="0.3", zorder=2)
for name in [*mistaken, "Betelgeuse", "Rigel"]:
    left.text(*place[names == name][0] + 0.03, name, ha="center", fontsize=8)
figure.colorbar(dots, ax=left, label="learnt weight")
left.set(aspect="equal", xticks=[], yticks=[], xlabel="Orion: what five stars were taken for")
right.scatter(*errors[:, 1:].mT, s=3, color="0.7")
turns, half = torch.linspace(0, 2 * torch.pi, 100), torch.linalg.cholesky(covariance[1:, 1:])
ellipse = half @ torch.stack([turns.cos(), turns.sin()])
right.plot(*ellipse[..., None] * torch.arange(1, 4), color="#0072B2")
right.set(aspect="equal", xlabel="error across, arc minutes", ylabel="error of roll, arc minutes")
plt.show()
