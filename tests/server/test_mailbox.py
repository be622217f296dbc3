"""server/mailbox.py: one wake-up for all events of a step, each to its receiver."""

from __future__ import annotations

import asyncio
import logging
import select

from support.texts import RECORD

from npucompile.runtime.request import FinishEvent, TokenEvent
from npucompile.server.mailbox import Mailbox


class Loop:
    def add_reader(self, file, callback):
        self.file, self.callback = file, callback

    @property
    def awake(self):
        return bool(select.select([self.file], [], [], 0)[0])

    def run(self):
        assert self.awake
        self.callback()


def token(name, i=0):
    return TokenEvent(name, (i,))


def test_a_step_of_many_requests_wakes_the_loop_once():
    loop, delivered = Loop(), {name: [] for name in "abc"}
    box = Mailbox(loop)
    for name in "abc":
        box.open(name, delivered[name].append)
    box.deliver([token(name, 1) for name in "abc"])
    box(token("a", 2))
    loop.run()
    assert not loop.awake
    assert delivered == {"a": [token("a", 1), token("a", 2)], "b": [token("b", 1)], "c": [token("c", 1)]}
    box.deliver([token("b", 3)])
    loop.run()
    assert delivered["b"][-1] == token("b", 3)


def test_a_receiver_that_raises_loses_its_own_request_and_no_other(caplog):
    loop, delivered, failed = Loop(), [], []
    box = Mailbox(loop, failed.append)

    def broken(event):
        raise KeyError(event.request_id)

    box.open("a", broken)
    box.open("b", delivered.append)
    with caplog.at_level(logging.ERROR):
        box.deliver([token("a"), token("b"), token("a", 1), token("b", 1)])
        loop.run()
    assert delivered == [token("b"), token("b", 1)]
    assert failed == ["a"]
    assert caplog.text.count("the receiver of 'a' raised") == 1


def test_nothing_follows_the_end_and_nothing_is_kept():
    loop, delivered = Loop(), []
    box = Mailbox(loop)
    end = FinishEvent("a", "stop", 1, 1, RECORD)
    for name in "ab":
        box.open(name, delivered.append)
    box.close("b")
    box.deliver([token("b"), end, token("a")])
    loop.run()
    assert delivered == [end]
    assert not box._receivers


def test_the_engine_survives_a_loop_that_is_gone():
    loop = asyncio.new_event_loop()
    box = Mailbox(loop)
    loop.close()
    box(token("r"))
    box(token("r"))
