"""runtime/distributed/rendezvous.py: ranks that fit are let in; those that do not, and those that do not come, are named."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace

import pytest
from support import ranks

from npucompile.runtime.distributed import rendezvous
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.rendezvous import Seat, gather, join, keys, open_store

FACTS = {"artifact": "abc", "mesh": "tp=3", "torch version": "2"}
WAIT_S = 30


class Rank(threading.Thread):
    """A rank that comes, in a thread."""

    def __init__(self, seat, facts=FACTS):
        super().__init__(daemon=True)
        self.seat, self.facts, self.error, self.stream = seat, facts, None, None
        self.start()

    def run(self):
        try:
            self.stream = join(self.seat, open_store(self.seat), self.facts)
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
    """Rank 0's seat and store, for three ranks; the store is on a free port."""
    seat = Seat(0, 3, "127.0.0.1", 0, timeout_s=20, hosts_store=True)
    store = open_store(seat)
    return replace(seat, port=store.port), store


def other(seat, rank, **changes):
    return replace(seat, rank=rank, hosts_store=False, **changes)


def test_ranks_that_fit_are_connected(first):
    seat, store = first
    others = [Rank(other(seat, rank)) for rank in (2, 1)]
    found = gather(seat, store, FACTS)
    assert sorted(found) == [1, 2]
    for one in others:
        one.join(WAIT_S)
        assert one.error is None
        assert found[one.seat.rank].getpeername() == one.stream.getsockname()
        one.stream.close()
        found[one.seat.rank].close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"artifact": "xyz"}, "the ranks do not fit each other: artifact is xyz on rank 2 and abc on rank 0; all must run the same"),
        ({"torch version": "3", "mesh": "tp=4"}, "mesh is tp=4 on rank 2 and tp=3 on rank 0; torch version is 3 on rank 2 and 2 on rank 0"),
        ({"extra": "1"}, "extra is 1 on rank 2 and not known on rank 0"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_on_all_sides(first, monkeypatch, changes, message):
    seat, store = first
    good, bad, late = Rank(other(seat, 1)), [], rendezvous._late

    def once_the_good_one_is_in(found, *rest):
        if found and not bad:
            bad.append(Rank(other(seat, 2), FACTS | changes))
        return late(found, *rest)

    monkeypatch.setattr(rendezvous, "_late", once_the_good_one_is_in)
    with pytest.raises(RankError, match=message) as caught:
        gather(seat, store, FACTS)
    assert good.ended() == bad[0].ended() == str(caught.value)


def test_another_number_of_ranks_is_refused(first):
    seat, store = first
    one = Rank(other(seat, 1, world=2))
    with pytest.raises(RankError, match="rank 1 was started as one of 2 ranks, rank 0 as one of 3"):
        gather(seat, store, FACTS)
    assert "one of 2 ranks" in one.ended()


def test_a_rank_comes_once(first):
    seat, store = first
    twice = [Rank(other(seat, 1)), Rank(other(seat, 1))]
    with pytest.raises(RankError, match="two processes came as rank 1; the ranks of a job are 0 to 2, each once"):
        gather(seat, store, FACTS)
    assert {one.ended() for one in twice} == {"two processes came as rank 1; the ranks of a job are 0 to 2, each once"}


def test_ranks_that_do_not_come_are_named(first):
    seat, store = first
    one = Rank(other(seat, 1))
    with pytest.raises(RankError, match=r"ranks 2 of 3 did not come to 127.0.0.1 within 3 s; those that came: 1") as caught:
        gather(replace(seat, timeout_s=3), store, FACTS)
    assert one.ended() == str(caught.value)
    with pytest.raises(RankError, match=r"ranks 1, 2 of 3 did not come .* those that came: none"):
        gather(replace(seat, timeout_s=0.1), store, FACTS)


def test_a_process_that_ended_is_not_waited_for(first):
    seat, store = first
    with pytest.raises(RankError, match="rank 2 ended before it was ready"):
        gather(seat, store, FACTS, lambda: "rank 2 ended before it was ready")


def test_strangers_are_sent_away_and_stop_nothing(first, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3)
    seat, store = first
    found = {}
    waiting = threading.Thread(target=lambda: found.update(gather(seat, store, FACTS)), daemon=True)
    waiting.start()
    # With a client of its own: one that waits for a key keeps others of its process from setting it.
    port = int(keys(open_store(other(seat, 1)), seat, rendezvous.WHERE).get("where").decode().split()[0])
    for said in (b"GET / HTTP/1.1\r\n\r\n", encode("hello", token="wrong", rank=1, world=3, facts=FACTS), encode("hello"), b""):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    others = [Rank(other(seat, rank)) for rank in (1, 2)]
    waiting.join(WAIT_S)
    assert sorted(found) == [1, 2]
    assert [one.ended() for one in others] == [None, None]
    for stream in found.values():
        stream.close()


def test_rank_0_is_missed(first):
    seat, _ = first
    with pytest.raises(RankError, match=r"rank 1 of 3: rank 0 did not come to 127.0.0.1 port \d+ within 1 s"):
        join(other(seat, 1, timeout_s=1), open_store(other(seat, 1, timeout_s=1)), FACTS)


def test_a_store_that_is_not_there_is_missed():
    seat = Seat(2, 3, "127.0.0.1", ranks.free_port(), timeout_s=1)
    with pytest.raises(RankError, match=rf"rank 2 of 3 cannot reach the store of the job within 1 s at 127.0.0.1 port {seat.port}"):
        open_store(seat)


def test_an_address_of_another_machine_is_refused(first):
    seat, store = first
    with pytest.raises(RankError, match=r"rank 0 cannot listen on 192.0.2.1: .*; legal is an address of the machine that rank 0 runs on"):
        gather(replace(seat, host="192.0.2.1"), store, FACTS)


def test_jobs_do_not_see_each_others_keys(first):
    seat, store = first
    keys(store, seat, "a").set("x", "1")
    assert not keys(store, replace(seat, prefix="again"), "a").check(["x"])
    assert not keys(store, seat, "b").check(["x"])
