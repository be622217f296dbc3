"""server/socket/websocket.py: the policies of one socket, over ASGI messages in memory, so that the test decides every pause."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time

import pytest
from support.scripted import ManualEngine
from support.texts import TEXT, byte_codec, trained_tokenizer

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import TokenEvent
from npucompile.server.app import create_app
from npucompile.server.engine.lifecycle import Lifecycle
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.requests.create_body import INLINE_PROMPT_CHARS
from npucompile.server.response.progress import Response
from npucompile.server.text.tokenizer import TextTokenizer

MODEL = ServedModel("tiny", max_model_len=3 * INLINE_PROMPT_CHARS, vocab_size=256)


class Peer:
    """The other end of a socket: frames go in by `send`, what the server sends comes out by `receive`."""

    def __init__(self, app, *offered):
        self._inbox = asyncio.Queue()
        self._outbox = asyncio.Queue()
        self.readable = asyncio.Event()
        self.readable.set()
        self.broken = False
        self.closable = True
        scope = {
            "type": "websocket",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "query_string": b"",
            "headers": [],
            "subprotocols": list(offered),
            "extensions": {"websocket.http.response": {}},
        }
        self._inbox.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._take))

    async def _take(self, message):
        if message["type"] == "websocket.send":
            await self.readable.wait()
            if self.broken:
                raise RuntimeError("Unexpected ASGI message 'websocket.send', after sending 'websocket.close'.")
        if message["type"] == "websocket.close" and not self.closable:
            await asyncio.Event().wait()
        self._outbox.put_nowait(message)

    def send(self, **event):
        self._inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def send_raw(self, **message):
        self._inbox.put_nowait({"type": "websocket.receive", **message})

    def leave(self):
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": 1001})

    async def message(self):
        return await asyncio.wait_for(self._outbox.get(), 30)

    async def receive(self, kind=None):
        """The next event; with `kind`, the next of that type."""
        while True:
            message = await self.message()
            assert message["type"] == "websocket.send", message
            event = json.loads(message["text"])
            if kind in (None, event["type"]):
                return event

    async def ended(self):
        await asyncio.wait_for(self.task, 30)

    def unread(self):
        return [self._outbox.get_nowait() for _ in range(self._outbox.qsize())]


def scenario(play, *offered, codec=None, **limits):
    """Runs `play(peer, engine)` with the connection open; the peer leaves at the end."""
    engine = ManualEngine()

    async def run():
        app = create_app(Service(engine, codec or byte_codec(), MODEL), SocketLimits(**limits))
        peer = Peer(app, *offered)
        accepted = await peer.message()
        assert accepted["type"] == "websocket.accept"
        assert accepted["subprotocol"] == (offered[0] if offered else None)
        await play(peer, engine)
        peer.leave()
        await peer.ended()

    asyncio.run(run())


async def opened(peer, stream_id, **fields):
    peer.send(type="response.create", stream_id=stream_id, **({"input": "x"} | fields))
    event = await peer.receive("response.in_progress")
    assert event["stream_id"] == stream_id
    return event["response"]["id"]


def test_cancel_goes_to_every_completion_that_has_not_ended():
    async def play(peer, engine):
        response_id = await opened(peer, "a", n=3)
        ids = [response_id, f"{response_id}_1", f"{response_id}_2"]
        assert list(engine.requests) == ids
        engine.emit(ids[1], "x")
        engine.finish(ids[1], "stop", 1)
        assert (await peer.receive("response.output_item.done"))["item"]["status"] == "completed"
        peer.send(type="response.cancel", stream_id="a")
        peer.send(type="response.cancel", stream_id="z")
        assert (await peer.receive())["error"]["code"] == "response_not_found"
        assert engine.cancelled == [ids[0], ids[2]]
        assert engine.passes == 1
        # What comes next in its lane waits until the last of them has ended.
        engine.finish(ids[0], "cancelled")
        peer.send(type="response.create", input="x", stream_id="a")
        peer.send(type="response.cancel", stream_id="z")
        assert (await peer.receive("error"))["error"]["code"] == "response_not_found"
        assert len(engine.requests) == 3
        engine.finish(ids[2], "cancelled")
        last = await peer.receive("response.cancelled")
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete", "completed", "incomplete"]
        assert (await peer.receive("response.created"))["stream_id"] == "a"

    scenario(play)


def test_a_fault_of_the_server_is_logged_and_told_and_survived(caplog):
    async def play(peer, engine):
        engine.refusal = KeyError("a secret")
        with caplog.at_level(logging.ERROR, logger="npucompile.server.socket.websocket"):
            peer.send(type="response.create", input="x", stream_id="a")
            refused = await peer.receive()
        assert (refused["status"], refused["error"]["code"]) == (500, "internal_error")
        assert "a secret" not in str(refused)
        assert "a secret" in caplog.text
        engine.refusal = None
        await opened(peer, "a")

    scenario(play)


def test_a_response_that_ended_is_freed():
    def live_responses():
        gc.collect()
        return [candidate for candidate in gc.get_objects() if type(candidate) is Response]

    others = live_responses()

    async def play(peer, engine):
        first, second = await opened(peer, "a"), await opened(peer, "b")
        assert len(live_responses()) - len(others) == 2
        engine.finish(first)
        await peer.receive("response.completed")
        del engine.sinks[first]
        assert len(live_responses()) - len(others) == 1
        engine.finish(second)
        await peer.receive("response.completed")

    scenario(play)


def test_a_transport_that_closed_itself_ends_the_socket():
    engine = ManualEngine()

    async def run():
        peer = Peer(create_app(Service(engine, byte_codec(), MODEL)))
        await peer.message()
        response_id = await opened(peer, "a")
        peer.broken = True
        engine.emit(response_id, "x")
        await peer.ended()
        assert engine.cancelled == [response_id]

    asyncio.run(run())


def served(engine=None, **limits):
    engine = engine or ManualEngine()
    return engine, Peer(create_app(Service(engine, byte_codec(), MODEL), SocketLimits(**limits)))


@pytest.mark.parametrize("limits", [{"max_queue_bytes": 4000}, {"slow_reader_s": 0.05}], ids=["bytes", "time"])
def test_a_client_that_does_not_read_is_closed_with_1008_and_its_responses_cancelled(limits):
    async def run():
        engine, peer = served(**limits)
        await peer.message()
        first, second = await opened(peer, "a"), await opened(peer, "b")
        peer.readable.clear()
        for _ in range(40):
            engine.emit(first, "x")
        await peer.ended()
        assert engine.cancelled == [first, second]
        assert engine.passes == 1
        (close,) = peer.unread()
        assert (close["type"], close["code"]) == ("websocket.close", 1008)
        assert ("the limit is 4000" if "max_queue_bytes" in limits else "0.05 s behind") in close["reason"]
        assert len(close["reason"].encode()) <= 123

    asyncio.run(run())


def test_after_more_refusals_than_a_client_may_have_the_socket_is_read_later():
    wrong = [{"type": "what"}, {"type": "response.cancel", "response_id": "resp_x"}, {"type": "response.create", "input": "x" * 10**5}]
    wrong.append({"type": "response.resume", "response_id": "resp_x", "starting_after": 0})
    wrong.append({"type": "response.steer", "response_id": "resp_x", "input": "y"})

    async def play(peer, engine):
        began_s = time.monotonic()
        for number in range(18):
            peer.send(**wrong[number % len(wrong)])
        for _ in range(18):
            assert (await peer.receive())["type"] in ("error", "response.steer.failed")
        # Ten at once, and then one each fortieth of a second; the last one's wait is still to come.
        assert time.monotonic() - began_s >= 0.17
        await opened(peer, "a")

    scenario(play, refusals_per_s=40)


def test_what_waited_in_a_lane_is_refused_no_faster():
    async def play(peer, engine):
        first = await opened(peer, "a")
        for _ in range(17):
            peer.send(type="response.create", stream_id="a", input="x")
        await opened(peer, "b")  # so that all of these were read
        engine.refusal = RequestError("no", code="overloaded")
        began_s = time.monotonic()
        engine.finish(first)
        for _ in range(17):
            await peer.receive("error")
        assert time.monotonic() - began_s >= 0.14
        engine.refusal = None
        await opened(peer, "a")

    scenario(play, refusals_per_s=40)


def test_a_client_that_wakes_up_too_late_sees_no_gap():
    async def run():
        engine, peer = served(max_queue_bytes=4000)
        await peer.message()
        response_id = await opened(peer, "a")
        peer.readable.clear()
        for _ in range(40):
            engine.emit(response_id, "x")
        # One iteration of the event loop: the bound is exceeded, the socket is not closed yet, and the writer gets to run.
        await asyncio.sleep(0)
        peer.readable.set()
        engine.emit(response_id, "y")
        await peer.ended()
        *sent, close = peer.unread()
        assert close["code"] == 1008
        numbers = [json.loads(message["text"])["sequence_number"] for message in sent]
        assert numbers == list(range(2, 2 + len(numbers)))

    asyncio.run(run())


def test_a_client_that_cannot_even_take_the_close_frame_is_dropped():
    async def run():
        engine, peer = served(max_queue_bytes=4000, close_timeout_s=0)
        await peer.message()
        response_id = await opened(peer, "a")
        peer.readable.clear()
        peer.closable = False
        for _ in range(40):
            engine.emit(response_id, "x")
        await peer.ended()
        assert engine.cancelled == [response_id]
        assert peer.unread() == []

    asyncio.run(run())


def test_a_client_that_does_not_read_is_not_read():
    """Each frame is answered, and a client that sends without reading would fill the server's memory with the answers."""

    async def run():
        _, peer = served(slow_reader_s=0.5, max_frame_bytes=10**6)
        await peer.message()
        peer.readable.clear()
        frame = json.dumps({"type": "response.cancel", "response_id": "\x7f" * 900_000})
        for _ in range(5000):
            peer.send_raw(text=frame)
        await peer.ended()
        # More than could wait was never taken in: the answers to what was are within RESUME_BYTES.
        assert peer._inbox.qsize() > 1000
        assert [message.get("code") for message in peer.unread()] == [1008]

    asyncio.run(run())


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.cancel", "response_id": "\x7f" * 100_000},
        {"type": "\x7f" * 100_000},
        {"type": "response.create", "input": "x", "model": "\x7f" * 100_000},
        {"type": "response.create", "input": "x", "model": "\x7f" * 1000},
        {"type": "response.create", "input": "x", "\x7f" * 100_000: 1},
        {"type": "response.create", "input": {str(i): i for i in range(10_000)}},
        {"type": "response.create", "input": "x", "stop": ["\x7f" * 100_000]},
        {"type": "response.create", "input": [{"role": "user", "content": "x", "\x7f" * 100_000: 1}]},
        {"type": "response.create", "input": [{"role": "user", "content": ""}] * 10_000},
        {"type": "response.create", "input_token_ids": [2**200]},
        {"type": "response.create", "input": "x", "seed": 2**3000},
    ],
    ids=lambda event: str(event)[:60],
)
def test_what_is_refused_is_not_echoed_whole(event):
    async def play(peer, engine):
        peer.send(**event)
        message = await peer.message()
        assert len(message["text"]) < 2500
        assert json.loads(message["text"])["type"] == "error"

    scenario(play, max_frame_bytes=10**6)


