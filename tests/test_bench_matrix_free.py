"""What the benchmarks of solves by products measure, and what they make of it."""

import dataclasses

import pytest
import torch

from pmaf_lab.bench.graphs import Graphs, random_graph
from pmaf_lab.bench.pca import PrincipalComponents, factors
from pmaf_lab.experiments import Row

CPU = torch.device("cpu")
TINY = {"graphs": (Graphs(), 2_000), "pca": (PrincipalComponents(), [60, 40])}


@pytest.mark.parametrize("family", ["adjacency", "PageRank", "Gram", "centred"])
def test_everybody_is_asked_the_same_and_answers(family):
    graph = family in Graphs.families
    experiment, size = TINY["graphs" if graph else "pca"]
    found = experiment.measure(CPU, family=family, size=size)
    ours = found["ours"]
    assert ours["forward"] > 0
    assert ours["backward"] > 0
    assert ours["products"] > 1
    assert 1 < ours["products warm"] <= ours["products"]
    assert ours["residual"] < 1e-5
    others = {name: found[name] for name in experiment.others if name in found}
    assert others
    for name, entry in others.items():
        # Randomised and preconditioned methods stop early, by design.
        assert entry["residual"] < (0.2 if "random" in name or name == "lobpcg" else 1e-5), name
    assert found["leaf"] == experiment.question(family, size).leaf.numel() * 4


def test_a_residual_is_that_of_the_question():
    question = Graphs().question("adjacency", 2_000)
    _, degrees = random_graph(2_000)
    assert question.residual(degrees.sqrt().numpy()) < 1e-6  # its top vector, by construction
    assert question.residual(torch.randn(200, generator=torch.Generator())) > 0.1


def test_a_graph_is_symmetric_and_connected():
    index, degrees = random_graph(5_000)
    n = len(degrees)
    A = torch.zeros(n, n)
    A[index[0], index[1]] = 1
    assert torch.equal(A, A.T)
    assert torch.equal(A.sum(0), degrees)
    laplacian = torch.diag(degrees) - A
    assert float(torch.linalg.eigvalsh(laplacian.double())[1]) > 1e-3
    assert 0.9 * 5_000 < index.shape[1] <= 5_000


def test_factors_stand_out_of_the_noise():
    values = torch.linalg.svdvals(factors(400, 100) - factors(400, 100).mean(0))
    assert values[0] > 1.3 * values[20]


def _row(family, size, ours, other, residual=1e-7, name="eigsh"):
    mine = {"forward": ours, "backward": 2 * ours}
    mine |= {"products": 9, "products warm": 4, "products backward": 8}
    values = {
        "ours": {**mine, "residual": 1e-7},
        name: {"forward": other, "residual": residual},
        "peak": 5_000,
        "leaf": 1_000,
    }
    return Row({"family": family, "size": size}, "done", values)


def test_slopes_and_margins_are_what_was_measured():
    rows = [_row("adjacency", 10**k, 1e-6 * 10**k, 3e-6 * 10**k) for k in (3, 4, 5)]
    section = Graphs().present(rows)
    slopes = [finding for finding in section.findings if "power" in finding.claim]
    assert [finding.found for finding in slopes] == ["1.00", "1.00"]
    assert all(finding.holds for finding in slopes)
    (margin,) = [f for f in section.findings if "adjacency, fastest" in f.claim]
    assert margin.found == "eigsh takes 3.00× our time at 1,000"
    assert margin.holds
    steep = [_row("adjacency", 10**k, 10 ** (1.5 * k), 1e9) for k in (3, 4, 5)]
    assert not Graphs().present(steep).findings[0].holds


def test_who_is_faster_is_not_hidden_and_who_is_wrong_does_not_count():
    slow = _row("adjacency", 1_000, 1.0, 0.5)
    (margin,) = [f for f in Graphs().present([slow]).findings if "adjacency, fastest" in f.claim]
    assert margin.found == "eigsh takes 0.50× our time at 1,000"
    assert margin.holds is False
    wrong = _row("adjacency", 1_000, 1.0, 0.5, residual=1e-3)
    (margin,) = [f for f in Graphs().present([wrong]).findings if "adjacency, fastest" in f.claim]
    assert margin.found == "none is as accurate"


def test_what_could_not_take_part_is_noted():
    row = _row("adjacency", 1_000, 1.0, 2.0)
    values = {**row.values, "lobpcg": {"skipped": "RuntimeError: no"}}
    section = Graphs().present([dataclasses.replace(row, values=values)])
    assert section.notes == ["lobpcg: RuntimeError: no."]
    ((_, line),) = section.tables[0].frame.iterrows()
    assert [line["ours", part] for part in ("products", "warm", "backward")] == [9, 4, 8]
    assert line["forward ÷ ours", "eigsh"] == "2.00"
    assert line["forward ÷ ours", "lobpcg"] is None


def test_memory_is_that_of_the_process_beyond_data_and_gradient():
    row = _row("Gram", [10, 25], 1.0, 2.0, name="TruncatedSVD arpack")
    (memory, *_) = PrincipalComponents().present([row]).findings
    assert memory.found == "0.00 GB"
    assert memory.holds
    values = {**row.values, "peak": 3_000_002_000}
    (memory, *_) = PrincipalComponents().present([dataclasses.replace(row, values=values)]).findings
    assert memory.found == "3.00 GB"
    assert not memory.holds


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_figure_is_drawn(name):
    from pmaf_lab.experiments.plots import DARK, LIGHT, drawn, picture

    rows = [
        _row(family, 10**k, 1e-6 * 10**k, 3e-6 * 10**k)
        for family in Graphs.families
        for k in (3, 4, 5)
    ]
    (figure,) = Graphs().present(rows).figures
    theme = LIGHT if name == "light" else DARK
    with drawn(theme):
        drawing = figure.draw(theme)
        assert picture(drawing, "png").startswith(b"\x89PNG")
    labels = [text.get_text() for axes in drawing.axes for text in axes.get_legend().get_texts()]
    assert "ours, forward (slope 1.00)" in labels
