"""runtime/distributed/control_plane.py: answers are gathered, and the rank that is blamed is the one that began it."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from support import ranks

from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed.control_plane import ControlPlane, RankError, error_text
from npucompile.runtime.distributed.messages import encode, receive

MESH = Mesh.parse("dp=2,tp=2")
WAIT_S = 20


class World:
    """A control plane of four ranks, whose other ranks are sockets of the test."""

    def __init__(self, **options):
        pairs = {rank: ranks.connected() for rank in (1, 2, 3)}
        self.far = {rank: far for rank, (_, far) in pairs.items()}
        for far in self.far.values():
            far.settimeout(WAIT_S)
        self.told = queue.Queue()
        self.control_plane = ControlPlane(MESH, {rank: near for rank, (near, _) in pairs.items()}, on_failure=self.told.put, **options)

    def close(self):
        self.control_plane.close()
        for far in self.far.values():
            far.close()

    def hears(self, rank):
        while (message := receive(self.far[rank])).kind == "heartbeat":
            pass
        return message


@pytest.fixture
def world():
    made = []

    def make(**options):
        made.append(World(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_answers_are_gathered_by_rank(world):
    one = world()
    for rank in (3, 1):
        one.far[rank].sendall(encode("outputs", x=rank))
    found = one.control_plane.gather([1, 3], "outputs", WAIT_S)
    assert {rank: message.fields["x"] for rank, message in found.items()} == {1: 1, 3: 3}
    assert one.control_plane.gather([], "outputs", 0.0) == {}
    one.control_plane.check()
    assert one.control_plane.wait_for_failure(0) is None


@pytest.mark.parametrize(("how", "said"), [(None, "was lost: it closed its connection"), ("killed by SIGKILL", "died: killed by SIGKILL")])
def test_a_rank_that_ends_is_named_and_the_others_hear_it(world, how, said):
    one = world(exit_reason=lambda rank: how if rank == 2 else None)
    one.far[2].close()
    with pytest.raises(RankError, match=f"rank 2 of mesh dp=2,tp=2 {said}; all ranks end") as caught:
        one.control_plane.gather([2], "outputs", WAIT_S)
    assert one.told.get(timeout=WAIT_S) is one.control_plane.failure
    for rank in (1, 3):
        assert one.hears(rank) == ("abort", {"message": str(caught.value)})
    with pytest.raises(RankError, match="rank 2"):
        one.control_plane.check()


def test_the_dead_are_blamed_before_those_who_noticed(world):
    one = world()
    one.far[1].sendall(encode("failed", message="connection closed by peer"))
    time.sleep(0.05)
    one.far[3].close()
    assert "rank 3 of mesh dp=2,tp=2 was lost" in str(one.control_plane.concluded_failure())


def test_who_says_why_it_ends_is_believed(world):
    one = world()
    one.far[1].sendall(encode("failed", message="decode: no memory"))
    one.far[1].close()
    assert str(one.control_plane.concluded_failure()) == "rank 1 of mesh dp=2,tp=2 failed: decode: no memory; all ranks end"


def test_who_stands_still_is_blamed_before_those_who_waited(world, monkeypatch):
    one = world()
    monkeypatch.setattr(one.control_plane._peers[2], "_received_s", time.monotonic() - 42)
    one.control_plane.fail(0, "decode: timed out", lost=False)
    assert "rank 2 of mesh dp=2,tp=2 was lost: it has been silent for 42 s" in str(one.control_plane.concluded_failure())


def test_a_rank_may_be_late(world):
    one = world()
    with pytest.raises(RankError, match=r"no outputs from rank 1, 3 within 0.05 s"):
        one.control_plane.gather([1, 3], "outputs", 0.05)


def test_an_answer_that_was_not_asked_for_is_a_failure(world):
    one = world()
    one.far[1].sendall(encode("ready"))
    with pytest.raises(RankError, match=r"rank 1 sent 'ready' where 'outputs' of ranks \[1\] was due"):
        one.control_plane.gather([1], "outputs", WAIT_S)


def test_a_failure_wakes_who_waits(world):
    one, found = world(), queue.Queue()

    def wait():
        try:
            one.control_plane.gather([1], "ready", None)
        except RankError as error:
            found.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    one.far[3].close()
    assert "rank 3" in str(found.get(timeout=WAIT_S))
    thread.join()


def test_closing_says_stop_and_is_no_failure(world):
    one = world()
    one.control_plane.close()
    for rank in (1, 2, 3):
        assert one.hears(rank) == ("stop", {})
    assert one.told.empty()
    assert one.control_plane.wait_for_failure(0.1) is None


def test_errors_are_told_in_their_own_words():
    assert error_text(RankError("as it is")) == "as it is"
    assert error_text(ZeroDivisionError("no")) == "ZeroDivisionError: no"
