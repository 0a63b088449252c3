"""Every kind of call on the pretend device: its budget, its results, and no meeting of devices."""

import pytest
import torch

from tests import pretend
from tests.devices import NO_BUDGET, PAGE, ROWS, Numbers, Row, recorded, run, table_of

NOW = recorded()


@pytest.mark.parametrize("row", ROWS, ids=lambda x: x.name)
def test_a_call_keeps_its_budget_and_agrees_with_the_cpu(row):
    """An error says where two devices meet, or what the device lacks."""
    result = run(row, beside=False)
    if result.error is not None:
        raise result.error
    assert result.agrees, f"differs by {result.differs:.0e}, rounding by {result.allowed:.0e}"
    assert result.numbers.within(limit(row)), (
        f"launches / waits; backward: {result.numbers}, of at most {limit(row)}. "
        f"`python -m tests.devices --only '{row.name}' --lines 9` names their lines"
    )


def limit(row: Row) -> Numbers:
    """The budget, or a tenth more than the recorded numbers, in which searches may take."""
    now = NOW.get(row.name)
    if now is None:
        return row.budget
    more = (None if x is None else x + x // 10 for x in now)
    if row.budget == NO_BUDGET:
        return Numbers(*more)
    # A number that is within the budget has to stay there.
    return Numbers(
        *(
            most if most is None or x is None or x <= most else x + x // 10
            for x, most in zip(now, row.budget)
        )
    )


def test_the_record_has_only_rows_that_need_it():
    names = {x.name: x for x in ROWS}
    assert len(names) == len(ROWS)
    for name, now in NOW.items():
        assert name in names, f"{name} is no row"
        budget = names[name].budget
        assert budget == NO_BUDGET or not now.within(budget), f"{name} is within its budget"
    assert all(x.name in NOW for x in ROWS if x.budget == NO_BUDGET)


def test_the_table_of_the_page_is_that_of_the_record():
    written = table_of(PAGE.read_text())
    assert [name for name, _ in written] == [x.name for x in ROWS]
    for (name, numbers), row in zip(written, ROWS):
        if name in NOW:
            assert numbers == NOW[name], f"{name}: run `python -m tests.devices --record --write`"
        else:
            assert numbers.within(row.budget), f"{name}: run `python -m tests.devices --write`"


@pytest.mark.parametrize("name", ["less 100×16×8 c64", "ied 8×8 f32", 'spectral "sqrt" 1000×8×8'])
def test_with_the_device_as_default(name):
    (row,) = (x for x in ROWS if x.name == name)
    result = run(row, default=True, beside=False)
    if result.error is not None:
        raise result.error
    assert result.agrees
    assert result.numbers.within(limit(row))


def test_what_a_row_has_is_on_the_cpu():
    for row in ROWS:
        assert all(type(x) is torch.Tensor and x.is_cpu for x in row.make())


def test_a_row_with_an_error_says_so():
    def mixed(A: torch.Tensor) -> torch.Tensor:
        return A @ torch.eye(3)

    result = run(Row("mixed", lambda: [torch.eye(3)], mixed))
    assert isinstance(result.error, RuntimeError)
    assert "two devices" in str(result.error)


def test_what_would_stop_a_capture():
    (row,) = (x for x in ROWS if x.name == "ied 8×8 f32")
    assert isinstance(run(row, capture=True).error, pretend.CaptureError)
