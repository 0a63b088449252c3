"""
Training for flat minima
========================

The largest eigenvalue of the Hessian of a training loss, its *sharpness*, limits the step size of
gradient descent and is a suspect when a network does not generalise. The Hessian is too large to
form, but its products with vectors are cheap. Tools such as PyHessian and curvlinops find sharpness
from products, by power iteration or through SciPy, to look at: a number without a gradient.

Here it is the value of a layer whose parameters are the weights of the network. So it has a
gradient in the weights, third derivatives of the loss, and can be a penalty in training.
"""

import matplotlib.pyplot as plt
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, normalize

import pmaf
from pmaf.operators import Hessian
from pmaf.solvers import Krylov

# %%
# A network of 4,810 weights
# --------------------------
#
# It reads the digits of scikit-learn. Its activation is tanh, because third derivatives have to
# exist. Labels are smoothed; otherwise the loss would vanish in the end, and its Hessian with it.

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(0)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(labels), generator=generator)
train, test = order[:600], order[600:]
shapes = [(64, 64), (64, 1), (10, 64), (10, 1)]
sizes = [rows * columns for rows, columns in shapes]
n = sum(sizes)


def network(weights, images):
    A, a, B, b = (part.reshape(shape) for part, shape in zip(weights.split(sizes), shapes))
    return (B @ torch.tanh(A @ (images.mT / 16) + a) + b).mT


def loss(weights):
    return cross_entropy(network(weights, images[train]), labels[train], label_smoothing=0.1)


def accuracy(weights):
    return (network(weights, images[test]).argmax(-1) == labels[test]).double().mean().item()


def sharpness(weights, **options):
    problem = pmaf.PrincipalEigenvectors(Hessian(loss, weights))
    return pmaf.solve(problem, **options)


def train_from(weights, steps, penalty=0.0, every=1):
    weights, history = weights.clone().requires_grad_(), []
    optimiser = torch.optim.Adam([weights], lr=0.005)
    for step in range(steps):
        objective = loss(weights)
        if step % every == 0:
            top = sharpness(weights, solver=Krylov(tolerance=1e-6)).multiplier
            history.append((step, top.item()))
            objective = objective + penalty * top
        optimiser.zero_grad()
        objective.backward()
        optimiser.step()
    return weights.detach(), history


start = torch.cat([torch.randn(size, generator=generator) / 8 for size in sizes])
start, _ = train_from(start, 200, every=200)

# %%
# The value, its gradient, and what they cost
# -------------------------------------------
#
# SciPy's ``eigsh`` judges both, the gradient by central differences along random directions. After
# a step of training a *warm* start, from the last eigenvector, takes fewer iterations. But each of
# them multiplies two vectors, the second to notice if another eigenvalue has become the largest. It
# pays where two products cost little more than one; here they cost twice as much, so we start cold.


def by_scipy(weights):
    hessian = Hessian(loss, weights)

    def matvec(u):
        return hessian @ torch.from_numpy(u).reshape(n)

    return eigsh(LinearOperator((n, n), matvec, dtype=float), 1, which="LA")[0].item()


weights = start.clone().requires_grad_()
solution = sharpness(weights)
solution.multiplier.backward()
value_error = abs(solution.multiplier.item() / by_scipy(start) - 1)
directions = 1e-3 * normalize(torch.randn(3, n, generator=generator))
slopes = torch.tensor([(by_scipy(start + d) - by_scipy(start - d)) / 2 for d in directions])
gradient_error = (directions @ weights.grad - slopes).norm() / slopes.norm()
print(f"sharpness {solution.multiplier:.4f}, relative error {value_error:.0e}")
print(f"its gradient along random directions, relative error {gradient_error:.0e}")
assert value_error < 1e-10
assert gradient_error < 1e-5

moved = start - 0.005 * weights.grad.sign()
iterations = []
for name, init in (("cold", None), ("warm", solution.value.detach())):
    iterations.append(sharpness(moved, init=init).iterations.item())
    print(f"{name} start: {iterations[-1]} iterations")
assert iterations[1] < iterations[0]

# %%
# With and without the penalty
# ----------------------------
#
# Both networks read equally well. On the right, the loss along the sharpest direction of each.

sharp, before = train_from(start, 60, every=10)
flat, after = train_from(start, 60, penalty=0.05)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
distance, ends = torch.linspace(-0.8, 0.8, 61), []
for weights, history, colour, label in (
    (sharp, before, "#D55E00", "loss alone"),
    (flat, after, "#0072B2", "with the penalty"),
):
    top = sharpness(weights)
    ends.append((top.multiplier.item(), accuracy(weights)))
    label = f"{label}: {accuracy(weights):.1%} right"
    left.plot(*zip(*history, (60, ends[-1][0])), color=colour, label=label)
    right.plot(distance, [loss(weights + d * top.value) for d in distance], color=colour)
left.set(xlabel="step of training", ylabel="largest eigenvalue of the Hessian", ylim=(0, None))
right.set(xlabel="distance along its eigenvector", ylabel="training loss")
left.legend()
plt.show()

(sharpness_alone, accuracy_alone), (sharpness_with, accuracy_with) = ends
print(f"sharpness {sharpness_alone:.2f} without the penalty, {sharpness_with:.2f} with it")
print(f"accuracy on {len(test)} other images: {accuracy_alone:.3f} and {accuracy_with:.3f}")
assert sharpness_with < 0.5 * sharpness_alone
assert accuracy_with > accuracy_alone - 0.01
