"""server/mailbox.py: one wake-up for all events of a step or of several short ones, each to its receiver."""

from __future__ import annotations

import asyncio
import logging
import select
import threading

from hypothesis import given
from hypothesis import strategies as st
from support.texts import RECORD

from npucompile.runtime.request import FinishEvent, Logprobs, TokenEvent, joined
from npucompile.server import mailbox
from npucompile.server.mailbox import Mailbox

INTERVAL_S = 0.005


class Loop:
    """A loop whose time is said, and which hears the bell when it is told to."""

    def __init__(self):
        self.now_s, self.timers = 0.0, []

    def time(self):
        return self.now_s

    def add_reader(self, file, callback):
        self.file, self.callback = file, callback

    def call_at(self, when_s, callback):
        timer = Timer(self, when_s, callback)
        self.timers.append(timer)
        return timer

    @property
    def awake(self):
        return bool(select.select([self.file], [], [], 0)[0])

    def run(self):
        assert self.awake
        self.callback()

    def pass_time(self, until_s):
        while self.timers and self.timers[0].when_s <= until_s:
            (timer,) = self.timers
            timer.cancel()
            self.now_s = max(self.now_s, timer.when_s)
            timer.callback()
        self.now_s = until_s


class Timer:
    def __init__(self, loop, when_s, callback):
        self.loop, self.when_s, self.callback = loop, when_s, callback

    def cancel(self):
        if self in self.loop.timers:
            self.loop.timers.remove(self)


def token(name, i=0):
    return TokenEvent(name, (i,))


def end(name):
    return FinishEvent(name, "stop", 1, 1, RECORD)


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
        for number in range(2):
            box.deliver([token("a", number), token("b", number)])
            loop.run()
    assert delivered == [token("b"), token("b", 1)]
    assert failed == ["a"]
    assert caplog.text.count("the receiver of 'a' raised") == 1


def test_what_cannot_be_joined_comes_one_by_one(monkeypatch):
    def broken(events):
        raise KeyError("joined")

    monkeypatch.setattr(mailbox, "joined", broken)
    loop, delivered = Loop(), []
    box = Mailbox(loop, interval_s=INTERVAL_S)
    box.open("a", delivered.append)
    box.deliver([token("a", 0)])
    box.deliver([token("a", 1)])
    loop.run()
    box.deliver([end("a")])
    loop.run()
    assert delivered == [token("a", 0), token("a", 1), end("a")]


def test_nothing_follows_the_end_and_nothing_is_kept():
    loop, delivered = Loop(), []
    box = Mailbox(loop)
    for name in "abc":
        box.open(name, delivered.append)
    box.close("b")
    box.deliver([token("b"), end("a"), token("a")])
    loop.run()
    assert delivered == [end("a")]
    box.close("c")
    assert not box._receivers
    assert not box._silent


def test_the_engine_survives_a_loop_that_is_gone():
    loop = asyncio.new_event_loop()
    box = Mailbox(loop)
    loop.close()
    box(token("r"))
    box(token("r"))


def quick(box, loop, steps=2):
    """Steps of a millisecond of request "a", whose tokens then wait for one another."""
    for number in range(steps):
        loop.pass_time(loop.now_s + 0.001)
        box.deliver([token("a", number)])
        loop.run()


def test_tokens_of_short_steps_wait_for_one_another_and_are_one_event():
    loop, delivered = Loop(), []
    box = Mailbox(loop, interval_s=INTERVAL_S)
    box.open("a", delivered.append)
    quick(box, loop)
    delivered.clear()
    for number in range(3):
        loop.pass_time(loop.now_s + 0.001)
        box.deliver([token("a", number)])
        assert not loop.awake
    assert not delivered
    loop.pass_time(loop.now_s + INTERVAL_S)
    assert delivered == [TokenEvent("a", (0, 1, 2))]


def test_first_tokens_and_ends_do_not_wait_and_take_along_what_does():
    for urgent in ([token("b", 7)], [end("a")], [token("a", 8), end("b")]):
        loop, delivered = Loop(), []
        box = Mailbox(loop, interval_s=INTERVAL_S)
        for name in "ab":
            box.open(name, delivered.append)
        quick(box, loop)
        delivered.clear()
        loop.pass_time(loop.now_s + 0.001)
        # No token yet, so that its first one is still to come.
        box.deliver([token("a", 5), TokenEvent("b", (), (), (Logprobs(-1.0, ()),))])
        assert not loop.awake
        box.deliver(urgent)
        loop.run()
        ends = [event for event in urgent if isinstance(event, FinishEvent)]
        assert [event.request_id for event in delivered] == ["a", "b", *(event.request_id for event in ends)]
        assert delivered[0].token_ids[0] == 5


