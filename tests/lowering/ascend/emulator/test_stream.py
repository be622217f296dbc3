"""lowering/ascend/emulator/stream.py: jobs run in order on another thread, and the first failure is the last thing that runs."""

from __future__ import annotations

import re
import threading

import pytest
import torch

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.stream import Stream


@pytest.fixture
def stream():
    stream = Stream("emulated:3")
    yield stream
    stream.close()


def test_jobs_run_in_order_while_the_host_goes_on(stream: Stream) -> None:
    gate, seen = threading.Event(), []
    stream.launch("first", lambda: seen.append((gate.wait(30), threading.current_thread().name)))
    stream.launch("second", lambda: seen.append("second"))
    behind = stream.record()
    assert seen == []
    assert not behind.passed()
    assert not stream.idle()
    gate.set()
    behind.wait(30)
    assert seen == [(True, "emulated:3"), "second"]
    assert stream.idle()


def test_a_wait_that_takes_too_long_says_what_runs(stream: Stream) -> None:
    gate = threading.Event()
    started = threading.Event()

    def job() -> None:
        stream.describe(lambda: "operator 7")
        started.set()
        gate.wait(30)

    stream.launch("step 4", job)
    started.wait(30)
    with pytest.raises(LoweringError, match=r"emulated:3 has not come to this event in 0.01 s: it runs step 4, operator 7"):
        stream.record().wait(0.01)
    gate.set()
    stream.record().wait(30)
    assert stream.doing() == "it runs nothing"


def test_the_first_failure_is_final(stream: Stream) -> None:
    before = stream.record()
    ran: list[str] = []
    stream.launch("good", lambda: ran.append("good"))
    stream.launch("bad", lambda: [].pop())
    stream._jobs.put(("later", lambda: ran.append("later")))
    behind = stream.record()
    before.wait(30)
    for _ in range(2):
        with pytest.raises(LoweringError, match="bad: IndexError: pop from empty list"):
            behind.wait(30)
    with pytest.raises(LoweringError, match="bad: IndexError"):
        stream.record().wait(30)
    with pytest.raises(LoweringError, match=re.escape("emulated:3 has failed before: bad: IndexError")):
        stream.launch("more", lambda: ran.append("more"))
    assert ran == ["good"]


def test_a_closed_stream_runs_nothing() -> None:
    stream, ran = Stream("emulated:0"), []
    stream.launch("last", lambda: ran.append(1))
    stream.close()
    assert ran == [1]
    stream.record().wait(1)
    with pytest.raises(LoweringError, match="emulated:0 is closed"):
        stream.launch("more", lambda: None)


def test_loops_use_as_many_threads_as_in_the_process(stream: Stream) -> None:
    seen: list[int] = []
    stream.run("count", lambda: seen.append(torch.get_num_threads()))
    assert seen == [torch.get_num_threads()]
