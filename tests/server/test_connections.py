"""server/connections.py: open connections, of each peer and of all."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.connections import Connections


def refusal(connections, peer):
    with pytest.raises(RequestError) as caught:
        connections.enter(peer)
    return caught.value.code


def test_each_peer_has_its_own_and_all_have_theirs():
    connections = Connections(most=3, most_per_peer=2)
    connections.enter("a")
    connections.enter("a")
    assert refusal(connections, "a") == "too_many_requests"
    connections.enter("b")
    assert refusal(connections, "b") == "queue_full"
    assert connections.count == 3
    for peer in "aab":
        connections.leave(peer)
    assert connections.count == 0
    assert not connections._open
    connections.enter("a")
