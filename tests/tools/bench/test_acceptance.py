"""tools/bench/acceptance.py: acceptance over all steps of all requests."""

from __future__ import annotations

from npucompile.runtime.request import ExecutionRecord
from npucompile.tools.bench import acceptance


def record(steps: int, *accepted: int) -> ExecutionRecord:
    return ExecutionRecord(1.0, 2.0, 3.0, (), (), 0, 0, verify_steps=steps, accepted_per_position=accepted)


def test_lengths_are_of_all_steps_together() -> None:
    assert acceptance.length([record(2, 0, 0), record(6, 5, 3), record(0, 0, 0)]) == 2.0
    assert acceptance.length([record(4, 4, 4, 4)]) == 4.0
    assert acceptance.length([record(4, 0)]) == 1.0


def test_rates_are_shares_of_the_steps_that_verified() -> None:
    assert acceptance.rates([record(4, 3, 1), record(6, 2, 1), record(0, 0, 0)]) == [0.5, 0.2]


def test_where_nothing_was_verified_there_is_neither() -> None:
    for records in ([], [record(0, 0, 0)], [record(0)]):
        assert acceptance.length(records) is None
        assert acceptance.rates(records) == []
