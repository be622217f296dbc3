"""server/client.py: the client against a scripted server, so that a mistake shared by both ends of the protocol shows."""

from __future__ import annotations

import asyncio
import json
import socket

import msgpack
import pytest
from websockets.asyncio.server import serve

from npucompile.graphs.errors import ProtocolError, RequestError
from npucompile.server.client import Client, CompletionOutput, stream_text
from npucompile.server.requests.frames import JSON, MSGPACK

TIMEOUT_S = 60


class Peer:
    """The server's end of one socket."""

    def __init__(self, websocket):
        self.websocket = websocket
        self.packed = websocket.subprotocol == MSGPACK

    async def receive(self):
        frame = await asyncio.wait_for(self.websocket.recv(), TIMEOUT_S)
        assert isinstance(frame, bytes if self.packed else str)
        return msgpack.unpackb(frame) if self.packed else json.loads(frame)

    async def send(self, kind, stream_id=None, **fields):
        event = {"type": kind, **fields} | ({} if stream_id is None else {"stream_id": stream_id})
        await self.websocket.send(msgpack.packb(event) if self.packed else json.dumps(event))

    async def created(self, stream_id):
        await self.send("response.created", stream_id, response={"id": f"resp_{stream_id}"})

    async def delta(self, stream_id, text, index=0):
        ids = [ord(char) for char in text]
        await self.send("response.output_text.delta", stream_id, output_index=index, delta=text, token_ids=ids)

    async def done(self, stream_id, *texts, status="completed", **fields):
        output = [item(text, status) for text in texts]
        response = {"id": f"resp_{stream_id}", "status": status, "output": output, "usage": {"total_tokens": 9}, **fields}
        await self.send(f"response.{status}", stream_id, response=response)

    async def error(self, code, stream_id=None, param=None):
        error = {"type": "invalid_request_error", "code": code, "message": f"it is {code}", "param": param}
        await self.send("error", stream_id, error=error)


def logprobs(text):
    return tuple({"token": char, "logprob": -0.5} for char in text)


def item(text, status="completed"):
    part = {"type": "output_text", "text": text, "logprobs": list(logprobs(text))}
    return {"status": status, "content": [part]}


def play(script, test, subprotocols=(JSON, MSGPACK)):
    """Runs `script(peer)` for every connection and `test(url)` against it; a script that fails, fails the test."""
    failures = []

    async def handler(websocket):
        try:
            await script(Peer(websocket))
            await websocket.wait_closed()
        except Exception as failure:
            failures.append(failure)

    async def run():
        async with serve(handler, "127.0.0.1", 0, subprotocols=subprotocols, compression=None) as server:
            port = server.sockets[0].getsockname()[1]
            async with asyncio.timeout(TIMEOUT_S):
                await test(f"ws://127.0.0.1:{port}/v1/responses")

    asyncio.run(run())
    if failures:
        raise failures[0]


@pytest.mark.parametrize("subprotocol", [JSON, MSGPACK])
def test_a_response_is_iterated_to_its_last_event(subprotocol):
    async def script(peer):
        assert await peer.receive() == {"type": "response.create", "stream_id": "c0", "input": "Hi", "top_k": 3}
        await peer.created("c0")
        await peer.delta("c0", "a")
        await peer.done("c0", "a")
        await peer.delta("c0", "after the end")

    async def test(url):
        async with await Client.connect(url, subprotocol) as client:
            kinds = [event["type"] async for event in client.create("Hi", top_k=3)]
        assert kinds == ["response.created", "response.output_text.delta", "response.completed"]

    play(script, test)


def test_responses_are_told_apart_by_stream():
    async def script(peer):
        first, second = await peer.receive(), await peer.receive()
        assert (first["stream_id"], first["input"]) == ("c0", "one")
        assert (second["stream_id"], second["input_token_ids"]) == ("mine", [1, 2])
        for stream_id in ("mine", "c0"):
            await peer.created(stream_id)
        for char in "xyz":
            await peer.delta("c0", char)
            await peer.delta("mine", char.upper())
        await peer.done("mine", "XYZ", status="incomplete")
        await peer.done("c0", "xyz")

    async def test(url):
        async with await Client.connect(url) as client:
            first = await client.create("one").start()
            second = await client.create([1, 2], stream_id="mine").start()
            # Read one after the other, though the events come mixed.
            assert await first.completion() == CompletionOutput(
                "resp_c0", "completed", "xyz", tuple(b"xyz"), {"total_tokens": 9}, logprobs("xyz")
            )
            assert await second.completion() == CompletionOutput(
                "resp_mine", "incomplete", "XYZ", tuple(b"XYZ"), {"total_tokens": 9}, logprobs("XYZ")
            )

    play(script, test)


