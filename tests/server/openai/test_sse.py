"""server/openai/sse.py and live.py: clients that leave, clients that do not read, and completions that fail."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import h11
import httpx
import pytest
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.openai import api as module


@pytest.fixture
def served():
    with scripted() as (url, engine):
        yield url, engine


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_completions(served, stream):
    url, engine = served
    with post(url, "/completions", {"prompt": ["ab…", "c…"], "max_tokens": 99, "stream": stream}):
        assert engine.wait_submitted(2)
        assert engine.cancelled == set()
    assert engine.wait_cancelled(2)


def post(url, path, body, version="1.1"):
    """A raw socket on which a request was sent and nothing is read."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    raw = socket.create_connection((parts.hostname, parts.port))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    first = f"POST {parts.path}{path} HTTP/{version}"
    head = f"{first}\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    raw.sendall(head.encode() + data)
    return raw


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 500)
    with scripted(lambda prompt: prompt * 1000 + "…") as (url, engine):
        with post(url, "/completions", {"prompt": "abcd", "max_tokens": 4000, "stream": True, "logprobs": 5}) as raw:
            assert engine.wait_cancelled()
            raw.settimeout(30)
            received = b""
            while data := raw.recv(65536):
                received += data
        assert received.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in received
        # Others go on.
        assert httpx.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 3}).json()["choices"][0]["text"] == "aaa"


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", True)])
def test_a_stream_has_chunks_where_the_client_knows_them(served, version, chunked):
    url, _ = served
    with post(url, "/completions", {"prompt": "abcd", "max_tokens": 4, "stream": True}, version) as raw:
        raw.settimeout(30)
        received = b""
        while not received.endswith(b"0\r\n\r\n" if chunked else b"data: [DONE]\n\n") and (data := raw.recv(65536)):
            received += data
        assert chunked or raw.recv(1) == b""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("Host", "localhost")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(received)
    if not chunked:
        reader.receive_data(b"")
    events = []
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        events.append(event)
    assert (b"transfer-encoding", b"chunked") in events[0].headers or not chunked
    body = b"".join(bytes(event.data) for event in events[1:]).decode()
    *chunks, last = [line.removeprefix("data: ") for line in body.split("\n") if line]
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "abcd"
    assert last == "[DONE]"


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_told(path, stream):
    """Over HTTP as an error, in a stream as an error in it; a response says itself that it failed."""
    form = ChatFormat(ChatTemplate("{{ messages[0].content }}"))
    with scripted(lambda prompt: f"{prompt}!", fails="!", chat=form) as (url, _):
        messages = {"messages": [{"role": "user", "content": "ab"}]}
        body = {"/completions": {"prompt": "ab"}, "/chat/completions": messages, "/responses": {"input": "ab"}}[path]
        answer = httpx.post(f"{url}{path}", json={**body, "stream": stream})
    if path == "/responses":
        assert answer.status_code == 200
        assert '"status":"failed"' in answer.text
        assert "the device is gone" in answer.text
    elif stream:
        *_, error, done = (line.removeprefix("data: ") for line in answer.text.split("\n") if line)
        assert json.loads(error)["error"]["message"] == "the device is gone"
        assert done == "[DONE]"
    else:
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the device is gone")
