"""lowering/device_event.py: waiting ends when the event comes, when the time is over, or when something before it failed."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.device_event import StreamEvent


class Recorded:
    def __init__(self, comes_after: int, fails: str = "") -> None:
        self.left, self.fails, self.entered = comes_after, fails, 0

    def enter(self) -> None:
        self.entered += 1

    def query(self) -> bool:
        self.left -= 1
        if self.left < 0 and self.fails:
            raise RuntimeError(self.fails)
        return self.left < 0

    def synchronize(self) -> None:
        while not self.query():
            pass


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_it_is_waited_for_on_its_device(timeout_s: float | None) -> None:
    recorded = Recorded(3)
    StreamEvent(recorded, "npu:1", recorded.enter, "look there").wait(timeout_s)
    assert (recorded.left, recorded.entered) == (-1, 1)


def test_one_that_does_not_come_is_told_with_where_to_look() -> None:
    recorded = Recorded(10**9)
    with pytest.raises(LoweringError, match=r"^npu:1 has not finished within 0\.01 s; look there$"):
        StreamEvent(recorded, "npu:1", recorded.enter, "look there").wait(0.01)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_failure_before_it_is_told(timeout_s: float | None) -> None:
    recorded = Recorded(2, "out of memory")
    with pytest.raises(LoweringError, match=r"^a step on npu:1 failed: out of memory\b"):
        StreamEvent(recorded, "npu:1", recorded.enter, "").wait(timeout_s)
