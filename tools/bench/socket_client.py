"""The client of a benchmark, in a process of its own: it notes when each frame comes, and looks into them when all have come.

A program of the standard library and `websockets` alone: `python socket_client.py URL` reads a load a line, {"prompts": token ids
[streams][tokens], "tokens": of each output}, and answers a line, {"seconds", "ids": [streams][tokens], "arrivals": [streams] of pairs of
seconds and tokens}, or {"refused": an event as text}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from websockets.asyncio.client import connect

DELTA = "response.output_text.delta"
HEAD = 80
"""Characters of a frame that its type is in."""
ENDS = tuple(f'"type":"{kind}"' for kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"))


async def serve(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
    """All prompts as requests of one socket."""
    frames: list[tuple[float, str]] = []
    submitted = []
    async with connect(url, compression=None, max_size=None, max_queue=None, proxy=None) as socket:
        began = time.perf_counter()
        for number, prompt in enumerate(prompts):
            request = {"input_token_ids": list(prompt), "max_output_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
            submitted.append(time.perf_counter())
            await socket.send(json.dumps({"type": "response.create", "stream_id": str(number), **request}))
        open_streams = len(prompts)
        while open_streams:
            frame = await socket.recv(decode=True)
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
        print(json.dumps(asyncio.run(serve(url, load["prompts"], load["tokens"]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
