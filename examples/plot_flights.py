"""
Which flight matters to Denver?
===============================

PageRank is the dominant eigenvector of a matrix that is not symmetric: with probability 0.85 a
passenger takes one of the flights from where she is, with probability 0.15 she turns up at an
airport drawn at random. Every graph library computes it. How it *depends* on the graph, none of
them says; to learn what a route is worth, people delete it and rank again, 9,161 times.

Here the eigenvector is a layer, and one backward pass gives the derivative of Denver's rank in the
weights of all routes at once; it agrees with deletion. The data are the domestic U.S. routes of
July 2026 of twelve airlines (Bureau of Transportation Statistics, from ``bokeh_sampledata``).
"""

import time

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import torch
from bokeh_sampledata.airport_routes import airports, routes
from bokeh_sampledata.us_states import data as states
from matplotlib.collections import LineCollection
from matplotlib.colors import SymLogNorm
from scipy.stats import spearmanr

import pmaf
from pmaf.operators import LowRank, Sparse

torch.set_default_dtype(torch.float64)
codes, ends = np.unique(routes[["Source", "Destination"]], return_inverse=True)
ends = torch.from_numpy(ends.reshape(-1, 2))
n, denver = len(codes), list(codes).index("DEN")

# %%
# Rank as a function of the weights of the routes
# -----------------------------------------------
#
# A column of the sparse matrix says where one goes from an airport, in proportion to the weights
# of its routes; the division by their sum is a part of what is differentiated. Airports without
# departures ("dangling" ones) lead anywhere, as in networkx. All jumps are one matrix of rank one.


def pagerank(weights, ends):
    total = torch.zeros(n).index_add(0, ends[:, 0], weights)
    share, places = weights / total[ends[:, 0]], ends.flip(1).mT
    links = torch.sparse_coo_tensor(places, share, (n, n), check_invariants=True)
    jumps = LowRank(torch.full((1, n), 1 / n), torch.where(total > 0, 0.15, 1.0)[None])
    rank = pmaf.ied(0.85 * Sparse(links.coalesce()) + jumps, symmetric=False).vectors
    return rank / rank.sum()


def networkx_rank(graph):
    return torch.tensor(list(nx.pagerank(graph, tol=1e-13, max_iter=1000).values()))


weights = torch.ones(len(routes), requires_grad=True)
start = time.perf_counter()
rank = pagerank(weights, ends)
rank[denver].backward()
seconds = time.perf_counter() - start

edges = [(*pair, key) for key, pair in enumerate(ends.tolist())]
graph = nx.MultiDiGraph()
graph.add_nodes_from(range(n))
graph.add_edges_from(edges)
expected = networkx_rank(graph)
error = (rank - expected).abs().max()
alaska = torch.tensor(list(routes.Airline == "AS"))  # airports dangle that it does not serve
only = nx.restricted_view(graph, [], [edge for edge in edges if not alaska[edge[2]]])
dangling = pagerank(torch.ones(int(alaska.sum())), ends[alaska]) - networkx_rank(only)
print(f"largest difference to networkx: {error:.0e}; one airline: {dangling.abs().max():.0e}")
assert max(error, dangling.abs().max()) < 1e-9

# %%
# Deleting routes, one by one
# ---------------------------
#
# Removing one of an airport's d routes raises the shares of the others from 1/d to 1/(d − 1). The
# derivative is that of the first sliver of weight; for the whole route the change of the matrix is
# d/(d − 1) times as large. (If d = 1, the derivative is zero: whatever the weight of the only
# route, everybody takes it. So the 300 routes to delete are drawn from the others.)

departures = torch.bincount(ends[:, 0], minlength=n)[ends[:, 0]]
worth = weights.grad * departures / (departures - 1).clamp(min=1)
sample = np.random.default_rng(0).choice(np.flatnonzero(departures > 1), 300, replace=False)
start, lost = time.perf_counter(), []
for route in sample.tolist():
    graph.remove_edge(*edges[route])
    lost.append((expected - networkx_rank(graph))[denver].item())
    graph.add_edge(*edges[route])
