"""
Fibre directions with error bars
================================

Water in the brain diffuses along nerve fibres. A diffusion MRI scan measures this in each voxel as
a symmetric 3×3 matrix, the diffusion tensor, whose principal eigenvector is the direction of the
fibres. Tracking follows these directions through the brain, so it matters how certain they are.

Today the answer is a bootstrap: fit hundreds of tensors to resampled data, decompose all of them,
and measure the cone that their directions fill. One may as well propagate the noise through the
eigenvector, if one has its derivative. `pmaf.ied` serves both: it decomposes hundreds of thousands
of small matrices in seconds, and its derivative gives the cone without any resampling. The `gap`
of the solution tells in which voxels the derivative cannot be trusted.

The data are 10×10×10 voxels of a real scan with 64 gradient directions, from the package dipy.
"""

# %%
# The data
# --------
# The logarithm of a signal is linear in the tensor, ``log S = log S₀ − b gᵀDg``, and its noise is
# proportional to ``1/S``. So tensors are fitted by least squares with weights ``S²``.

import importlib.util
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel
import numpy as np
import torch
from matplotlib.patches import Wedge

import pmaf

torch.set_default_dtype(torch.float64)
files = Path(importlib.util.find_spec("dipy").origin).parent / "data" / "files"
volume = nibabel.load(files / "small_64D.nii").get_fdata()
b = torch.tensor(np.loadtxt(files / "small_64D.bval")) / 1000  # ms/µm²
g = torch.tensor(np.loadtxt(files / "small_64D.bvec")).nan_to_num()  # b = 0 has no direction
S = torch.tensor(volume.reshape(-1, len(b))).clamp_min(1.0)  # (voxels, measurements)

i, j = torch.tensor([0, 1, 2, 0, 0, 1]), torch.tensor([0, 1, 2, 1, 2, 2])
twice = torch.tensor([1.0, 1, 1, 2, 2, 2])  # entries off the diagonal occur twice
design = torch.cat([-b.unsqueeze(-1) * g[:, i] * g[:, j] * twice, torch.ones(len(b), 1)], -1)


def tensors(parameters):
    """The matrices `(*, 3, 3)`, in µm²/ms, of parameters `(*, 7)`."""
    D = parameters.new_zeros(*parameters.shape[:-1], 3, 3)
    D[..., i, j] = D[..., j, i] = parameters[..., :6]
    return D


def fit(weights):
    """The matrices `(voxels, 7, measurements)` that map logarithms to parameters."""
    scaled = (design * weights.unsqueeze(-1)).mT
    return torch.linalg.solve(scaled @ design, scaled)


log = S.log().unsqueeze(-1)
solver = fit((design @ fit(S.square()) @ log).squeeze(-1).exp().square())
parameters = (solver @ log).squeeze(-1)

# %%
# Directions
# ----------
# All thousand at once; they are those of `torch.linalg.eigh`.

D = tensors(parameters).requires_grad_()
solution = pmaf.solve(pmaf.PrincipalEigenvectors(D))
direction = solution.value
values, vectors = torch.linalg.eigh(D.detach())
cosine = (direction.detach() * vectors[..., -1]).sum(-1).abs()
assert (cosine[solution.gap > 1e-6] > 1 - 1e-12).all()
spread = (values - values.mean(-1, keepdim=True)).norm(dim=-1)
anisotropy = 1.5**0.5 * spread / values.norm(dim=-1)  # FA, between 0 and 1

# %%
# A cone from the derivative
# --------------------------
# With ``J`` the derivative of the direction in the six entries of the tensor, and ``C`` their
# covariance, the covariance of the direction is ``J C Jᵀ``. Three backward passes give ``J`` for
# all voxels. The noise of a measurement is its residual, corrected for its leverage.

rows = [torch.autograd.grad(direction[:, a].sum(), D, retain_graph=True)[0] for a in range(3)]
J = torch.stack(rows, -3)[..., i, j] * twice
residual = log.squeeze(-1) - parameters @ design.mT
noise = residual / (1 - (solver.mT * design).sum(-1)).sqrt()
C = ((solver * noise.square().unsqueeze(-2)) @ solver.mT)[..., :6, :6]
predicted = (J @ C @ J.mT).diagonal(dim1=-2, dim2=-1).sum(-1).sqrt().rad2deg()