def test_several_completions_are_put_together_apart():
    async def script(peer):
        assert await peer.receive() == {
            "type": "response.create",
            "stream_id": "c0",
            "input": "Hi",
            "n": 3,
            "top_logprobs": 1,
            "speculative_tokens": 0,
        }
        await peer.created("c0")
        await peer.delta("c0", "x", 1)
        await peer.delta("c0", "ab", 0)
        await peer.delta("c0", "yz", 1)
        response = {"id": "resp_c0", "status": "incomplete", "usage": {"total_tokens": 9}}
        response["output"] = [item("ab"), item("xyz", "incomplete"), item("")]
        await peer.send("response.incomplete", "c0", response=response)

    async def test(url):
        async with await Client.connect(url) as client:
            completions = await client.create("Hi", n=3, top_logprobs=1, speculative_tokens=0).completions()
        usage = {"total_tokens": 9}
        assert completions == (
            CompletionOutput("resp_c0", "completed", "ab", tuple(b"ab"), usage, logprobs("ab")),
            CompletionOutput("resp_c0", "incomplete", "xyz", tuple(b"xyz"), usage, logprobs("xyz")),
            CompletionOutput("resp_c0", "completed", "", (), usage, ()),
        )

    play(script, test)


def test_a_single_completion_without_an_item_is_empty():
    async def script(peer):
        for stream_id in ("c0", "c1"):
            await peer.receive()
            await peer.created(stream_id)
            await peer.done(stream_id, status="cancelled")

    async def test(url):
        async with await Client.connect(url) as client:
            assert await client.create("x").completion() == CompletionOutput("resp_c0", "cancelled", "", (), {"total_tokens": 9})
            assert await client.create("x", n=None).completions() == (
                CompletionOutput("resp_c1", "cancelled", "", (), {"total_tokens": 9}),
            )

    play(script, test)


def test_reading_one_completion_of_several_is_refused_before_any_is_asked_for():
    async def script(peer):
        assert (await peer.receive())["input"] == "good"
        await peer.created("c1")
        await peer.done("c1", "fine")

    async def test(url):
        async with await Client.connect(url) as client:
            with pytest.raises(RequestError, match="n is 2 where one completion is read; legal is 1") as caught:
                await client.create("bad", n=2).completion()
            assert caught.value.param == "n"
            assert (await client.create("good", n=1).completion()).text == "fine"

    play(script, test)
    with pytest.raises(RequestError, match="n is 2"):
        asyncio.run(anext(stream_text("ws://127.0.0.1:1/", "Hi", n=2)))


def test_cancel_names_the_stream_and_the_last_event_comes():
    async def script(peer):
        await peer.receive()
        await peer.created("c0")
        assert await peer.receive() == {"type": "response.cancel", "response_id": None, "stream_id": "c0"}
        await peer.done("c0", status="cancelled")
        # Too late to matter to anyone.
        await peer.error("response_not_found", "c0")
        assert (await peer.receive())["stream_id"] == "c1"
        await peer.created("c1")
        await peer.error("response_not_found")
        await peer.done("c1", "ok")

    async def test(url):
        async with await Client.connect(url) as client:
            stream = client.create("x")
            await stream.cancel()
            assert (await anext(stream))["type"] == "response.created"
            await stream.cancel()
            assert [event["type"] async for event in stream] == ["response.cancelled"]
            await stream.cancel()
            assert (await client.create("y").completion()).text == "ok"

    play(script, test)


def test_a_resume_of_what_nobody_keeps_is_refused_and_does_not_wait():
    async def script(peer):
        assert (await peer.receive())["type"] == "response.resume"
        await peer.error("response_not_found", "c0")

    async def test(url):
        async with await Client.connect(url) as client:
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(client.resume("resp_gone").completion(), 10)
            assert caught.value.code == "response_not_found"

    play(script, test)


