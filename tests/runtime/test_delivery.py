"""runtime/delivery.py: events of a step, one call for each shared sink, and sinks that raise."""

from __future__ import annotations

import logging

from npucompile.runtime.delivery import BatchSink, send
from npucompile.runtime.request import TokenEvent


class Shared(BatchSink):
    def __init__(self, error=None):
        self.calls, self.error = [], error

    def deliver(self, events):
        self.calls.append(list(events))
        if self.error:
            raise self.error


def events(*names):
    return [TokenEvent(name, (i,)) for i, name in enumerate(names)]


def test_each_sink_gets_its_own_in_order_and_a_shared_one_all_at_once():
    shared, own = Shared(), []
    a, b, c, d = events("a", "b", "c", "d")
    assert send([(shared, a), (own.append, b), (shared, c), (shared, d)]) == []
    assert (shared.calls, own) == ([[a, c, d]], [b])
    shared(a)
    assert shared.calls[-1] == [a]


def test_what_a_sink_that_raises_lost_is_said_and_others_get_theirs(caplog):
    shared, broken, own = Shared(), Shared(KeyError("x")), []
    a, b, c, d = events("a", "b", "c", "d")

    def raising(event):
        raise ValueError(event)

    with caplog.at_level(logging.ERROR):
        lost = send([(broken, a), (raising, b), (shared, c), (own.append, d)])
    assert sorted(lost, key=str) == sorted([a, b], key=str)
    assert (shared.calls, own) == ([[c]], [d])
    assert "the sink of 'a' raised on TokenEvent" in caplog.text
    assert "the sink of 'b' raised on TokenEvent" in caplog.text
