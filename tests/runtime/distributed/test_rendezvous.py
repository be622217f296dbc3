"""runtime/distributed/rendezvous.py: matching ranks are accepted; others, and ranks that do not come, are named."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import resource
import socket
import sys
import threading
from dataclasses import replace

import pytest
from support import ranks

from npucompile.runtime.distributed import nodes, rendezvous
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.messages import HEADER, decode, encode, receive
from npucompile.runtime.distributed.nodes import ClusterNode
from npucompile.runtime.distributed.rendezvous import RendezvousConfig, accept_ranks, connect_to_rank_0, open_store, substore

IDENTITY = {"artifact": "abc", "mesh": "tp=3", "torch version": "2"}
WAIT_S = 30


WRONG_TOKEN = encode("refused", message="rank 0 has another token than this rank, or none; legal is the same on all machines [rank_token]")


def told(stream):
    """All that rank 0 sends before it closes a connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := stream.recv(1 << 16):
            data += part
    return data


class Rank(threading.Thread):
    """A rank that connects to rank 0, in a thread."""

    def __init__(self, config, identity=IDENTITY, **callbacks):
        super().__init__(daemon=True)
        self.callbacks = callbacks
        self.config, self.identity, self.error, self.stream = config, identity, None, None
        self.start()

    def run(self):
        try:
            self.stream = connect_to_rank_0(self.config, open_store(self.config), self.identity, **self.callbacks)
        except RankError as error:
            self.error = str(error)

    def ended(self):
        self.join(WAIT_S)
        assert not self.is_alive()
        if self.stream is not None:
            self.stream.close()
        return self.error


@pytest.fixture
def first():
    """Rank 0's configuration and store, for three ranks; the store is on a free port."""
    config = RendezvousConfig(0, 3, "127.0.0.1", 0, 3, timeout_s=20, hosts_store=True, token="the token")
    store = open_store(config)
    return replace(config, port=store.port), store


