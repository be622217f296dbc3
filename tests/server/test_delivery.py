"""What is raised behind the engine ends the request with an error: none waits for ever, nothing runs on, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.responses import JSONResponse
from support.scripted import scripted
from support.texts import byte_codec
from websockets.asyncio.client import connect

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.output_stream import OutputStream
from npucompile.server.openai import chat_choice, sse
from npucompile.server.openai.choices import ChunkFrames
from npucompile.server.openai.completions import CompletionChoice
from npucompile.server.openai.generate import Answer
from npucompile.server.parsers.message import MessageParser
from npucompile.server.response import progress
from npucompile.server.response import run as response_run
from npucompile.server.response.events import ResponseEvents
from npucompile.server.socket.connection import Connection
from npucompile.server.storage.replay import KeptEvents
from npucompile.server.storage.store import ResponseStore

TIMEOUT_S = 30
WAITS = "ab…"
"""What the engine says before it waits to be cancelled; "ab" ends."""

CHAT, COMPLETIONS, GENERATE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
SOCKET = "websocket"
WHOLE = (CHAT, COMPLETIONS, GENERATE, RESPONSES)
STREAMS = tuple(f"{path} stream" for path in WHOLE)
OF_RESPONSES = (RESPONSES, f"{RESPONSES} stream", SOCKET)
LOGPROBS = {
    CHAT: {"logprobs": True},
    COMPLETIONS: {"logprobs": 1},
    GENERATE: {"return_logprob": True},
    RESPONSES: {"include": ["message.output_text.logprobs"]},
    SOCKET: {"include": ["message.output_text.logprobs"]},
}


class Fault(Exception):
    pass


def broken(original):
    """Does nothing but raise, unless what it is given is an error, which has to be said."""

    def call(*args, **kwargs):
        if "'error': {" in str(args):
            return original(*args, **kwargs)
        raise Fault

    return call


@dataclass(frozen=True)
class Stage:
    """A stage of delivery.

    Attributes:
        places: objects and the names of what raises there.
        early: kinds of requests that it meets while the engine runs, which has to stop then.
        late: those that it meets once the engine has ended.
        fields: of responses.
    """

    places: tuple
    early: tuple = ()
    late: tuple = ()
    fields: dict = field(default_factory=dict)


STAGES = {
    "detokenizer": Stage(((type(byte_codec().detokenizer()), "push"),), early=(*WHOLE, *STREAMS, SOCKET)),
    "text": Stage(((OutputStream, "push"),), early=(*WHOLE, *STREAMS, SOCKET)),
    "end of the text": Stage(((OutputStream, "finish"),), late=(*WHOLE, *STREAMS, SOCKET)),
    "parser": Stage(((MessageParser, "push"),), early=(f"{CHAT} stream", *OF_RESPONSES), late=(CHAT,)),
    "end of the parser": Stage(((MessageParser, "finish"),), late=(CHAT, f"{CHAT} stream", *OF_RESPONSES)),
    "log probabilities": Stage(
        ((chat_choice, "token_objects"), (progress, "token_objects"), (CompletionChoice, "_logprobs_of"), (Answer, "_entry")),
        early=(*STREAMS, RESPONSES, SOCKET),
        late=(CHAT, COMPLETIONS, GENERATE),
    ),
    "chunks": Stage(((ChunkFrames, "feed"),), early=(f"{CHAT} stream", f"{COMPLETIONS} stream")),
    "end of the chunks": Stage(((ChunkFrames, "end"),), late=(f"{CHAT} stream", f"{COMPLETIONS} stream")),
    "first events": Stage(((ResponseEvents, "begin"),), early=OF_RESPONSES),
    "events": Stage(((ResponseEvents, "delta"),), early=OF_RESPONSES),
    "last events": Stage(((ResponseEvents, "end"),), late=OF_RESPONSES),
    "response object": Stage(((progress.Response, "snapshot"),), late=OF_RESPONSES),
    "conversation": Stage(((progress.Response, "items"),), late=OF_RESPONSES),
    "stored response": Stage(((response_run, "encode_bytes"),), late=OF_RESPONSES),
    "store": Stage(((ResponseStore, "put"),), early=OF_RESPONSES),
    "events for later": Stage(((KeptEvents, "append"),), early=OF_RESPONSES, fields={"resumable": True}),
    "frames of a socket": Stage(((Connection, "encode_bytes"),), early=(SOCKET,)),
    "server-sent events": Stage(((sse, "encode_bytes"),), early=STREAMS),
    "answers": Stage(((JSONResponse, "render"),), late=WHOLE),
}


@pytest.fixture(scope="module")
def served():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    with scripted(chat=ChatFormat.of(template, "none", "hermes")) as (url, engine):
        yield url.removesuffix("/v1"), engine


def body_of(path, text, fields, logprobs):
    said = {CHAT: {"messages": [{"role": "user", "content": text}]}, COMPLETIONS: {"prompt": text}, GENERATE: {"text": text}}
    tools = {"tools": [{"type": "function", "name": "f"}]}
    messages = {"input": [{"role": "user", "content": text}], **tools, **fields}
    return {**said.get(path, messages), **(LOGPROBS[path] if logprobs else {})}


def over_http(url, kind, text, fields, logprobs):
    """Asks, and checks that the end is said; returns whether it is an error, and the response's id."""
    path, _, stream = kind.partition(" ")
    answer = httpx.post(f"{url}{path}", json={**body_of(path, text, fields, logprobs), "stream": bool(stream)}, timeout=TIMEOUT_S)
    if not stream:
        return answer.status_code == 500 and "error" in answer.json(), None
    data = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(event) for event in data if event != "[DONE]"]
    name = next((event["response"]["id"] for event in events if "response" in event), None)
    assert (data[-1] == "[DONE]") == (path in (CHAT, COMPLETIONS, GENERATE))
    return "error" in events[-1], name