def test_an_exception_in_one_response_ends_that_one_alone(caplog):
    async def play(peer, engine):
        first, second, third = [await opened(peer, name) for name in "abc"]
        with caplog.at_level(logging.ERROR, logger="npucompile.server.socket.websocket"):
            # A token that no tokenizer has, between events of others, in one turn of the loop.
            engine.emit(first, "x")
            engine.sinks[second](TokenEvent(second, ("not a token",)))
            engine.emit(second, "never seen")
            engine.emit(third, "z")
            received = [await peer.receive() for _ in range(7)]
        assert [event["delta"] for event in received if "delta" in event] == ["x", "z"]
        (error,) = [event for event in received if event["type"] == "error"]
        assert (error["stream_id"], error["status"]) == ("b", 500)
        assert engine.cancelled == [second]
        engine.finish(second, "cancelled")
        await opened(peer, "b")

    scenario(play)


def test_what_is_said_while_the_server_ends():
    async def run():
        engine = ManualEngine()
        lifecycle = Lifecycle()
        app = create_app(lifecycle)
        early = Peer(app)
        assert (await early.message())["status"] == 503
        assert json.loads((await early.message())["body"])["error"]["code"] == "starting"
        lifecycle.service = Service(engine, byte_codec(), MODEL)
        peer = Peer(app)
        await peer.message()
        response_id = await opened(peer, "a")
        lifecycle.draining = True
        peer.send(type="response.create", input="x", stream_id="b")
        refused = await peer.receive()
        assert (refused["status"], refused["error"]["code"], refused["stream_id"]) == (503, "draining", "b")
        late = Peer(app)
        start = await late.message()
        assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"2")
        # What runs goes on.
        engine.finish(response_id, "stop")
        assert (await peer.receive("response.completed"))["stream_id"] == "a"
        peer.leave()
        await peer.ended()

    asyncio.run(run())