def other(config, rank, **changes):
    return replace(config, rank=rank, hosts_store=False, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifact": "xyz"}, "the ranks do not match: artifact is xyz on rank 2 and abc on rank 0; all must run the same"),
        ({"torch version": "3", "mesh": "tp=4"}, "mesh is tp=4 on rank 2 and tp=3 on rank 0; torch version is 3 on rank 2 and 2 on rank 0"),
        ({"extra": "1"}, "extra is 1 on rank 2 and not known on rank 0"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_on_all_sides(first, monkeypatch, changes, message):
    config, store = first
    good, bad, late = Rank(other(config, 1)), [], rendezvous._late

    def once_the_good_one_is_in(connections, *rest):
        if connections and not bad:
            bad.append(Rank(other(config, 2), IDENTITY | changes))
        return late(connections, *rest)

    monkeypatch.setattr(rendezvous, "_late", once_the_good_one_is_in)
    with pytest.raises(RankError, match=message) as caught:
        accept_ranks(config, store, IDENTITY)
    assert good.ended() == bad[0].ended() == str(caught.value)


def test_another_number_of_ranks_is_refused(first):
    config, store = first
    rank = Rank(other(config, 1, world_size=2))
    with pytest.raises(RankError, match="rank 1 was started as one of 2 ranks, rank 0 as one of 3"):
        accept_ranks(config, store, IDENTITY)
    assert "one of 2 ranks" in rank.ended()


def test_a_rank_comes_once(first):
    config, store = first
    twice = [Rank(other(config, 1)), Rank(other(config, 1))]
    with pytest.raises(RankError, match="two processes came as rank 1; the ranks are 0 to 2, each once"):
        accept_ranks(config, store, IDENTITY)
    assert {rank.ended() for rank in twice} == {"two processes came as rank 1; the ranks are 0 to 2, each once"}


def test_a_process_that_has_many_files_open_is_a_rank(first):
    """Descriptors above 1,023 are what `select.select` does not take."""
    config, store = first
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as stack, open(os.devnull, "rb") as null:
            for _ in range(1100):
                stack.callback(os.close, os.dup(null.fileno()))
            others = [Rank(other(config, rank)) for rank in (2, 1)]
            connections = accept_ranks(config, store, IDENTITY)
            for arrival in connections.values():
                assert stack.enter_context(arrival.stream).fileno() > 1023
            assert [rank.ended() for rank in others] == [None, None]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_that_do_not_come_are_named(first):
    config, store = first
    rank = Rank(other(config, 1))
    with pytest.raises(
        RankError, match=r"ranks 2 of 3 did not come to 127.0.0.1 within 3 s \(--join-timeout\); those that came: 1"
    ) as caught:
        accept_ranks(replace(config, timeout_s=3), store, IDENTITY)
    assert rank.ended() == str(caught.value)
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 did not come .* those that came: none"):
        accept_ranks(replace(config, timeout_s=0.1), store, IDENTITY)


def test_a_rank_that_still_works_is_waited_for_and_those_that_came_wait_with_it(first, monkeypatch):
    """Three times as long as ranks have otherwise, also beside one that came at once."""
    config, store = first
    monkeypatch.setattr(nodes, "SAID_S", 0.2)
    early, said = Rank(other(config, 1, timeout_s=0.5)), []
    late = threading.Timer(1.5, lambda: came.append(Rank(other(config, 2))))
    came, asked = [], []

    def working(ranks):
        asked.append(list(ranks))
        return True

    late.start()
    connections = accept_ranks(replace(config, timeout_s=0.5), store, IDENTITY, say=said.append, working=working)
    assert sorted(connections) == [1, 2]
    assert [early.ended(), came[0].ended()] == [None, None]
    assert asked[-1] in ([2], [])
    assert any("waiting for rank 2 of 3" in text and "--join-timeout" in text for text in said)
    for stream in (early.stream, came[0].stream, *(arrival.stream for arrival in connections.values())):
        stream.close()


def test_a_process_that_ended_is_not_waited_for(first):
    config, store = first
    with pytest.raises(RankError, match="rank 2 ended before it was ready"):
        accept_ranks(config, store, IDENTITY, lambda: "rank 2 ended before it was ready")


def test_strangers_are_turned_away_and_stop_nothing(first, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3)
    config, store = first
    connections = {}
    waiting = threading.Thread(target=lambda: connections.update(accept_ranks(config, store, IDENTITY)), daemon=True)
    waiting.start()
    # A client of its own: while a client waits for a key, others of the same process cannot set it.
    port = int(substore(open_store(other(config, 1)), config, rendezvous.CONTROL).get(rendezvous.ADDRESS).decode().split()[0])
    own = encode("hello", rank=1, world_size=3, identity=IDENTITY)
    unproven = (encode("proven", hello=own, proof=b"?"), encode("proven", hello=1, proof=[2]), encode("proven"))
    for data in (b"GET / HTTP/1.1\r\n\r\n", own, b"", *unproven):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(WAIT_S)
            assert receive(stranger).kind == "challenge"
            stranger.sendall(data)
            assert told(stranger) == (WRONG_TOKEN if data in unproven else b"")
    for fields in ({}, {"rank": [1]}, {"rank": 1, "world_size": 3, "identity": {"artifact": 1}}):
        # Of who knows the token, or where there is none.
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
            challenge, wrong = receive(stranger).fields["challenge"], encode("hello", **fields)
            proof = hmac.digest(config.token.encode(), challenge + wrong, "sha256")
            stranger.sendall(encode("proven", hello=wrong, proof=proof))
            assert told(stranger) == b""
    others = [Rank(other(config, rank)) for rank in (1, 2)]
    waiting.join(WAIT_S)
    assert sorted(connections) == [1, 2]
    assert [rank.ended() for rank in others] == [None, None]
    for arrival in connections.values():
        arrival.stream.close()


def test_a_missing_rank_0_is_named(first):
    config, _ = first
    with pytest.raises(RankError, match=r"rank 1 of 3: rank 0 did not come to 127.0.0.1 port \d+ within 1 s"):
        connect_to_rank_0(other(config, 1, timeout_s=1), open_store(other(config, 1, timeout_s=1)), IDENTITY)


def test_a_missing_store_is_named():
    config = RendezvousConfig(2, 3, "127.0.0.1", ranks.free_port(), 3, timeout_s=1)
    with pytest.raises(RankError, match=rf"rank 2 of 3 cannot reach the store within 1 s at 127.0.0.1 port {config.port}"):
        open_store(config)


def test_an_address_of_another_machine_is_refused(first):
    config, store = first
    with pytest.raises(RankError, match=r"rank 0 cannot listen on 192.0.2.1: .*; legal is an address of the machine that rank 0 runs on"):
        accept_ranks(replace(config, host="192.0.2.1"), store, IDENTITY)


def test_prefixes_do_not_see_each_others_keys(first):
    config, store = first
    substore(store, config, "a").set("x", "1")
    assert not substore(store, replace(config, prefix="again"), "a").check(["x"])
    assert not substore(store, config, "b").check(["x"])


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback network is Linux's")
def test_the_store_listens_where_it_was_asked_to(first):
    config, _ = first
    with socket.create_connection(("127.0.0.1", config.port)):
        pass
    # Another address of this machine, as any of a network would be.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", config.port))


def test_whoever_reads_the_store_is_no_rank(first):
    config, store = first
    accepted, refused = [], []
    thread = threading.Thread(target=lambda: accepted.append(accept_ranks(config, store, IDENTITY)))
    thread.start()
    # A client of its own: while a client waits for a key, others of the same process cannot set it.
    known = substore(open_store(other(config, 1)), config, rendezvous.CONTROL).get(rendezvous.ADDRESS).decode()
    hello = encode("hello", rank=1, world_size=3, identity=IDENTITY)
    for token in (known, "", "the toke"):
        with socket.create_connection(("127.0.0.1", int(known.split()[0])), timeout=WAIT_S) as stream:
            challenge = receive(stream).fields["challenge"]
            stream.sendall(encode("proven", hello=hello, proof=hmac.digest(token.encode(), challenge + hello, "sha256")))
            refused.append(told(stream))
    assert refused == [WRONG_TOKEN] * 3
    good = [Rank(other(config, rank)) for rank in (1, 2)]
    thread.join(WAIT_S)
    assert [rank.ended() for rank in good] == [None, None]
    for arrival in accepted[0].values():
        arrival.stream.close()


def test_what_a_rank_has_sent_is_of_no_use_to_who_has_heard_it(first):
    """Neither again nor with another greeting, and the token is no part of it."""
    config, store = first
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(accept_ranks(config, store, IDENTITY)))
    thread.start()
    port = int(substore(open_store(other(config, 1)), config, rendezvous.CONTROL).get(rendezvous.ADDRESS).decode())
    astray = replace(config, port=0)
    other_store = open_store(astray)
    with socket.create_server(("127.0.0.1", 0)) as between, socket.create_connection(("127.0.0.1", port), WAIT_S) as far:
        # A rank is led past somebody who hears all, and passes the challenge on.
        substore(other_store, astray, rendezvous.CONTROL).set(rendezvous.ADDRESS, str(between.getsockname()[1]))
        led = Rank(other(astray, 1, port=other_store.port))
        near, _ = between.accept()
        near.settimeout(WAIT_S)
        challenge = receive(far)
        near.sendall(encode(challenge.kind, **challenge.fields))
        said = receive(near)
        near.close()
        assert "lost rank 0" in led.ended()
        changed = decode(said.fields["hello"][HEADER.size :]).fields | {"rank": 2}
        far.settimeout(WAIT_S)
        far.sendall(encode("proven", hello=encode("hello", **changed), proof=said.fields["proof"]))
        assert told(far) == WRONG_TOKEN
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as again:
        assert receive(again).fields["challenge"] != challenge.fields["challenge"]
        again.sendall(encode("proven", **said.fields))
        assert told(again) == WRONG_TOKEN
    assert b"the token" not in encode("", **said.fields)
    good = [Rank(other(config, rank)) for rank in (1, 2)]
    thread.join(WAIT_S)
    assert [rank.ended() for rank in good] == [None, None]
    for arrival in accepted[0].values():
        arrival.stream.close()


def test_the_token_is_not_printed(first):
    assert "the token" not in repr(first[0])


# --- several machines, for which other addresses of this one stand ---


def node(rank, count=3):
    return ClusterNode(rank, count, f"host{rank}", f"127.0.0.{rank + 1}")


@pytest.fixture
def machines(monkeypatch):
    """The first of three machines of one rank each, its store, and what it says."""
    monkeypatch.setattr(nodes, "FIRST_SAID_S", 0.3)
    config = RendezvousConfig(0, 3, "127.0.0.1", 0, 1, timeout_s=20, hosts_store=True, token="the token", node=node(0))
    store = open_store(config)
    return replace(config, port=store.port), store


def test_machines_that_reach_each_other_are_accepted(machines):
    config, store = machines
    others = [Rank(other(config, rank, node=node(rank))) for rank in (1, 2)]
    arrivals = accept_ranks(config, store, IDENTITY)
    assert {rank: str(arrival.node) for rank, arrival in arrivals.items()} == {
        rank: f"node rank {rank} (host{rank} at 127.0.0.{rank + 1})" for rank in (1, 2)
    }
    # They come from the address that they say.
    assert {arrival.stream.getpeername()[0] for arrival in arrivals.values()} == {"127.0.0.2", "127.0.0.3"}
    assert [rank.ended() for rank in others] == [None, None]
    for arrival in arrivals.values():
        arrival.stream.close()


def test_every_machine_is_told_which_one_is_missing(machines):
    config, store = machines
    waiting, said = [], []
    late = Rank(other(config, 2, node=node(2)), say=waiting.append)
    with pytest.raises(RankError) as caught:
        accept_ranks(replace(config, timeout_s=3), store, IDENTITY, say=said.append)
    came = r"those that came: node rank 0 \(host0 at 127.0.0.1\), node rank 2 \(host2 at 127.0.0.3\) \[node_late\]"
    assert re.fullmatch(
        rf"node rank 1 \(rank 1\) of 3 machines did not come to 127.0.0.1 within 3 s \(--join-timeout\); {came}", str(caught.value)
    )
    assert caught.value.code == "node_late"
    assert late.ended() == str(caught.value)
    assert waiting
    assert set(waiting) <= set(said)
    assert re.fullmatch(rf"waiting for node rank 1 \(rank 1\) at 127.0.0.1 port {config.port}, \d s more; {came}", waiting[-1])


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (node(1, 2), "node rank 1 (host1 at 127.0.0.2) was started as one of 2 machines, node rank 0 (host0 at 127.0.0.1) as one of 3; "
         "legal is one --nnodes on all machines [nnodes_mismatch]"),
        (replace(node(2), host="twin"), "node rank 2 (twin at 127.0.0.3) and node rank 2 (host2 at 127.0.0.3) are two machines; legal is "
         "each --node-rank from 0 to 2 once [node_rank_taken]"),
        (replace(node(0), host="twin"), "node rank 0 (twin at 127.0.0.1) and node rank 0 (host0 at 127.0.0.1) are two machines"),
        (node(3), "node rank 3 (host3 at 127.0.0.4) is none; legal is each --node-rank from 0 to 2 once [node_rank_taken]"),
    ],
)  # fmt: skip
def test_machines_that_count_otherwise_are_refused_on_all_sides(machines, monkeypatch, which, message):
    config, store = machines
    good, bad, late = Rank(other(config, 2, node=node(2))), [], rendezvous._late

    def once_the_good_one_is_in(arrivals, *rest):
        if arrivals and not bad:
            bad.append(Rank(other(config, 1, node=which)))
        return late(arrivals, *rest)

    monkeypatch.setattr(rendezvous, "_late", once_the_good_one_is_in)
    with pytest.raises(RankError) as caught:
        accept_ranks(config, store, IDENTITY)
    assert message in str(caught.value)
    assert good.ended() == bad[0].ended() == str(caught.value)


