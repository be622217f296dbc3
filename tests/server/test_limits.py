"""server/limits.py: limits, and the ones that follow from the model."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.server.limits import SocketLimits


@pytest.mark.parametrize(("max_model_len", "frame_bytes"), [(64, 2**18), (2**14, 2**19), (2**20, 2**22)])
def test_a_frame_holds_a_prompt_that_fills_the_context_within_bounds(max_model_len, frame_bytes):
    limits = SocketLimits()
    assert limits.frame_bytes(max_model_len) == frame_bytes
    # Most frames that are too large are answered; the transport closes on larger ones only.
    assert limits.transport_frame_bytes > limits.frame_bytes(max_model_len)
    assert SocketLimits(max_frame_bytes=100).frame_bytes(max_model_len) == 100
    assert SocketLimits(max_frame_bytes=100).transport_frame_bytes == 200


@pytest.mark.parametrize("name", ["max_frame_bytes", "max_streams", "max_requests_per_client", "max_queue_bytes"])
def test_nothing_is_no_limit(name):
    with pytest.raises(SpecError, match=f"{name} is 0; legal is at least 1"):
        SocketLimits(**{name: 0})
