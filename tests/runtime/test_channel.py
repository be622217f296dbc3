"""runtime/channel.py: records come once and in order, and an end that goes is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from npucompile.runtime.channel import Channel

WAIT_S = 20


class End:
    """One end, what it has taken, and whether it was told that the other has gone."""

    def __init__(self, side: socket.socket) -> None:
        self.taken: list[Any] = []
        self.ended, self.last = threading.Event(), threading.Event()
        self.channel = Channel(Connection(side.detach()), self._take, self.ended.set)

    def _take(self, record: Any) -> None:
        if record == "bad":
            raise ValueError("one that is not handled")
        if record == "last":
            self.last.set()
        self.taken.append(record)


@contextmanager
def pair() -> Iterator[tuple[End, End]]:
    ends = [End(side) for side in socket.socketpair()]
    # Before it starts, too, nothing is lost.
    ends[0].channel.send("first")
    for end in ends:
        end.channel.start()
    yield ends[0], ends[1]


def test_records_come_in_order_both_ways_however_large_and_one_that_is_not_handled_costs_no_other(caplog: Any) -> None:
    with pair() as (near, far):
        large = bytes(3 << 20)
        for number in range(2000):
            near.channel.send(number)
            far.channel.send(-number)
        near.channel.send(large)
        far.channel.send("bad")
        for end in (near, far):
            end.channel.send("last")
        assert near.last.wait(WAIT_S)
        assert far.last.wait(WAIT_S)
        assert far.taken == ["first", *range(2000), large, "last"]
        assert near.taken == [*(-number for number in range(2000)), "last"]
        assert "str was not handled" in caplog.text


def test_what_was_sent_before_an_end_closes_arrives_and_then_the_other_is_told() -> None:
    with pair() as (near, far):
        near.channel.send("last")
        near.channel.close()
        assert far.ended.wait(WAIT_S)
        assert far.taken == ["first", "last"]
        # Nobody reads it: dropped, not raised.
        far.channel.send("late")
        far.channel.close()
