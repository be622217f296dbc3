"""server/response/run.py: a stream that is cut anywhere and taken up again has every event once, and what nobody waits for ends."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import ManualEngine
from support.texts import byte_codec

from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.requests.create_body import read_create
from npucompile.server.response import run as response_run
from npucompile.server.response.prepare import Owners, keeping, prepare
from npucompile.server.response.run import ResponseRun

MODEL = ServedModel("tiny", max_model_len=4096, vocab_size=300)
GRACE_S = 0.05


class Engine(ManualEngine):
    """What comes is for all requests."""

    def emit(self, text):
        for name in self.sinks:
            super().emit(name, text)

    def finish(self, reason="stop"):
        for name in self.sinks:
            super().finish(name, reason, 1)


class Log:
    """A reader that notes what it gets."""

    def __init__(self):
        self.events, self.done, self.error = [], False, None

    def read(self, events, done):
        self.events += events
        self.done = done

    def failed(self, error):
        self.error = error

    @property
    def last(self):
        return self.events[-1]["sequence_number"] if self.events else -1


def started(reader, **fields):
    """A run, its engine and its service."""
    engine = Engine()
    limits = SocketLimits(resume_grace_s=GRACE_S, max_stored_bytes=fields.pop("room", 10**6), max_replay_bytes=fields.pop("replay", 10**5))
    service = Service(engine, byte_codec(), MODEL, limits=limits)
    body = read_create({"input": "ab", **fields})
    run = ResponseRun(service, prepare(service, body, "resp_1"), keeping(service, body, Owners("me", "socket")))
    run.start(reader)
    return run, engine, service


async def settled():
    """Everything that the engine has emitted is delivered."""
    for _ in range(3):
        await asyncio.sleep(0)


CUTS = st.lists(st.one_of(st.sampled_from(["cut", "leave", "rejoin"]), st.text("abü", min_size=1, max_size=4)), max_size=20)


@given(CUTS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_stream_that_is_cut_has_every_event_once_and_in_order(script, background):
    """`cut` reconnects at once; after `leave` nobody reads until `rejoin`."""

    async def play():
        reader = Log()
        run, engine, service = started(reader, resumable=not background, background=background)
        pieces, written = [reader], ""

        def rejoin():
            stored = service.store.named("resp_1", ("me",))
            log = Log()
            run.join(log)
            log.read(stored.replay.after(max(piece.last for piece in pieces)), False)
            pieces.append(log)

        away = False
        for action in script:
            if action in ("cut", "leave") and not away:
                assert run.leave(pieces[-1]) == ()
                away = True
            if action in ("cut", "rejoin") and away:
                rejoin()
                away = False
            if action not in ("cut", "leave", "rejoin"):
                engine.emit(action)
                written += action
                await settled()
        if away:
            rejoin()
        engine.finish()
        await settled()
        events = [event for piece in pieces for event in piece.events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event.get("delta", "") for event in events) == written
        assert pieces[-1].done
        assert events[-1]["type"] == "response.completed"
        assert engine.cancelled == []

    asyncio.run(play())


@pytest.mark.parametrize("fields", [{}, {"store": False}])
def test_without_a_reader_it_is_cancelled_at_once(fields):
    async def play():
        reader = Log()
        run, _, _ = started(reader, **fields)
        assert run.leave(reader) == ("resp_1",)

    asyncio.run(play())


@pytest.mark.parametrize("store", [True, False])
def test_one_that_can_be_resumed_is_cancelled_after_the_grace_time(store):
    async def play():
        reader = Log()
        run, engine, service = started(reader, resumable=True, store=store)
        assert run.leave(reader) == ()
        await asyncio.sleep(GRACE_S / 5)
        run.join(reader)
        await asyncio.sleep(GRACE_S * 2)
        assert engine.cancelled == []
        run.leave(reader)
        await asyncio.sleep(GRACE_S * 2)
        assert engine.cancelled == ["resp_1"]
        engine.finish("cancelled")
        await settled()
        assert service.store.named("resp_1", ("me",)).run is None
        assert service.admission.live == 0
        await asyncio.sleep(GRACE_S * 2)
        assert (service.store.find("resp_1", ("me",)) is not None) == store

    asyncio.run(play())


def test_one_that_ends_within_the_grace_time_is_not_cancelled():
    async def play():
        reader = Log()
        run, engine, service = started(reader, resumable=True)
        assert run.leave(reader) == ()
        engine.finish()
        await settled()
        assert run.ended.is_set()
        await asyncio.sleep(GRACE_S * 2)
        assert (engine.cancelled, service.admission.live) == ([], 0)

    asyncio.run(play())


def test_one_in_the_background_goes_on_to_its_end():
    async def play():
        run, engine, service = started(None, background=True)
        assert run.snapshot()["status"] == "in_progress"
        engine.emit("ab")
        await settled()
        assert run.snapshot()["output"][0]["content"][0]["text"] == "ab"
        engine.finish()
        await settled()
        stored = service.store.named("resp_1", ("me",))
        assert (json.loads(stored.body)["status"], stored.run, engine.cancelled) == ("completed", None, [])
        assert [event["type"] for event in stored.replay.after(-1)][-1] == "response.completed"

    asyncio.run(play())


def test_what_is_evicted_ends_unless_somebody_reads_it():
    async def play():
        reader = Log()
        run, engine, service = started(reader, background=True, room=3000)
        engine.emit("x" * 3000)
        await settled()
        assert (len(service.store), engine.cancelled) == (0, [])
        assert run.leave(reader) == ("resp_1",)
        alone, engine, service = started(None, background=True, room=3000)
        engine.emit("x" * 3000)
        await settled()
        assert engine.cancelled == ["resp_1"]
        engine.finish("cancelled")
        await settled()
        assert (len(service.store), alone.ended.is_set()) == (0, True)

    asyncio.run(play())


@pytest.mark.parametrize(("reason", "kept"), [("stop", True), ("length", True), ("cancelled", True), ("error", False)])
def test_a_conversation_is_kept_for_its_owner_or_for_the_socket(reason, kept):
    async def play(store, owner, other):
        _, engine, service = started(Log(), store=store)
        engine.emit("yes")
        engine.finish(reason)
        await settled()
        assert service.store.find("resp_1", (other,)) is None
        stored = service.store.named("resp_1", (owner,))
        assert (stored.body is not None) == store
        texts = None if stored.items is None else [(item.role, item.text) for item in stored.items]
        assert texts == ([("user", "ab"), ("assistant", "yes")] if kept else None)

    asyncio.run(play(True, "me", "socket"))
    asyncio.run(play(False, "socket", "me"))


def test_a_response_of_which_nothing_grows_is_named_to_the_store_once_a_while(monkeypatch):
    async def counted(**fields):
        waiting, puts = [], []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay_s, call, *_: waiting.append((delay_s, call)))
        _, engine, service = started(Log(), **fields)
        put = service.store.put
        monkeypatch.setattr(service.store, "put", lambda entry: (puts.append(entry.run is not None), put(entry)))
        for step in range(8):
            engine.emit("x")
            await settled()
            if step % 4 == 3:
                delay_s, call = waiting.pop()
                assert delay_s == response_run.NAME_EVERY_S
                call()
        engine.finish()
        await settled()
        waiting[0][1]()
        return puts

    # What began it came before the store was watched; after its end nothing does.
    assert asyncio.run(counted(store=True)) == [True, True, False]
    assert asyncio.run(counted(resumable=True)) == [True] * 10 + [False]
