"""tools/bench/socket_client.py: what a client of its own process makes of the frames of a load."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websockets

from npucompile.tools.bench import socket_client
from npucompile.tools.bench.socket_client import DELTA, Connection, main, read


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


def test_frames_that_come_together_are_taken_together_and_a_server_that_hangs_up_is_an_error():
    def answer(connection: ServerConnection) -> None:
        asked = connection.recv()
        for number in range(3):
            connection.send(f"{asked} {number}")

    with serve_websockets(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Connection(f"ws://127.0.0.1:{server.socket.getsockname()[1]}/v1/responses") as connection:
            connection.send("hello")
            texts: list[str] = []

            def read_all() -> None:
                while True:
                    texts.extend(connection.texts())

            with pytest.raises(ConnectionError, match="closed the connection"):
                read_all()
        server.shutdown()
    assert texts == ["hello 0", "hello 1", "hello 2"]
