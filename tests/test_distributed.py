"""Matrices and batches spread over ranks: what a single process finds, on every one of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ranks

pytestmark = pytest.mark.xdist_group("ranks")


# Four processes take minutes on two cores.
@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)], ids="{} ranks".format
)
def found(request):
    return ranks.on_ranks(request.param, ranks.all_cases)


@pytest.mark.parametrize("case", [*ranks.ROWS, *ranks.BATCHES], ids=lambda case: case.__name__)
def test_solutions_and_gradients_are_those_of_one_process(found, case):
    wanted = case(None)
    for rank in found:
        assert len(rank[case.__name__]) == len(wanted)
        for x, y in zip(rank[case.__name__], wanted):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11 * float(y.abs().max()))


@pytest.mark.parametrize("case", [*ranks.ROWS, *ranks.BATCHES], ids=lambda case: case.__name__)
def test_every_rank_has_the_same_to_the_last_bit(found, case):
    first, *others = (rank[case.__name__] for rank in found)
    for other in others:
        for x, y in zip(first, other):
            assert torch.equal(x, y)


def test_models_in_data_parallel_training():
    wanted = ranks.trained(ranks.Net(), ranks.randn(8, 9, 6))
    for rank in ranks.on_ranks(2, ranks.wrapped):
        for name in ("DDP", "FSDP"):
            for x, y in zip(rank[name], wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_a_product_sends_one_vector_and_nothing_else():
    (first, _) = ranks.on_ranks(2, ranks.collectives)
    names = {name for name, count in first["counts"].items() if count}
    assert all("allreduce" in name.replace("_", "") for name in names), names
    products = first["products"]
    # The rest are decisions: every rank has to take the same.
    assert products <= sum(first["counts"].values()) <= 2 * products


def test_a_pair_sends_vectors_and_no_matrix():
    (names, most), _ = ranks.on_ranks(2, ranks.collectives_of_a_pair)
    assert names
    # A vector and its padding, for the few that one product takes at a time.
    assert 30 <= most <= 2 * 60


def test_certificates_of_pairs_are_the_same_on_all_ranks():
    for good, bad, feasibility in ranks.on_ranks(2, ranks.certified_pair):
        assert good
        assert not bad
        assert float(feasibility) == pytest.approx(1.01**2 - 1, rel=1e-10)


def test_a_metric_that_is_not_positive_is_an_error_on_all():
    messages = ranks.on_ranks(2, ranks.indefinite)
    assert all("M is not positive definite" in text for text in messages), messages


def test_memory_falls_with_the_number_of_ranks():
    alone, two, four = (max(ranks.on_ranks(world, ranks.memory)) for world in (1, 2, 4))
    assert two < 0.55 * alone
    assert four < 0.3 * alone


def test_a_number_that_is_not_finite_on_one_rank_is_an_error_on_all():
    messages = ranks.on_ranks(2, ranks.poisoned)
    assert all("not finite" in text or "non-finite" in text for text in messages), messages


def test_a_transpose_that_is_wrong_on_one_rank_is_an_error_on_all():
    messages = ranks.on_ranks(2, ranks.mistaken)
    assert all("is not the transpose" in text for text in messages), messages


def test_entries_are_computed_where_products_do_not_do():
    wanted = ranks.ill_conditioned(None)
    first, second = ranks.on_ranks(2, ranks.ill_conditioned)
    # Sums over ranks round differently, and the condition of A, 3,000, makes more of that.
    for x, y, z in zip(first, second, wanted):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z, rtol=0, atol=0.05 * float(z.abs().max()))


def test_a_rank_that_dies_is_an_error_on_the_others():
    *others, last = ranks.on_ranks(3, ranks.deserted)
    assert last is None
    assert all(others)


def test_a_collective_that_takes_too_long_is_an_error_everywhere():
    assert all(ranks.on_ranks(2, ranks.held_up, timeout=3))


def test_the_example_learns_what_hides():
    script = Path(__file__).parent.parent / "examples" / "distributed_pca.py"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    run = subprocess.run(
        [*launch, str(script), "--rows", "4000", "--features", "20", "--steps", "8"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    first, *_, last = (line for line in run.stdout.splitlines() if line.startswith("step"))
    assert float(first.split()[3]) < 0.1
    assert float(last.split()[3]) > 0.9
