"""The client of a benchmark, in a process of its own: it notes when bytes come, and looks into them when all have come.

It computes on the cores that the server's steps need, which clients of a server do not, so it is as light as a client can be: a socket of
the standard library and, behind the load, the protocol of `websockets`. A program of these two alone: `python socket_client.py URL` reads
a load a line, {"prompts": token ids [streams][tokens], "tokens": of each output}, and answers a line, {"seconds", "ids":
[streams][tokens], "arrivals": [streams] of pairs of seconds and tokens}, or {"refused": an event as text}.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

DELTA = "response.output_text.delta"
PARSE_EVERY_S = 5.0
"""Of a load that takes longer, so that pings are answered."""


class Ends:
    """Counts the ends of responses in bytes as they come, which have frames of JSON in them. Quotes within its texts are escaped, so that a
    text cannot look like an end."""

    _PATTERN = re.compile(rb'"type":"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"')
    _LONGEST = len(b'"type":"response.incomplete"')

    def __init__(self) -> None:
        self._tail = b""

    def count(self, data: bytes) -> int:
        """Ends that these bytes, after all before them, complete."""
        data, found, behind = self._tail + data, 0, 0
        for match in self._PATTERN.finditer(data):
            found, behind = found + 1, match.end()
        self._tail = data[max(behind, len(data) - self._LONGEST + 1) :]
        return found


class Connection:
    """A websocket whose bytes are taken as many at a time as have come, and may be looked into later."""

    def __init__(self, url: str) -> None:
        uri = parse_uri(url)
        self._protocol = ClientProtocol(uri, max_size=None)
        self._socket = socket.create_connection((uri.host, uri.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        while not self._protocol.events_received():
            self._protocol.receive_data(self.receive())
            self._flush()
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, *texts: str) -> None:
        """Sends frames at once."""
        for text in texts:
            self._protocol.send_text(text.encode())
        self._socket.sendall(b"".join(self._protocol.data_to_send()))

    def receive(self) -> bytes:
        """The bytes that come next; waits until there are any.

        Raises:
            ConnectionError: the server closed the connection.
        """
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection of a benchmark's client; legal is after all responses have ended")
        return data

    def texts(self, data: bytes) -> Iterator[str]:
        """The text frames that these bytes complete, which `receive` gave; pings are answered."""
        self._protocol.receive_data(data)
        self._flush()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                yield bytes(event.data).decode()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._socket.sendall(data)


def serve(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """All prompts as requests of one socket."""
    frames: list[tuple[float, str]] = []
    unparsed: list[tuple[float, bytes]] = []
    ends = Ends()
    with Connection(url) as connection:

        def parse() -> None:
            frames.extend((at, text) for at, data in unparsed for text in connection.texts(data))
            unparsed.clear()

        parsed = began = time.perf_counter()
        body = {"type": "response.create", "max_output_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        # At once: they start together, as they do through the engine.
        connection.send(*(json.dumps({**body, "stream_id": str(i), "input_token_ids": list(ids)}) for i, ids in enumerate(prompts)))
        open_streams, now = len(prompts), began
        while open_streams > 0:
            data, now = connection.receive(), time.perf_counter()
            unparsed.append((now, data))
            open_streams -= ends.count(data)
            if now - parsed > PARSE_EVERY_S:
                parse()
                parsed = now
        parse()
    return read(frames, [began] * len(prompts)) | {"seconds": now - began}


def read(frames: Sequence[tuple[float, str]], submitted: Sequence[float]) -> dict[str, Any]:
    """The tokens of each stream and when they came, of the frames of a load."""
    ids: list[list[int]] = [[] for _ in submitted]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in submitted]
    for at, frame in frames:
        event = json.loads(frame)
        if event["type"] in ("error", "response.failed"):
            return {"refused": frame}
        # The last delta may carry text without tokens, which the server held back until then.
        if event["type"] == DELTA and event["token_ids"]:
            stream = int(event["stream_id"])
            ids[stream] += event["token_ids"]
            arrivals[stream].append((at - submitted[stream], len(event["token_ids"])))
    return {"ids": ids, "arrivals": arrivals}


def main(url: str) -> None:
    """Answers loads until there are no more."""
    for line in sys.stdin:
        load = json.loads(line)
        print(json.dumps(serve(url, load["prompts"], load["tokens"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
