"""server/guard/connections.py: open connections, of each peer and of all."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.guard.connections import Connections


def refusal(connections, peer):
    with pytest.raises(RequestError) as caught:
        connections.enter(peer)
    return caught.value.code


def test_each_peer_has_its_own_and_all_have_theirs():
    connections = Connections(lambda: (3, 2))
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


def test_a_proxy_has_the_connections_of_all():
    connections = Connections(lambda: (3, 1), lambda peer: peer == "proxy")
    for _ in range(3):
        connections.enter("proxy")
    assert refusal(connections, "proxy") == "queue_full"


def test_limits_that_grow_hold_for_the_next_connection():
    """A server listens before it knows how many requests its model runs."""
    most = [(1, 1)]
    connections = Connections(lambda: most[0])
    connections.enter("a")
    assert refusal(connections, "a") == "too_many_requests"
    assert refusal(connections, "b") == "queue_full"
    most[0] = (3, 2)
    connections.enter("a")
    connections.enter("b")
