"""What goes over the connection of a pair."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import ProtocolError
from npucompile.runtime.kv_transfer.messages import Abort, Ask, Computed, Declined, Done, Failed, Gone, Hello, Ready, from_json, to_json


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, {"model": "m"}, ["host:1"]),
        Ask(2**62, [1, 2], "salt", "tenant", 0, 7),
        Declined(7, 400, "why"),
        *(Computed(1, 16), Ready(1, 0, [3, 4], 1, 5), Done(1), Failed(1, "why"), Abort(1), Gone(1)),
    ],
)
def test_messages_arrive_as_they_are_sent(message):
    assert from_json(json.loads(json.dumps(to_json(message)))) == message


@pytest.mark.parametrize(
    "data", [[], {}, {"type": "other"}, {"type": "done"}, {"type": "done", "room": "1"}, {"type": "done", "room": 1, "more": 2}]
)
def test_others_are_refused(data):
    with pytest.raises(ProtocolError, match="legal"):
        from_json(data)
