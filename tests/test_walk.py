"""No call walks further through the library than `tests.walk.BUDGETS` allows."""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import pmaf
from pmaf import native
from tests import walk
from tests.walk import BUDGETS, CALLS, MOST, NAMED, Budget, Counted, Tracer, Walk

# Without kernels other solvers run.
kernels = pytest.mark.skipif(not native.available, reason="the budgets are those of the kernels")


@kernels
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_no_call_walks_further_than_its_budget(call):
    found = walk.count(call)
    wanted = Budget(found.forward.calls, found.backward.calls, found.files)
    over = [name for name in Budget._fields if getattr(wanted, name) > getattr(call.allowed, name)]
    assert not over, f"{wanted} of {call.allowed}; python -m tests.walk shows all of them"


def test_every_call_has_a_budget_and_every_budget_a_call():
    assert len(NAMED) == len(CALLS)
    assert list(BUDGETS) == list(NAMED)


def test_the_house_does_not_grow():
    found = asdict(walk.house())
    over = {name: found[name] for name, most in MOST.items() if found[name] > most}
    assert not over, over
    assert set(found) == {*MOST, "lines"} == set(walk.MEANINGS)


def test_only_calls_into_the_library_count():
    def outside():
        return pmaf.operators.Diagonal(torch.ones(3)).shape

    with Tracer() as tracer:
        outside()
    assert tracer.walk.calls > 0
    assert set(tracer.walk.files) <= {"operators/base.py", "operators/diagonal.py", "errors.py"}
    again = tracer.walk
    outside()
    assert tracer.walk == again


def test_a_generator_and_a_comprehension_count_once(monkeypatch, tmp_path):
    """Newer versions of Python have no frames for comprehensions."""
    file = tmp_path / "room.py"
    source = """
    def numbers():
        yield from (x for x in range(9))

    def several():
        return [x for x in numbers()] + list({x: 1 for x in numbers()})
    """
    room = {}
    exec(compile("if True:" + source, str(file), "exec"), room)
    monkeypatch.setattr(walk, "LIBRARY", tmp_path)
    with Tracer() as tracer:
        room["several"]()
    assert tracer.walk == Walk(3, ("room.py",), 0)


def test_changes_of_file_are_those_between_calls(monkeypatch, tmp_path):
    rooms = {}
    for name in ("first", "second"):
        exec(
            compile(f"def {name}(*then): [f() for f in then]", str(tmp_path / name), "exec"), rooms
        )
    monkeypatch.setattr(walk, "LIBRARY", tmp_path)
    first, second = rooms["first"], rooms["second"]
    with Tracer() as tracer:
        first(second, second, first, second)
    assert tracer.walk == Walk(5, ("first", "second"), 3)


def test_the_profiler_of_others_stays():
    def other(*_):
        pass

    sys.setprofile(other)
    try:
        with contextlib.suppress(ZeroDivisionError), Tracer():
            raise ZeroDivisionError
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)


def test_the_backward_pass_is_seen():
    found = walk.count(NAMED["less ball"])
    assert found.backward.calls > 1
    assert found.files >= len(found.backward.files)


def test_a_count_that_changes_is_shown_beside_the_earlier_one():
    counted = Counted(Walk(7, ("a", "b"), 3), Walk(2, ("b", "c"), 1))
    numbers = walk.numbers_of({"less": counted})
    assert json.loads(json.dumps(numbers)) == numbers
    assert "| less | 7 / 2 / 3 | 2 / 2 / 1 | 3 |" in walk.table(numbers)
    earlier = json.loads(json.dumps(numbers))
    earlier["calls"]["less"]["forward"]["calls"] = 70
    earlier["house"]["kept"] += 1
    found = walk.table(numbers, earlier)
    assert "| less | 70 / 2 / 3 → 7 / 2 / 3 | 2 / 2 / 1 | 3 |" in found
    kept = numbers["house"]["kept"]
    assert f"| {walk.MEANINGS['kept']} | {kept + 1} → {kept} |" in found
    assert walk.table(numbers, {"calls": {}, "house": {}}) == walk.table(numbers)


def test_the_command_prints_and_saves_the_table(tmp_path):
    file = tmp_path / "walk.json"
    words = [sys.executable, "-W", "error", "-m", "tests.walk", "less", "ied"]
    ended = subprocess.run(
        [*words, "--json", str(file)], capture_output=True, text=True, check=True
    )
    numbers = json.loads(file.read_text())
    assert list(numbers["calls"]) == ["less", "ied"]
    assert ended.stdout == walk.table(numbers)
    ended = subprocess.run([*words, "--budgets"], capture_output=True, text=True, check=True)
    found = numbers["calls"]["ied"]
    calls = ", ".join(str(found[part]["calls"]) for part in ("forward", "backward"))
    assert f'    "ied": Budget({calls}, {found["files"]}),\n' in ended.stdout
