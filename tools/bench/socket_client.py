"""The client of a benchmark, in a process of its own: it notes when frames come, and looks into them when all have come.

It computes on the cores that the server's steps need, so it is as light as a client can be: the protocol of `websockets` over a socket of
the standard library, which takes all frames at once that have come. A program of these two alone: `python socket_client.py URL` reads a
load a line, {"prompts": token ids [streams][tokens], "tokens": of each output}, and answers a line, {"seconds", "ids": [streams][tokens],
"arrivals": [streams] of pairs of seconds and tokens}, or {"refused": an event as text}.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

DELTA = "response.output_text.delta"
HEAD = 80
"""Characters of a frame that its type is in."""
ENDS = tuple(f'"type":"{kind}"' for kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"))


class Connection:
    """A websocket whose frames are taken as many at a time as have come."""

    def __init__(self, url: str) -> None:
        uri = parse_uri(url)
        self._protocol = ClientProtocol(uri, max_size=None)
        self._socket = socket.create_connection((uri.host, uri.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        while not self._protocol.events_received():
            self._receive()
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, text: str) -> None:
        """Sends a frame."""
        self._protocol.send_text(text.encode())
        self._flush()

    def texts(self) -> Iterator[str]:
        """The frames that come next; waits until there are any.

        Raises:
            ConnectionError: the server closed the connection.
        """
        self._receive()
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                yield bytes(event.data).decode()

    def _receive(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed the connection of a benchmark's client; legal is after all responses have ended")
        self._protocol.receive_data(data)
        self._flush()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._socket.sendall(data)


def serve(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """All prompts as requests of one socket."""
    frames: list[tuple[float, str]] = []
    submitted = []
    with Connection(url) as connection:
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            request = {"input_token_ids": list(prompt), "max_output_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            submitted.append(time.perf_counter())
            connection.send(json.dumps({"type": "response.create", "stream_id": str(number), **request}))
        open_streams = len(prompts)
        while open_streams:
            for frame in connection.texts():
                frames.append((time.perf_counter(), frame))
                open_streams -= any(end in frame[:HEAD] for end in ENDS)
        seconds = time.perf_counter() - began
    return read(frames, submitted) | {"seconds": seconds}


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
