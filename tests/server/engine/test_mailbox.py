"""server/engine/mailbox.py: one wake-up for all events of a step, each to its receiver."""

from __future__ import annotations

import asyncio
import logging
import threading

from support.texts import RECORD

from npucompile.runtime.request import FinishEvent, TokenEvent
from npucompile.server.engine.mailbox import Mailbox


class Loop:
    """A loop that runs what it is called for when a test says so."""

    def __init__(self):
        self.calls = []

    def call_soon_threadsafe(self, callback):
        self.calls.append(callback)

    @property
    def awake(self):
        return bool(self.calls)

    def run(self):
        (callback,) = self.calls
        self.calls.clear()
        callback()


def token(name, i=0):
    return TokenEvent(name, (i,))


def end(name):
    return FinishEvent(name, "stop", 1, 1, RECORD)


def test_a_step_of_many_requests_wakes_the_loop_once():
    loop, delivered = Loop(), {name: [] for name in "abc"}
    box = Mailbox(loop)
    for name in "abc":
        box.open(name, delivered[name].append, delivered[name].append)
    box.deliver([token(name, 1) for name in "abc"])
    box(token("a", 2))
    loop.run()
    assert not loop.awake
    assert delivered == {"a": [token("a", 1), token("a", 2)], "b": [token("b", 1)], "c": [token("c", 1)]}
    box.deliver([token("b", 3)])
    loop.run()
    assert delivered["b"][-1] == token("b", 3)


def test_what_follows_a_step_is_called_in_one_turn_and_one_that_raises_keeps_no_other(caplog):
    calls, called = [], []
    loop = Loop()
    loop.call_soon = calls.append
    box = Mailbox(loop)
    for call in (lambda: called.append(1), lambda: 1 / 0, lambda: called.append(2)):
        box.soon(call)
    (call,) = calls
    with caplog.at_level(logging.CRITICAL):
        call()
    assert called == [1, 2]
    box.soon(lambda: called.append(3))
    calls[1]()
    assert called == [1, 2, 3]


def test_a_receiver_that_raises_loses_its_own_request_and_no_other(caplog):
    loop, delivered, ended, failed = Loop(), [], [], []
    box = Mailbox(loop, failed.append)

    def broken(event):
        raise KeyError(event.request_id)

    box.open("a", broken, ended.append)
    box.open("b", delivered.append, ended.append)
    with caplog.at_level(logging.ERROR):
        for number in range(2):
            box.deliver([token("a", number), token("b", number)])
            loop.run()
    assert delivered == [token("b"), token("b", 1)]
    assert (failed, ended) == (["a"], [None])
    assert caplog.text.count("the receiver of 'a' raised") == 1


def test_nothing_follows_the_end_and_nothing_is_kept():
    loop, delivered = Loop(), []
    box = Mailbox(loop)
    for name in "abc":
        box.open(name, delivered.append, delivered.append)
    box.close("b")
    box.deliver([token("b"), end("a"), token("a")])
    loop.run()
    assert delivered == [end("a")]
    box.close("c")
    assert not box._receivers


def test_the_engine_survives_a_loop_that_is_gone():
    loop = asyncio.new_event_loop()
    box = Mailbox(loop)
    loop.close()
    box(token("r"))
    box(token("r"))
    assert not box._events


def test_on_a_real_loop_all_comes_from_another_thread():
    got = []

    async def listen():
        over = asyncio.Event()

        def receive(event):
            got.append(event)
            if isinstance(event, FinishEvent):
                over.set()

        box = Mailbox(asyncio.get_running_loop())
        box.open("a", receive, receive)

        def run():
            for number in range(300):
                box.deliver([token("a", number)])
            box.deliver([end("a")])

        thread = threading.Thread(target=run)
        thread.start()
        await asyncio.wait_for(over.wait(), 60)
        thread.join()

    asyncio.run(listen())
    assert [i for event in got[:-1] for i in event.token_ids] == list(range(300))
