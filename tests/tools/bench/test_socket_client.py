"""tools/bench/socket_client.py: what a client of its own process makes of the frames of a load."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websockets

from npucompile.tools.bench import socket_client
from npucompile.tools.bench.socket_client import DELTA, Connection, Ends, main, read


def frame(at_s, kind, **fields):
    return at_s, json.dumps({"type": kind, **fields})


def test_tokens_of_a_stream_come_in_order_with_the_time_since_they_were_asked_for():
    frames = [
        frame(10.5, "response.created", stream_id="0"),
        frame(11.0, DELTA, stream_id="1", token_ids=[7]),
        frame(11.5, DELTA, stream_id="0", token_ids=[1, 2]),
        frame(12.0, DELTA, stream_id="0", token_ids=[3]),
        frame(12.5, DELTA, stream_id="0", token_ids=[]),
        frame(13.0, "response.incomplete", stream_id="0"),
    ]
    found = read(frames, [10.0, 10.25])
    assert found == {"ids": [[1, 2, 3], [7]], "arrivals": [[(1.5, 2), (2.0, 1)], [(0.75, 1)]]}


@pytest.mark.parametrize("kind", ["error", "response.failed"])
def test_what_the_server_refused_is_no_result(kind):
    frames = [frame(1.0, DELTA, stream_id="0", token_ids=[1]), frame(2.0, kind, error={"message": "no"})]
    assert json.loads(read(frames, [0.0])["refused"])["error"] == {"message": "no"}


def test_a_load_a_line_is_answered_by_a_line(monkeypatch, capsys):
    def serve(url, prompts, tokens):
        return {"url": url, "prompts": prompts, "tokens": tokens}

    monkeypatch.setattr(socket_client, "serve", serve)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompts": [[1]], "tokens": 3}\n{"prompts": [], "tokens": 2}\n'))
    main("ws://there")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"url": "ws://there", "prompts": [[1]], "tokens": 3}, {"url": "ws://there", "prompts": [], "tokens": 2}]


FRAMES = [
    {"type": "response.created", "sequence_number": 0, "response": {"error": None, "text": {"format": {"type": "text"}}}},
    {"type": DELTA, "delta": 'a "type":"response.completed" that is said'},
    {"type": "response.completed", "response": {"output": [{"type": "message"}]}},
    {"type": "response.incomplete", "response": {}},
    {"type": "error", "error": {"type": "invalid_request_error"}},
]


@given(st.lists(st.sampled_from(FRAMES), max_size=8), st.data())
def test_ends_are_counted_however_bytes_are_cut(frames, data):
    sent = b"".join(b"\x81\x7e" + json.dumps(frame, separators=(",", ":")).encode() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=20)))
    ends = Ends()
    found = sum(ends.count(sent[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(sent)]))
    assert found == sum(frame["type"] in ("response.completed", "response.incomplete", "error") for frame in frames)


@contextlib.contextmanager
def server(answer):
    """The URL of a server that talks so to each connection."""
    with serve_websockets(answer, "127.0.0.1", 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{served.socket.getsockname()[1]}/v1/responses"
        served.shutdown()


def test_bytes_are_frames_later_and_a_server_that_hangs_up_is_an_error():
    def answer(connection: ServerConnection) -> None:
        asked = connection.recv()
        for number in range(3):
            connection.send(f"{asked} {number}")

    with server(answer) as url, Connection(url) as connection:
        connection.send("hello")
        received: list[bytes] = []

        def receive_all() -> None:
            while True:
                received.append(connection.receive())

        with pytest.raises(ConnectionError, match="closed the connection"):
            receive_all()
        assert [text for data in received for text in connection.texts(data)] == ["hello 0", "hello 1", "hello 2"]


@pytest.mark.parametrize("parse_every_s", [0.0, 100.0], ids=["as bytes come", "behind the load"])
def test_a_load_is_sent_and_its_tokens_are_read(monkeypatch, parse_every_s):
    ponged = []

    def answer(connection: ServerConnection) -> None:
        asked = [json.loads(connection.recv()) for _ in range(2)]
        for token in range(2):
            for request in asked:
                ids = [request["input_token_ids"][0] + token]
                connection.send(json.dumps({"type": DELTA, "stream_id": request["stream_id"], "token_ids": ids}, separators=(",", ":")))
        if not parse_every_s:
            ponged.append(connection.ping().wait(10))
        for request in asked:
            connection.send(json.dumps({"type": "response.incomplete", "stream_id": request["stream_id"]}, separators=(",", ":")))
        connection.recv(timeout=10)

    monkeypatch.setattr(socket_client, "PARSE_EVERY_S", parse_every_s)
    with server(answer) as url:
        found = socket_client.serve(url, [[10], [20]], 2)
    assert (found["ids"], ponged) == ([[10, 11], [20, 21]], [True] * (not parse_every_s))
    assert all(0 < at_s <= found["seconds"] for stream in found["arrivals"] for at_s, _ in stream)
