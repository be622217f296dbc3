"""runtime/distributed/peer.py: messages arrive in order, and the end of a connection is reported once, with a reason."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

import numpy as np
import pytest
from support import ranks
from support.machines import machines

from npucompile.runtime.distributed import peer
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.peer import RankPeer

WAIT_S = 20


class Ends:
    """A peer, and what it reported."""

    def __init__(self, stream, **options):
        self.messages, self.lost = queue.Queue(), queue.Queue()
        self.peer = RankPeer(stream, self.messages.put, self.lost.put, **options)
        self.peer.start()


@pytest.fixture
def both():
    """Two peers of each other."""
    pair = [Ends(stream, heartbeat_s=0.05) for stream in ranks.connected()]
    yield pair
    for end in pair:
        end.peer.close()


def test_messages_arrive_in_order_from_many_threads(both):
    near, far = both
    big = np.arange(20_000, dtype=np.int32)

    def send(name):
        for i in range(20):
            near.peer.send(name, i=i, big=big)

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    received = {"a": [], "b": []}
    for _ in range(40):
        message = far.messages.get(timeout=WAIT_S)
        received[message.kind].append(message.fields["i"])
        assert (message.fields["big"] == big).all()
    for thread in threads:
        thread.join()
    assert received == {"a": list(range(20)), "b": list(range(20))}


def test_both_may_send_more_than_the_kernel_holds_at_once(both):
    big = np.zeros(4_000_000, np.int32)
    threads = [threading.Thread(target=end.peer.send, args=("big",), kwargs={"x": big}) for end in both]
    for thread in threads:
        thread.start()
    for end in both:
        assert end.messages.get(timeout=WAIT_S).fields["x"].shape == big.shape
    for thread in threads:
        thread.join(WAIT_S)


def test_a_peer_that_closes_is_reported_once(both):
    near, far = both
    far.peer.close()
    assert near.lost.get(timeout=WAIT_S) == "it closed its connection"
    near.peer.send("late")
    near.peer.send("later")
    near.peer.close()
    assert near.lost.empty()
    assert far.lost.empty()


def test_a_peer_that_ends_before_it_has_read_all_has_closed_its_connection():
    near, far = ranks.connected()
    end = Ends(near)
    end.peer.send("unread")
    assert far.recv(1, socket.MSG_PEEK)
    far.close()
    assert end.lost.get(timeout=WAIT_S) == "it closed its connection"
    end.peer.send("late")
    end.peer.close()


def test_a_peer_that_is_silent_is_reported_and_heartbeats_are_not_silence():
    near, far = ranks.connected()
    end = Ends(near, heartbeat_s=0.02, silence_s=0.4)
    heartbeats = Ends(far, heartbeat_s=0.02, silence_s=60)
    with pytest.raises(queue.Empty):
        end.lost.get(timeout=0.8)
    assert end.peer.silent_s < 0.4
    assert end.messages.empty()
    heartbeats.peer._ended = True
    assert end.lost.get(timeout=WAIT_S).startswith("it has been silent for")
    end.peer.close()
    heartbeats.peer.close()


def test_a_peer_that_reads_nothing_is_reported():
    frame = encode("big", x=np.zeros(8_000_000, np.int32))
    near, far = ranks.connected()
    end = Ends(near, silence_s=1.5, heartbeat_s=0.1)
    with far:
        # The peer sends heartbeats all the while, and reads nothing.
        stop = threading.Event()

        def alive():
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    far.sendall(encode("heartbeat"))

        thread = threading.Thread(target=alive, daemon=True)
        thread.start()
        threading.Thread(target=end.peer.send_frame, args=(frame,), daemon=True).start()
        assert end.lost.get(timeout=WAIT_S) == "it has read nothing for 1.5 s"
        stop.set()
        thread.join(WAIT_S)
    end.peer.close()


def test_nonsense_ends_the_connection():
    near, far = ranks.connected()
    end = Ends(near)
    with far:
        far.sendall(b"\xff" * 8)
        assert "a frame of" in end.lost.get(timeout=WAIT_S)
    end.peer.close()


def test_a_handler_that_raises_ends_the_connection_and_is_reported():
    lost = queue.Queue()

    def broken(message):
        raise ValueError("no such thing")

    near, far = ranks.connected()
    peer = RankPeer(near, broken, lost.put)
    peer.start()
    with far:
        far.sendall(encode("x"))
        assert "no such thing" in lost.get(timeout=WAIT_S)
    peer.close()


def test_a_machine_that_answers_nothing_is_lost_whatever_its_processes_do(monkeypatch):
    """A process that does not read is not lost by that: its machine answers for it."""
    monkeypatch.setattr(peer, "GONE_S", 1.0)
    with machines(2) as (first, second), contextlib.ExitStack() as stack:
        with first.inside():
            listener = stack.enter_context(socket.create_server((first.address, 0)))
        with second.inside():
            far = stack.enter_context(socket.create_connection(listener.getsockname()))
        near = Ends(listener.accept()[0], heartbeat_s=0.1)
        stack.callback(near.peer.close)
        with pytest.raises(queue.Empty):
            near.lost.get(timeout=2)
        assert peer.unacknowledged_s(far) == 0.0
        second.cut()
        assert near.lost.get(timeout=WAIT_S) in ("its machine has not answered for 1 s", "its machine has not answered for 2 s")
