"""runtime/distributed/nodes.py: machines are numbered, waited for and tried; other loopback addresses stand for other machines."""

from __future__ import annotations

import pytest
from support import ranks

from npucompile.runtime.distributed import nodes as module
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.nodes import ClusterNode, missing_nodes, numbered, reach, reachable, unreached, wait_for_listener

NODES = [ClusterNode(rank, 3, f"host{rank}", f"127.0.0.{rank + 2}") for rank in range(3)]


@pytest.mark.parametrize(
    ("numbers", "words"), [([3], "rank 3"), ([2, 3], "ranks 2, 3"), ([4, 5, 6, 7], "ranks 4 to 7"), ([4, 6, 7], "ranks 4, 6, 7")]
)
def test_ranks_in_words(numbers, words):
    assert numbered(numbers) == words


def test_what_is_missing_is_counted_by_machine():
    assert missing_nodes(6, 3, {0, 1, 4}) == "node rank 1 (ranks 2, 3), rank 5 of node rank 2"
    assert missing_nodes(6, 3, set(range(6))) == ""


def test_machines_that_are_tried():
    with reachable(NODES[1]) as port:
        assert reach(NODES[0].address, NODES[1].address, port) == ""
        ports = {1: (NODES[1].address, port), 2: (NODES[2].address, ranks.free_port())}
        assert unreached(NODES[0], ports) == {2: "refused"}
        # A machine does not try itself.
        assert unreached(NODES[2], {2: ports[2]}) == {}
    assert reach(NODES[0].address, NODES[1].address, port) == "refused"
    assert reach("192.0.2.1", NODES[1].address, port) == "from 192.0.2.1: Cannot assign requested address"
    with reachable(ClusterNode()) as port:
        assert port == 0


def test_who_waits_for_the_first_machine_says_so_and_names_it(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SAID_S", 0.0)
    said, port = [], ranks.free_port()
    with pytest.raises(RankError) as caught:
        wait_for_listener(NODES[1], NODES[0].address, port, 0.5, said.append)
    where = f"node rank 0 at 127.0.0.2 port {port}"
    assert said == [f"waiting for {where}: nothing listens there yet [node_late]"]
    assert str(caught.value) == f"node rank 1 did not find {where} within 0.5 s: nothing listens there yet [node_late]"
    assert caught.value.code == "node_late"
    with pytest.raises(RankError, match=r"^rank 3 was killed$"):
        wait_for_listener(NODES[1], NODES[0].address, port, 20, lambda _: None, lambda: "rank 3 was killed")
    with reachable(NODES[0]) as port:
        wait_for_listener(NODES[1], NODES[0].address, port, 20, said.append)
    assert len(said) == 1
