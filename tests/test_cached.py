"""Tensors that are kept from call to call are on the CPU, and no capture or stream owns them."""

import pytest
import torch

import pmaf
from pmaf.linalg import sphere
from pmaf.linalg.symmetric_part import fixed_rows, made_there
from pmaf.runtime.cached import CachedOnCPU
from pmaf.solvers.report import without_report

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("cache", "key"),
    [(fixed_rows, (9, torch.float32)), (without_report, (torch.Size((3,)), torch.float32))],
    ids=["fixed_rows", "without_report"],
)
def test_tensors_are_kept_for_the_cpu_alone(cache, key):
    assert cache[*key, CPU] is cache[*key, CPU]
    before = len(cache)
    first, second = cache[*key, META], cache[*key, META]
    assert first is not second
    assert len(cache) == before
    made = first if isinstance(first, tuple) else (first,)
    assert all(x.device == META for x in made)
    assert not any(place.type != "cpu" for *_, place in cache)


def test_directions_of_a_device_are_not_kept():
    sphere.known_references.cache_clear()
    sphere.signs(torch.empty(3, 9, device="meta"))
    assert sphere.known_references.cache_info().currsize == 0
    sphere.signs(torch.ones(3, 9) / 3)
    assert sphere.known_references.cache_info().currsize == 1


def test_directions_of_a_device_are_those_of_the_cpu(monkeypatch):
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    wanted = sphere._references(rows)
    monkeypatch.setattr(sphere, "plain", lambda x: False)
    for x, y in zip(sphere._references(rows), wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_what_is_kept_can_be_differentiated_after_inference():
    fixed_rows.clear()
    with torch.inference_mode():
        assert not fixed_rows[11, torch.float64, CPU].is_inference()


def test_a_cache_does_not_grow_without_limit():
    cache = CachedOnCPU(lambda n, device: torch.zeros(n, device=device))
    for n in range(200):
        assert cache[n, CPU].shape == (n,)
    assert len(cache) <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 50, 1000, 100_000])
def test_directions_that_are_made_on_a_device_have_no_structure(n, dtype):
    x, y = made_there(n, dtype, CPU)
    assert x.dtype == dtype
    assert 0.3 * n < float(x @ x) < 2 * n
    if n >= 50:
        for a, b in ((x, y), (x[1:], x[:-1]), (x[2:], x[:-2])):
            assert abs(float(a @ b)) < max(6 * n**0.5, 0.05 * n)
        peak = torch.fft.rfft(x).abs().amax()
        assert float(peak) < 6 * n**0.5  # no frequency stands out


def test_a_search_from_these_directions_finds_the_same(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    A = torch.randn(300, 300, generator=generator)
    A = A + A.mT
    wanted = pmaf.ied(A, 2)
    monkeypatch.setattr(fixed_rows, "_make", made_there)
    fixed_rows.clear()
    found = pmaf.ied(A, 2)
    fixed_rows.clear()
    torch.testing.assert_close(found.values, wanted.values)
    torch.testing.assert_close(found.vectors, wanted.vectors, atol=1e-4, rtol=0)