def test_a_long_prompt_does_not_stop_the_loop():
    """The tokenizer held the GIL for all of it: with 4 MB every stream paused for five seconds."""
    codec, model = TextTokenizer(trained_tokenizer()), ServedModel("tiny", max_model_len=10**9, vocab_size=400)

    async def run():
        engine = ManualEngine()
        peer = Peer(create_app(Service(engine, codec, model), SocketLimits(max_frame_bytes=10**7)))
        await peer.message()
        gaps, last = [0.0], time.perf_counter()
        peer.send(type="response.create", input=TEXT * 10_000, stream_id="a")
        began = last
        while not engine.requests:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        took = last - began
        peer.leave()
        await peer.ended()
        return max(gaps) / took

    # A ratio, whatever the machine does, and of three the best: where the lock was held it was always 1.
    assert min(asyncio.run(run()) for _ in range(3)) < 0.4


@pytest.mark.parametrize("chars", [10, INLINE_PROMPT_CHARS + 1])
def test_long_prompts_are_tokenized_off_the_loop(chars):
    threads = []

    class Watched(TextTokenizer):
        def encode(self, text, **options):
            threads.append(threading.current_thread())
            return super().encode(text, **options)

    async def play(peer, engine):
        response_id = await opened(peer, "a", input="x" * chars)
        assert len(engine.requests[response_id].prompt) == chars

    scenario(play, codec=Watched(byte_codec().library))
    (thread,) = threads
    assert (thread is threading.current_thread()) == (chars <= INLINE_PROMPT_CHARS)