def test_machines_that_do_not_reach_each_other_are_named(machines, monkeypatch):
    config, store = machines
    others = [Rank(other(config, rank, node=node(rank))) for rank in (1, 2)]
    tried = nodes.reach
    monkeypatch.setattr(
        nodes, "reach", lambda own, host, port: "cut" if (own, host) == ("127.0.0.3", "127.0.0.2") else tried(own, host, port)
    )
    with pytest.raises(RankError) as caught:
        accept_ranks(config, store, IDENTITY)
    apart = "node rank 2 (host2 at 127.0.0.3) does not reach node rank 1 (host1 at 127.0.0.2): cut; legal is an address of each machine"
    assert str(caught.value).startswith(apart)
    assert caught.value.code == "node_unreachable"
    assert {rank.ended() for rank in others} == {str(caught.value)}


def test_another_token_is_named_on_both_sides(machines):
    config, store = machines
    wrong, said = Rank(other(config, 1, node=node(1), token="wrong")), []
    with pytest.raises(RankError, match=r"; turned away for another token: 127.0.0.2 \[node_late\]$"):
        accept_ranks(replace(config, timeout_s=2), store, IDENTITY, say=said.append)
    assert wrong.ended() == "rank 0 has another token than this rank, or none; legal is the same on all machines [rank_token]"
    assert said[0] == "turned away a process at 127.0.0.2: it has another token than rank 0, or none [rank_token]"


def test_a_rank_that_ends_before_all_have_come_is_named(machines):
    config, store = machines
    ended = Rank(other(config, 2, node=node(2)), exited=lambda: "rank 3 was killed")
    with pytest.raises(RankError, match=r"^rank 2 on node rank 2 \(host2 at 127.0.0.3\): rank 3 was killed$"):
        accept_ranks(config, store, IDENTITY)
    assert ended.ended() == "rank 3 was killed"


def test_who_comes_when_all_have_come_is_told_so(machines):
    config, store = machines
    others = [Rank(other(config, rank, node=node(rank))) for rank in (1, 2)]
    arrivals = accept_ranks(config, store, IDENTITY)
    late = Rank(other(config, 1, node=node(1))).ended()
    assert "takes no ranks any more: another process has come as this one, or all were refused [node_rank_taken]" in late
    assert [rank.ended() for rank in others] == [None, None]
    for arrival in arrivals.values():
        arrival.stream.close()
