"""
Where did a gravitational wave come from?
=========================================

On 14 August 2017 a gravitational wave reached three detectors: Livingston first, Hanford about 8 ms
and Virgo about 14 ms later (`PRL 119, 141101 <https://doi.org/10.1103/PhysRevLett.119.141101>`_).
Each delay is a linear equation for the direction u of the source: a baseline times u is the speed
of light times the delay. That is two equations for three unknowns, and u must have length one.

The least-squares solution that every library returns does not have length one, so it is no
direction. What is wanted is least squares *on the sphere*. This layer finds a global minimiser,
tells by its ``gap`` that there is another one, and has a derivative, which turns the errors of the
delays into an ellipse in the sky. (Observatories also use amplitudes; here only the clocks speak.)
"""

import ephem.stars
import matplotlib.pyplot as plt
import torch

import pmaf

# %%
# Two equations, three unknowns
# -----------------------------
#
# The positions of the detectors, in metres from the centre of the Earth, are those of LALSuite's
# ``LALDetectors.h``. The sidereal time turns them from Greenwich to the sky.

torch.set_default_dtype(torch.float64)
livingston = torch.tensor([-7.42760447238e4, -5.49628371971e6, 3.22425701744e6])
hanford = torch.tensor([-2.16141492636e6, -3.83469517889e6, 4.60035022664e6])
virgo = torch.tensor([4.54637409900e6, 8.42989697626e5, 4.37857696241e6])
greenwich = ephem.Observer()
greenwich.lon, greenwich.lat, greenwich.date = "0", "51.48", "2017/8/14 10:30:43"
angle = torch.tensor(float(greenwich.sidereal_time()))
turn = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0], [0, 0, 1]])

baselines = torch.stack([livingston - hanford, livingston - virgo]) @ turn.mT
A = baselines / 299_792_458 * 1000  # milliseconds that light takes along them
delays = torch.tensor([8.0, 14.0])
length = (torch.linalg.pinv(A) @ delays).norm()
print(f"least squares without the sphere: a vector of length {length:.3f}")
assert length < 0.95

# %%
# Two directions
# --------------
#
# The ``gap`` of the solution is zero, so it need not be the only one. The other is its mirror image
# in the plane of the detectors, which the clocks cannot tell from it. Where the equations leave a
# choice, ``init`` makes it. The published position (from waveforms and amplitudes: right ascension
# 3 h 11 min, declination −44° 57′) is near one of the two.

up = torch.linalg.cross(*baselines)
sides = torch.stack([up, -up])
solution = pmaf.solve(pmaf.SphereLeastSquares(A, delays.expand(2, 2)), init=sides)
directions = solution.value
residual = (directions @ A.mT - delays).abs().max()
mirror = directions[0] - 2 * (directions[0] @ up) * up / up.square().sum()
assert max(solution.gap.max(), residual, (mirror - directions[1]).abs().max()) < 1e-9


def direction(body):
    body.compute(greenwich.date)
    dec, ra = torch.tensor(body.g_dec), torch.tensor(body.g_ra)
    return torch.stack([dec.cos() * ra.cos(), dec.cos() * ra.sin(), dec.sin()])


published = direction(ephem.readdb("GW170814,f,3:11:00,-44:57:00,0"))
away = torch.rad2deg((directions @ published).acos())
print(f"gap: {solution.gap.max():.0e}; published position {away[0]:.1f}° and {away[1]:.1f}° away")
assert away[0] < 7 < 35 < away[1]

# %%
# Errors of a millisecond
# -----------------------
#
# The Jacobian of the layer turns a circle of errors of the delays into an ellipse around each
# direction. A batch of problems with the delays on that circle shows how far it can be trusted: the
# difference is of second order, but not small at 1 ms. Hanford can be at most 10 ms behind, and
# near that the two directions merge. Beyond it, ``gap`` is positive and one direction fits best.


def locate(delays):
    return pmaf.less(A, delays.expand(2, -1, 2), init=sides[:, None])  # (side, delays, component)


