"""server/guard/limits.py: limits, and the ones that follow from the model."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.server.guard.limits import SocketLimits


@pytest.mark.parametrize(("max_model_len", "frame_bytes"), [(64, 2**18), (2**14, 2**19), (2**20, 2**22)])
def test_a_frame_holds_a_prompt_that_fills_the_context_within_bounds(max_model_len, frame_bytes):
    limits = SocketLimits()
    assert limits.frame_bytes(max_model_len) == frame_bytes
    # Most frames that are too large are answered; the transport closes on larger ones only.
    assert limits.transport_frame_bytes > limits.frame_bytes(max_model_len)
    assert SocketLimits(max_frame_bytes=100).frame_bytes(max_model_len) == 100
    assert SocketLimits(max_frame_bytes=100).transport_frame_bytes == 200


@pytest.mark.parametrize("max_running", [1, 128, 129, 432, 832])
def test_connections_follow_what_runs_unless_they_are_given(max_running):
    of_all, of_one = SocketLimits().connections(max_running)
    assert of_all >= 4 * of_one >= 4 * max(256, 2 * max_running)
    assert SocketLimits(max_connections=3, max_connections_per_client=2).connections(max_running) == (3, 2)
    assert SocketLimits(max_connections_per_client=10**4).connections(max_running) == (10**4, 10**4)


def test_a_request_may_be_as_urgent_and_take_as_long_as_the_server_says():
    limits = SocketLimits(min_priority=-5, request_timeout_s=2.0)
    for priority in (-5, 0, 1000):
        limits.check_priority(priority)
    with pytest.raises(RequestError, match="priority is -6; legal is -5 to 1000, and lower is served first"):
        limits.check_priority(-6)
    assert [limits.timeout_ms(wanted) for wanted in (None, 7, 2000)] == [2000, 7, 2000]
    with pytest.raises(RequestError, match="timeout_ms is 2001; legal is up to 2000, the server's own timeout"):
        limits.timeout_ms(2001)
    assert [SocketLimits().timeout_ms(wanted) for wanted in (None, 7)] == [None, 7]


@pytest.mark.parametrize(
    ("limit", "legal"),
    [
        *(({f"max_{what}": 0}, "at least 1") for what in ("frame_bytes", "streams", "requests_per_client", "queue_bytes")),
        *(({f"max_{what}": 0}, "at least 1") for what in ("connections", "connections_per_client")),
        ({"min_priority": -1001}, "-1000 to 1000"),
        ({"request_timeout_s": 0}, "above 0"),
        ({"refusals_per_s": 0}, "above 0, or None"),
        ({"max_queued_tokens": 0}, "1"),
    ],
)
def test_limits_that_mean_nothing_are_refused(limit, legal):
    with pytest.raises(SpecError, match=f"legal is .*{legal}"):
        SocketLimits(**limit)