def test_a_refusal_ends_the_stream_it_is_about():
    async def script(peer):
        await peer.receive()
        await peer.receive()
        await peer.error("context_length_exceeded", "c1", "input")
        await peer.created("c0")
        await peer.done("c0", "fine")

    async def test(url):
        async with await Client.connect(url) as client:
            first = await client.create("one").start()
            second = await client.create("two").start()
            with pytest.raises(RequestError, match="it is context_length_exceeded") as caught:
                await second.completion()
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
            assert (await first.completion()).text == "fine"

    play(script, test)


def test_a_refused_frame_ends_what_was_not_accepted_yet_and_nothing_else():
    async def script(peer):
        await peer.receive()
        await peer.created("c0")
        await peer.receive()
        await peer.error("frame_too_large")
        await peer.done("c0", "fine")

    async def test(url):
        async with await Client.connect(url) as client:
            first = client.create("one")
            await anext(first)
            second = client.create("two")
            assert [event["type"] async for event in second] == ["error"]
            assert [event["type"] async for event in first] == ["error", "response.completed"]

    play(script, test)


def test_a_failed_response_raises():
    async def script(peer):
        await peer.receive()
        await peer.created("c0")
        await peer.done("c0", status="failed", error={"code": "server_error", "message": "a step failed"})

    async def test(url):
        async with await Client.connect(url) as client:
            with pytest.raises(RequestError, match="a step failed"):
                await client.create("x").completion()

    play(script, test)


def test_a_lost_connection_reaches_every_stream_and_later_ones():
    async def script(peer):
        await peer.receive()
        await peer.receive()
        await peer.websocket.close(1013, "come back later")

    async def test(url):
        async with await Client.connect(url) as client:
            streams = [await client.create(text).start() for text in ("one", "two")]
            for stream in streams:
                with pytest.raises(ProtocolError, match="come back later"):
                    await stream.completion()
            with pytest.raises(ProtocolError, match="come back later"):
                await client.create("three").completion()

    play(script, test)


@pytest.mark.parametrize("frame", ["{", b"\xff", "[]", '{"type":"error"}', '{"type":"response.created","stream_id":[]}'])
def test_what_is_no_event_ends_the_connection_with_its_name(frame):
    async def script(peer):
        await peer.receive()
        await peer.websocket.send(frame)

    async def test(url):
        async with await Client.connect(url) as client:
            with pytest.raises(ProtocolError, match="the server sent something that is no event"):
                await client.create("x").completion()

    play(script, test)


def test_a_stream_id_is_used_once_at_a_time():
    async def script(peer):
        for text in ("one", "two"):
            assert (await peer.receive())["input"] == text
            await peer.created("a")
            await peer.done("a", text)

    async def test(url):
        async with await Client.connect(url) as client:
            first = await client.create("one", stream_id="a").start()
            with pytest.raises(ProtocolError, match="'a' is in use"):
                await client.create("other", stream_id="a").start()
            assert (await first.completion()).text == "one"
            assert (await client.create("two", stream_id="a").completion()).text == "two"

    play(script, test)


def test_stream_text_yields_the_deltas():
    async def script(peer):
        assert await peer.receive() == {"type": "response.create", "stream_id": "c0", "input": "Hi", "max_output_tokens": 4}
        await peer.created("c0")
        for text in ("In ", "the ", "beginning"):
            await peer.delta("c0", text)
        await peer.done("c0", "In the beginning")

    async def test(url):
        pieces = [piece async for piece in stream_text(url, "Hi", max_output_tokens=4)]
        assert pieces == ["In ", "the ", "beginning"]

    play(script, test)


def test_nobody_there_and_another_protocol_are_named():
    async def script(peer):
        pass

    async def test(url):
        with pytest.raises(ProtocolError, match=r"speaks subprotocol None, not 'npucompile\.msgpack'"):
            await Client.connect(url, MSGPACK)

    play(script, test, subprotocols=None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ProtocolError, match=f"cannot connect to ws://127.0.0.1:{port}/"):
        asyncio.run(Client.connect(f"ws://127.0.0.1:{port}/"))
    with pytest.raises(ProtocolError, match="cannot connect to http://x"):
        asyncio.run(Client.connect("http://x"))