# %%
# A cone from the wild bootstrap
# ------------------------------
# The signs of the residuals are drawn 400 times, which makes 400,000 tensors to decompose.

generator, angles = torch.Generator().manual_seed(0), []
for _ in range(8):
    signs = 2.0 * torch.randint(2, (50, *noise.shape), generator=generator) - 1
    resampled = (solver @ (log + (signs * noise - residual).unsqueeze(-1))).squeeze(-1)
    found = pmaf.ied(tensors(resampled)).vectors
    sine = torch.linalg.cross(found, direction.detach().expand_as(found)).norm(dim=-1)
    angles.append(sine.clamp_max(1).asin().rad2deg())
measured = torch.cat(angles).square().mean(0).sqrt()

# %%
# Do they agree?
# --------------
# The gradient of the difference of the two largest eigenvalues gives the noise of the gap. Where
# the gap is above three times its noise, the derivative is as good as 400 resamples. Below, the
# direction may turn to that of another eigenvector, which no derivative can see.

top = pmaf.ied(D, k=2).values
(slope,) = torch.autograd.grad((top[:, 0] - top[:, 1]).sum(), D)
slope = (slope[..., i, j] * twice).unsqueeze(-2)
trusted = solution.gap > 3 * (slope @ C @ slope.mT).flatten().sqrt()
fibres, ratio = anisotropy > 0.2, predicted / measured
off = ratio.log().abs() > np.log(1.25)
print(f"{int(fibres.sum())} voxels with FA > 0.2: median ratio {ratio[fibres].median():.3f}")
print(f"{int(trusted.sum())} with gap > 3 noise: {int((off & trusted).sum())} differ by 25 %")
print(f"{int((~trusted).sum())} with gap < 3 noise: {int((off & ~trusted).sum())} differ by 25 %")
assert abs(ratio[fibres].median() - 1) < 0.1
assert (off & trusted).sum() < 0.02 * trusted.sum()
assert (off & ~trusted).sum() > 0.1 * (~trusted).sum()

# %%
# Left, one slice: the darker a voxel, the higher its FA. Orange are the voxels that `gap` flags.

BLUE, ORANGE = "#0072B2", "#E69F00"
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
shape, z = volume.shape[:3], 7
left.imshow(anisotropy.reshape(shape)[..., z].mT, cmap="Greys", vmax=1.4, origin="lower")
for voxel, (x, y) in zip(torch.arange(len(S)).reshape(shape)[..., z].flatten(), np.ndindex(10, 10)):
    u, color = direction[voxel].detach(), BLUE if trusted[voxel] else ORANGE
    middle, half = float(torch.atan2(u[1], u[0]).rad2deg()), min(float(predicted[voxel]), 60)
    for ends in ((middle - half, middle + half), (middle - half + 180, middle + half + 180)):
        left.add_patch(Wedge((x, y), 0.1 + 0.4 * float(u[:2].norm()), *ends, color=color, lw=0))
left.set(xticks=[], yticks=[], title="fibre directions and their cones, one slice")
for chosen, color, name in ((~trusted, ORANGE, "gap < 3 noise"), (trusted, BLUE, "gap > 3 noise")):
    cones = measured[chosen], predicted[chosen].detach()
    right.loglog(*cones, ".", color=color, ms=4, alpha=0.7, label=name)
right.axline((1, 1), (10, 10), color="black", lw=0.8, label="equal")
ticks = [2, 5, 10, 20, 50, 100, 200]
right.set_xticks(ticks, map(str, ticks))
right.set_yticks(ticks, map(str, ticks))
right.minorticks_off()
right.set(xlim=(1.5, 90), ylim=(1.5, 300), title="half-angle of the cone, 1,000 voxels")
right.set(xlabel="wild bootstrap, 400 resamples (degrees)", ylabel="implicit derivative (degrees)")
right.legend(frameon=False, markerscale=3)
plt.show()