jacobian = torch.autograd.functional.jacobian(lambda d: locate(d[None]).squeeze(1), delays)
turns = torch.linspace(0, 2 * torch.pi, 361)[:, None]
circle = torch.cat([turns.cos(), turns.sin()], -1)


def contours(size):
    """The ellipse of the derivative, and the directions for the same delays."""
    return directions[:, None] + size * circle @ jacobian.mT, locate(delays + size * circle)


bend = [torch.sub(*contours(size)).norm(dim=-1).max() for size in (0.1, 0.05)]
inside = torch.linalg.lstsq(jacobian[0], published - directions[0]).solution.norm()
long, short = torch.linalg.svdvals(jacobian[0]).rad2deg()
print(f"half axes for 1 ms: {long:.1f}°, {short:.1f}°; published position: at {inside:.2f} ms")
assert inside < 0.8
assert 3.5 < bend[0] / bend[1] < 4.5
assert 180 < (pmaf.solve(pmaf.SphereLeastSquares(A, delays + circle)).gap < 1e-9).sum() < 361

# %%
# The sky
# -------
#
# In the bands the delays are as observed, to half a millisecond. Solid lines are the directions for
# delays that differ by 0.5 ms and 1 ms, dashed lines the ellipses.

out = torch.nn.functional.normalize(directions.sum(0), dim=0)
north = torch.nn.functional.normalize(torch.tensor([0, 0, 1.0]) - out[2] * out, dim=0)
frame = torch.stack([torch.linalg.cross(out, north), north, out])  # west is on the right


def project(u):
    """Lambert's projection of equal area, in degrees around the centre of the map."""
    x, y, z = (u.detach() @ frame.mT).unbind(-1)
    return torch.rad2deg(torch.stack([x, y]) * (2 / (1 + z)).sqrt())


x, y = torch.meshgrid(torch.arange(-62, 62.1, 0.3), torch.arange(-50, 50.1, 0.3), indexing="xy")
flat = torch.deg2rad(torch.stack([x, y], -1))
square = flat.square().sum(-1, keepdim=True)
sky = torch.cat([flat * (1 - square / 4).sqrt(), 1 - square / 2], -1) @ frame
hours, degrees = torch.atan2(sky[..., 1], sky[..., 0]).rad2deg() / 15, sky[..., 2].asin().rad2deg()
figure, axes = plt.subplots(figsize=(8, 6.4), layout="constrained")
for values, levels, unit in ((hours, range(10), "%d h"), (degrees, range(-75, 90, 15), "%d°")):
    lines = axes.contour(x, y, values, levels, colors="0.85", linewidths=0.6, linestyles="-")
    lines.clabel(fmt=unit, fontsize=7, colors="0.5")
for row, delay, colour, name in zip(A, delays, ("#0072B2", "#E69F00"), ("Hanford", "Virgo")):
    axes.contourf(x, y, sky @ row, [delay - 0.5, delay + 0.5], colors=[colour], alpha=0.25)
    axes.fill([], [], color=colour, alpha=0.25, label=f"{name} {delay:.0f} ms after Livingston")
for size, width in ((0.5, 1.6), (1.0, 0.8)):
    linear, exact = (project(curve) for curve in contours(size))
    axes.plot(*linear.mT, color="0.3", lw=width, ls="--")
    axes.plot(*exact.mT, color="black", lw=width)
for star in map(ephem.star, ephem.stars.stars):
    if frame[2] @ direction(star) > 0.5:
        axes.scatter(*project(direction(star)), s=30 * 0.6 ** float(star.mag), color="0.4")
for name in ("Achernar", "Canopus", "Rigel", "Sirius", "Betelgeuse", "Aldebaran", "Fomalhaut"):
    axes.text(*project(direction(ephem.star(name))), " " + name, fontsize=8, color="0.4")
axes.scatter(*project(directions), marker="x", color="black", label="the two solutions")
axes.scatter(*project(published), marker="*", s=180, color="#D55E00", zorder=4, label="published")
title = "GW170814 by its arrival times at three detectors"
axes.set(xlim=(-62, 62), ylim=(-50, 50), aspect="equal", xticks=[], yticks=[], title=title)
axes.legend(loc="upper left", fontsize=8)
plt.show()
