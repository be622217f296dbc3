"""tools/lab/overhead.py: it measures the threads that it says, and a run that is too short is refused."""

from __future__ import annotations

import pytest
from support.texts import byte_codec

from npucompile.graphs.errors import NpucompileError
from npucompile.tools.lab import overhead


@pytest.mark.parametrize(("sockets", "top_logprobs"), [(1, 0), (4, 2)])
def test_processor_time_of_both_threads(sockets, top_logprobs):
    cost = overhead.measure(byte_codec(), sockets, top_logprobs, streams=4, tokens=60, pause_s=0.01)
    # More than nothing, and less than the pause: it is no time on the clock.
    assert 0 < cost.engine_ms < 10
    assert 0 < cost.server_ms < 10


def test_too_few_steps_are_no_measurement():
    with pytest.raises(NpucompileError, match="a measurement needs more"):
        overhead.measure(byte_codec(), 1, 0, streams=4, tokens=2, pause_s=0.0)


def test_a_client_that_fails_is_reported(monkeypatch):
    monkeypatch.setattr(overhead, "CLIENT", "1 / 0")
    with pytest.raises(NpucompileError, match=r"the client of the benchmark ended with status 1: (.|\n)*ZeroDivisionError"):
        overhead._follow("ws://127.0.0.1:1/", 1, 1, 1, 0)