def test_what_waits_of_a_closed_request_is_dropped():
    loop, delivered = Loop(), []
    box = Mailbox(loop, interval_s=INTERVAL_S)
    box.open("a", delivered.append)
    quick(box, loop)
    delivered.clear()
    loop.pass_time(loop.now_s + 0.001)
    box.deliver([token("a")])
    assert not loop.awake
    box.close("a")
    loop.pass_time(1)
    assert not delivered
    assert not loop.timers


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0004, 0.001, 0.003, 0.007, 0.03]),
        st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), max_size=4),
        st.sets(st.sampled_from("abcd"), max_size=2),
        st.sampled_from([0.0, 0.0001, 0.002]),
    ),
    max_size=40,
)


@given(steps=STEPS, interval_s=st.sampled_from([0.0, 0.002, INTERVAL_S]))
def test_whatever_the_pace_each_request_gets_its_tokens_in_order_and_in_time_and_then_its_end(steps, interval_s):
    """Steps: time since the one before, tokens of each request, requests that end, how long the loop takes to hear."""
    loop, sent, live = Loop(), {name: [] for name in "abcd"}, set("abcd")
    got = {name: [] for name in "abcd"}
    box = Mailbox(loop, interval_s=interval_s)
    late_s, number, begun = max([0.0, *(hears_s for *_, hears_s in steps)]), 0, set()
    for name in "abcd":
        box.open(name, lambda event: got[event.request_id].append((loop.now_s, event)))
    for wait_s, tokens, ends, hears_s in steps:
        loop.pass_time(loop.now_s + wait_s)
        events, urgent = [], False
        for name in [name for name in tokens if name in live]:
            ids = tuple(range(number, number + tokens[name]))
            number += len(ids)
            events.append(TokenEvent(name, ids, tuple(Logprobs(-float(i), ()) for i in ids)))
            urgent = urgent or (bool(ids) and name not in begun)
            begun |= {name} if ids else set()
        events += [end(name) for name in sorted(ends & live)]
        urgent = urgent or bool(ends & live)
        live -= ends
        for event in events:
            sent[event.request_id].append((loop.now_s, event))
        if not events:
            continue
        box.deliver(events)
        assert loop.awake or not urgent
        loop.pass_time(loop.now_s + hears_s)
        if loop.awake:
            loop.run()
    loop.pass_time(loop.now_s + 1)
    assert not loop.timers
    for name in "abcd":
        assert [i for _, event in got[name] if isinstance(event, TokenEvent) for i in event.token_ids] == [
            i for _, event in sent[name] if isinstance(event, TokenEvent) for i in event.token_ids
        ]
        kinds = [type(event) for _, event in got[name]]
        assert kinds.count(FinishEvent) == (name not in live)
        assert FinishEvent not in kinds[:-1]
        when_s = {i: at for at, event in sent[name] if isinstance(event, TokenEvent) for i in event.token_ids}
        for at, event in got[name]:
            if isinstance(event, TokenEvent):
                assert [logprob.logprob for logprob in event.logprobs] == [-float(i) for i in event.token_ids]
                assert all(at - when_s[i] <= interval_s + late_s + 1e-9 for i in event.token_ids)


def test_events_of_a_request_that_come_together_are_one_in_every_field():
    scores = [Logprobs(-float(i), ((i, -0.5),)) for i in range(5)]
    parts = [TokenEvent("a", (), (), tuple(scores[:2])), TokenEvent("a", (1,), (scores[2],)), TokenEvent("a", (2, 3), tuple(scores[3:]))]
    others = [token("b"), end("c"), token("c")]
    events = [parts[0], others[0], parts[1], *others[1:], parts[2], end("a"), token("a", 9)]
    assert joined(events) == [TokenEvent("a", (1, 2, 3), tuple(scores[2:]), tuple(scores[:2])), *others, end("a"), token("a", 9)]
    assert joined(events)[1] is others[0]


def test_on_a_real_loop_all_comes_from_another_thread():
    got = []

    async def listen():
        over = asyncio.Event()

        def receive(event):
            got.append(event)
            if isinstance(event, FinishEvent):
                over.set()

        box = Mailbox(asyncio.get_running_loop(), interval_s=INTERVAL_S)
        box.open("a", receive)

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
