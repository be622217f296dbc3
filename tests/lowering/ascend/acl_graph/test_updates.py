"""lowering/ascend/acl_graph/updates.py: jobs run in order on one thread, and the first failure is what the next caller gets."""

from __future__ import annotations

import threading

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.updates import Updates


def test_jobs_run_in_order_on_a_thread_that_entered_the_device() -> None:
    ran: list[object] = []
    updates = Updates("npu:0", lambda: ran.append(threading.current_thread().name))
    assert not ran
    for i in range(3):
        updates.put(lambda i=i: ran.append(i))
    updates.close()
    assert ran == ["lengths of npu:0", 0, 1, 2]


def test_nothing_runs_behind_a_failure() -> None:
    ran: list[int] = []
    updates = Updates("npu:0")
    gate = threading.Event()

    def fail() -> None:
        gate.wait(30)
        raise ValueError("lost")

    updates.put(fail)
    updates.put(lambda: ran.append(1))
    gate.set()
    updates.close()
    assert isinstance(updates.failure, ValueError)
    assert not ran
    for call in (updates.check, lambda: updates.put(lambda: None)):
        with pytest.raises(LoweringError, match="the lengths of a step on npu:0 could not be updated: lost"):
            call()