def over_the_socket(url, text, fields, logprobs, monkeypatch):
    """The same; then the lane goes on."""

    async def play():
        address = f"{url.replace('http', 'ws')}{RESPONSES}"
        async with asyncio.timeout(TIMEOUT_S), connect(address) as socket:
            create = {"type": "response.create", "stream_id": "lane", **body_of(SOCKET, text, fields, logprobs)}
            await socket.send(json.dumps(create))
            events = []
            while not events or events[-1]["type"] not in ("error", "response.completed"):
                events.append(json.loads(await socket.recv()))
            monkeypatch.undo()
            await socket.send(json.dumps({"type": "response.create", "stream_id": "lane", "input": "ab"}))
            while (last := json.loads(await socket.recv()))["type"] != "response.completed":
                assert last["type"] != "error"
        name = next((event["response"]["id"] for event in events if "response" in event), None)
        assert events[-1].get("stream_id") == "lane"
        return events[-1].get("status") == 500, name

    return asyncio.run(play())


def is_over(stored):
    """Whether a response that is read again has ended; never a failure of the server."""
    assert stored.status_code in (200, 404)
    return stored.status_code == 404 or stored.json()["status"] != "in_progress"


def until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


CASES = [(name, kind, kind in stage.early) for name, stage in STAGES.items() for kind in (*stage.early, *stage.late)]


@pytest.mark.parametrize(("name", "kind", "early"), CASES, ids=lambda value: str(value))
def test_whatever_is_raised_the_request_ends_with_an_error_and_nothing_runs_on(served, monkeypatch, name, kind, early):
    url, engine = served
    stage, cancelled = STAGES[name], len(engine.cancelled)
    for place, attribute in stage.places:
        monkeypatch.setattr(place, attribute, broken(getattr(place, attribute)))
    text, logprobs = WAITS if early else "ab", name == "log probabilities"
    ask = over_the_socket if kind == SOCKET else over_http
    first = (url,) if kind == SOCKET else (url, kind)
    last = (monkeypatch,) if kind == SOCKET else ()
    failed, response_id = ask(*first, text, stage.fields, logprobs, *last)
    assert failed
    monkeypatch.undo()
    if early:
        assert engine.wait_cancelled(cancelled + 1)
    # What was cancelled ends a little later.
    until(lambda: httpx.post(f"{url}/abort_request", json={"abort_all": True}).json() == {"aborted": 0})
    if response_id is not None:
        until(lambda: is_over(httpx.get(f"{url}{RESPONSES}/{response_id}")))
