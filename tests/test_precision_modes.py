"""TF32 and bfloat16 in float32 products do not reach the layers, and the user's setting stays."""

import itertools
import threading

import pytest
import torch

from pmaf.runtime import precision
from pmaf.runtime.modes import full_precision

CPU = torch.device("cpu")
BACKENDS = ("cuda", "mkldnn")
PLACES = [("generic", "all")] + [(x, op) for x in BACKENDS for op in ("all", "matmul")]
read = torch._C._get_fp32_precision_getter
write = torch._C._set_fp32_precision_setter


def legacy():
    """What `torch.get_float32_matmul_precision()` says; None where it complains of a mixture."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def state():
    """All that can be read of the settings, after each change of those that others inherit."""
    found = [legacy(), *(read(*place) for place in PLACES)]
    every = read("generic", "all")
    wholes = [read(backend, "all") for backend in BACKENDS]
    for other in ("ieee", "tf32", "none"):
        write("generic", "all", other)
        found += [read(*place) for place in PLACES]
    write("generic", "all", every)
    assert [read(backend, "all") for backend in BACKENDS] == wholes
    return found


def is_exact():
    reduced = any(read(backend, "matmul") not in ("none", "ieee") for backend in BACKENDS)
    return legacy() == "highest" and not reduced and not torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(autouse=True)
def usual():
    yield
    write("generic", "all", "none")
    for backend in BACKENDS:
        write(backend, "all", "none")
    torch.set_float32_matmul_precision("highest")
    for backend in BACKENDS:
        write(backend, "matmul", "none")
    assert not precision.is_reduced()


def by_attribute(path, value):
    *names, last = path.split(".")

    def change():
        place = torch.backends
        for name in names:
            place = getattr(place, name)
        setattr(place, last, value)

    return change


SETTINGS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": by_attribute("cuda.matmul.allow_tf32", True),
    "cuda.matmul": by_attribute("cuda.matmul.fp32_precision", "tf32"),
    "cudnn": by_attribute("cudnn.fp32_precision", "tf32"),
    "all tf32": by_attribute("fp32_precision", "tf32"),
    "all bf16": by_attribute("fp32_precision", "bf16"),
    "mkldnn.matmul bf16": by_attribute("mkldnn.matmul.fp32_precision", "bf16"),
    "mkldnn.matmul tf32": by_attribute("mkldnn.matmul.fp32_precision", "tf32"),
}
OTHERS = {
    "": lambda: None,
    "all ieee": by_attribute("fp32_precision", "ieee"),
    "all none": by_attribute("fp32_precision", "none"),
    "cudnn ieee": by_attribute("cudnn.fp32_precision", "ieee"),
    "cuda.matmul ieee": by_attribute("cuda.matmul.fp32_precision", "ieee"),
    "cuda.matmul none": by_attribute("cuda.matmul.fp32_precision", "none"),
    "mkldnn.matmul ieee": by_attribute("mkldnn.matmul.fp32_precision", "ieee"),
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
}
MIXED = list(itertools.product(SETTINGS, (*OTHERS, *SETTINGS)))
BOTH = {**OTHERS, **SETTINGS}


@pytest.mark.parametrize(("first", "then"), MIXED)
@pytest.mark.parametrize("order", [1, -1], ids=["", "swapped"])
def test_every_mixture_of_settings_is_exact_inside_and_comes_back(first, then, order):
    for name in (first, then)[::order]:
        BOTH[name]()
    before = state()
    assert is_exact() or precision.is_reduced()
    with full_precision(CPU):
        assert is_exact()
        with full_precision(CPU):
            assert is_exact()
        assert is_exact()
    assert state() == before


def test_the_usual_settings_are_not_touched(monkeypatch):
    monkeypatch.setattr(precision, "_taken", None)
    before = state()
    with full_precision(CPU):
        assert state() == before
    assert not precision.is_reduced()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_setting_comes_back_after_an_exception(setting):
    SETTINGS[setting]()
    before = state()
    with pytest.raises(KeyError), full_precision(CPU):
        raise KeyError
    assert state() == before


def test_autocast_is_off_as_well():
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision(CPU):
            assert is_exact()
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_float32_matmul_precision() == "high"


def test_the_last_thread_brings_the_setting_back():
    torch.set_float32_matmul_precision("medium")
    before, inside, leave, left = state(), threading.Barrier(2), threading.Event(), []

    def second():
        with full_precision(CPU):
            inside.wait(60)
            assert leave.wait(60)
            left.append(is_exact())

    thread = threading.Thread(target=second)
    with full_precision(CPU):
        thread.start()
        inside.wait(60)
    assert is_exact()  # the other thread is still inside
    with full_precision(CPU):  # and a third call enters while nothing seems to be reduced
        leave.set()
        thread.join(60)
        assert is_exact()
    assert left == [True]
    assert state() == before


def test_many_threads_come_and_go():
    torch.set_float32_matmul_precision("high")
    before, wrong = state(), []

    def work():
        for _ in range(300):
            with full_precision(CPU):
                if read("cuda", "matmul") != "ieee":
                    wrong.append(read("cuda", "matmul"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert state() == before


def test_what_somebody_sets_meanwhile_stays():
    torch.set_float32_matmul_precision("high")
    with full_precision(CPU):
        torch.set_float32_matmul_precision("medium")
    assert torch.get_float32_matmul_precision() == "medium"
    with full_precision(CPU):
        SETTINGS["mkldnn.matmul tf32"]()
    assert read("mkldnn", "matmul") == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_the_setting_of_intel_graphics_cards_is_taken_away_and_comes_back(monkeypatch):
    setting = [True]
    monkeypatch.setattr(precision, "HAS_XPU", True)
    monkeypatch.setattr(precision, "onednn_tf32", lambda: setting[0])
    monkeypatch.setattr(torch._C, "_set_onednn_allow_tf32", lambda x: setting.__setitem__(0, x))
    assert precision.is_reduced()
    with full_precision(CPU):
        assert setting == [False]
    assert setting == [True]
