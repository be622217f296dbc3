"""runtime/distributed/rendezvous.py: matching ranks are accepted; others, and ranks that do not come, are named."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from dataclasses import replace

import pytest
from support import ranks

from npucompile.runtime.distributed import rendezvous
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.rendezvous import RendezvousConfig, accept_ranks, connect_to_rank_0, open_store, substore

IDENTITY = {"artifact": "abc", "mesh": "tp=3", "torch version": "2"}
WAIT_S = 30


class Rank(threading.Thread):
    """A rank that connects to rank 0, in a thread."""

    def __init__(self, config, identity=IDENTITY):
        super().__init__(daemon=True)
        self.config, self.identity, self.error, self.stream = config, identity, None, None
        self.start()

    def run(self):
        try:
            self.stream = connect_to_rank_0(self.config, open_store(self.config), self.identity)
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


def test_ranks_that_fit_are_connected(first):
    config, store = first
    others = [Rank(other(config, rank)) for rank in (2, 1)]
    connections = accept_ranks(config, store, IDENTITY)
    assert sorted(connections) == [1, 2]
    for rank in others:
        rank.join(WAIT_S)
        assert rank.error is None
        assert connections[rank.config.rank].getpeername() == rank.stream.getsockname()
        rank.stream.close()
        connections[rank.config.rank].close()


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


def test_ranks_that_do_not_come_are_named(first):
    config, store = first
    rank = Rank(other(config, 1))
    with pytest.raises(RankError, match=r"ranks 2 of 3 did not come to 127.0.0.1 within 3 s; those that came: 1") as caught:
        accept_ranks(replace(config, timeout_s=3), store, IDENTITY)
    assert rank.ended() == str(caught.value)
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 did not come .* those that came: none"):
        accept_ranks(replace(config, timeout_s=0.1), store, IDENTITY)


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
    for data in (b"GET / HTTP/1.1\r\n\r\n", encode("hello", token="wrong", rank=1, world_size=3, identity=IDENTITY), encode("hello"), b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    others = [Rank(other(config, rank)) for rank in (1, 2)]
    waiting.join(WAIT_S)
    assert sorted(connections) == [1, 2]
    assert [rank.ended() for rank in others] == [None, None]
    for stream in connections.values():
        stream.close()


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
    for token in (known, "", "the toke", None):
        with socket.create_connection(("127.0.0.1", int(known.split()[0])), timeout=WAIT_S) as stream:
            stream.sendall(encode("hello", token=token, rank=1, world_size=3, identity=IDENTITY))
            refused.append(stream.recv(100))
    assert refused == [b""] * 4
    good = [Rank(other(config, rank)) for rank in (1, 2)]
    thread.join(WAIT_S)
    assert [rank.ended() for rank in good] == [None, None]
    for stream in accepted[0].values():
        stream.close()


def test_the_token_is_not_printed(first):
    assert "the token" not in repr(first[0])