minutes = (time.perf_counter() - start) / 60
agreement, scaled = spearmanr(weights.grad[sample], lost)[0], spearmanr(worth[sample], lost)[0]
print(f"Spearman's correlation with 300 deletions: {agreement:.4f}; with d/(d − 1): {scaled:.6f}")
print(f"all {len(routes):,} derivatives: {seconds:.2f} s; 300 deletions: {minutes:.1f} min")
assert 0.99 < agreement < scaled

# %%
# The map
# -------
#
# Flights to Denver are worth something to Denver; that is no news, and these are grey. The others
# bend to the right of their direction. Towns with two departures, one of them to Denver, hold the
# extremes: Roswell (ROW) to Dallas costs Denver three times what a flight to Denver is worth.

percent = (100 * worth / rank[denver].item()).numpy()
there, elsewhere = (ends[:, 1] == denver).numpy(), (ends != denver).all(1).numpy()
print(f"a flight to Denver, in the median: {np.median(percent[there]):+.2f} % of its rank")
order = np.argsort(np.where(elsewhere, percent, 0))
for route in order[[0, 1, 2, -3, -2, -1]]:
    print(f"{routes.Source[route]} → {routes.Destination[route]}: {percent[route]:+.2f} %")
assert (departures[order[:5]] == 2).all()
assert percent[order[0]] < -3 * np.median(percent[there])


def albers(longitude, latitude):
    """The conic projection of equal area that most maps of the United States use."""
    south, north = np.sin(np.radians([29.5, 45.5]))  # where distances are true
    cone = (south + north) / 2
    radius = np.sqrt(1 + south * north - 2 * cone * np.sin(np.radians(latitude))) / cone
    angle = cone * np.radians(longitude + 96)
    return np.stack([radius * np.sin(angle), -radius * np.cos(angle)], -1)


at = albers(*airports.set_index("IATA").loc[codes, ["Longitude", "Latitude"]].to_numpy().T)
begin, end = at[ends].swapaxes(0, 1)[..., None, :]
bent = (begin + end) / 2 + (end - begin)[..., ::-1] * [0.1, -0.1]
t = np.linspace(0, 1, 20)[:, None]
curves = (1 - t) ** 2 * begin + 2 * t * (1 - t) * bent + t**2 * end

figure, axes = plt.subplots(figsize=(8, 5.8), layout="constrained")
for code in set(states) - {"AK", "HI"}:
    axes.plot(*albers(states[code]["lons"], states[code]["lats"]).T, color="0.8", lw=0.6)
axes.add_collection(LineCollection(curves[there], colors="0.85", lw=0.6))
colour = plt.cm.ScalarMappable(SymLogNorm(0.01, vmin=-0.3, vmax=0.3), "PuOr_r")
shown = [e for e in np.argsort(np.abs(percent)) if elsewhere[e] and abs(percent[e]) > 0.015]
strength = np.abs(percent[shown]).clip(max=0.08) / 0.08
shades = colour.to_rgba(percent[shown], alpha=0.25 + 0.75 * strength)
axes.add_collection(LineCollection(curves[shown], lw=0.3 + 1.3 * strength, colors=shades))
axes.scatter(*at.T, s=5000 * rank.detach(), color="white", edgecolor="0.2", lw=0.7, zorder=3)
style = dict(ha="center", fontsize=8, bbox=dict(fc="white", ec="none", pad=0.4, alpha=0.8))
for code in ["DEN", "ORD", "DFW", "ATL", "PHX", "LAX", "SEA", "MSP", "SLC", "CLT", "ROW"]:
    axes.text(*at[codes == code][0] + [0, 0.013], code, **style)
axes.set(xlim=(-0.385, 0.365), ylim=(-1.545, -1.035), aspect="equal")
axes.set_title("What routes that do not touch Denver are worth to Denver")
axes.axis("off")
bar = figure.colorbar(colour, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.01)
bar.set_ticks(ticks := [-0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3], labels=ticks)
bar.set_label("what Denver's PageRank would lose with the route, %")
plt.show()
