"""Frames and bodies that no client should send: none is a server's fault, none ends anything for others."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from storms.jobs import Job, over_websocket
from storms.target import Target
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from npucompile.server.client import Client

AT_ONCE = 8
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/generate", "/abort_request", "/v1/models",
    "/flush_cache", "/nothing", "/v1/models/x",
)  # fmt: skip
FIELDS = (
    "type", "stream_id", "input", "input_token_ids", "prompt", "messages", "text", "input_ids", "tokens", "sampling_params", "max_tokens",
    "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "stream", "logprobs", "top_logprobs", "include",
    "model", "response_format", "structured_outputs", "tools", "tool_choice", "rid", "response_id", "metadata", "stream_options",
)  # fmt: skip


@dataclass
class Fuzz:
    """What a storm of wrong input found.

    Attributes:
        answers: number of answers by kind: "frame TYPE CODE" and "body STATUS".
        faults: answers that are the server's fault, as text.
        pauses_ms: between two tokens of a stream beside the storm.
    """

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)


def value(generator: random.Random, depth: int = 0) -> Any:
    """A JSON value that is rarely what a field takes."""
    kinds = [
        lambda: None,
        lambda: generator.random() < 0.5,
        lambda: generator.choice([0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**40]),
        lambda: generator.choice([0.0, 0.5, -1.5, 1e308, 1e-320, float("nan"), float("inf")]),
        lambda: generator.choice(
            ["", "a", "auto", "\x00", "\x7f" * 50, "\ud800", "é" * 2000, "text", "user", "json_schema", "response.create"]
        ),
        lambda: [value(generator, depth + 1) for _ in range(generator.randint(0, 4))],
        lambda: {generator.choice([*FIELDS, "x", ""]): value(generator, depth + 1) for _ in range(generator.randint(0, 4))},
    ]
    return generator.choice(kinds[: 5 if depth > 3 else 7])()


def body(generator: random.Random) -> bytes:
    """A body: fields at wrong values around some that are right, or bytes that are no JSON."""
    right: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "input": "a", "text": "a"}
    fields = {name: right[name] for name in right if generator.random() < 0.4}
    fields |= {generator.choice(FIELDS): value(generator) for _ in range(generator.randint(0, 4))}
    data = json.dumps(fields).encode("utf-8", "surrogatepass")
    match generator.randrange(8):
        case 0:
            return bytes(generator.randrange(256) for _ in range(generator.randint(0, 60)))
        case 1:
            place = generator.randrange(len(data))
            return data[:place] + bytes([generator.randrange(256)]) + data[place + 1 :]
        case 2:
            return data[: generator.randrange(len(data) + 1)]
        case 3:
            return b"[" * generator.choice([10, 5000]) + data
    return data


def frame(generator: random.Random) -> str | bytes:
    """A frame: a body with a type, as text or as bytes."""
    data = body(generator)
    if generator.random() < 0.1:
        return json.dumps({"type": "response.create", "stream_id": f"f{generator.randrange(4)}", "input": "a", "max_output_tokens": 2})
    if generator.random() < 0.8:
        kind = generator.choice(["response.create", "response.create", "response.cancel", "response.steer", "session.update", ""])
        fields = {"type": kind, "stream_id": f"f{generator.randrange(4)}", "max_output_tokens": 1}
        data = json.dumps(fields).encode()[:-1] + b", " + data[1:] if data[:1] == b"{" and len(data) > 2 else data
    return data if generator.random() < 0.1 else data.decode("utf-8", "replace")


async def fuzz(target: Target, beside: Job, frames: int, bodies: int, generator: random.Random) -> Fuzz:
    """Sends frames and bodies while one client after the other asks for what is known, and compares it."""
    found, done = Fuzz(), asyncio.Event()
    watcher = asyncio.create_task(_watch(target, beside, done, found))
    count = iter(range(frames))
    numbers = iter(range(bodies))
    await asyncio.gather(
        *(_frames(target, count, generator, found) for _ in range(AT_ONCE)),
        *(_bodies(target, numbers, generator, found) for _ in range(AT_ONCE)),
    )
    done.set()
    await watcher
    return found


async def _frames(target: Target, numbers: Any, generator: random.Random, found: Fuzz) -> None:
    for _ in numbers:
        protocols = generator.choice([["npucompile.json"], ["npucompile.msgpack"], None])
        async with connect(target.websocket, subprotocols=protocols, max_size=None, compression=None, proxy=None) as socket:  # type: ignore[arg-type]
            reader = asyncio.create_task(_read(socket, found))
            try:
                for _ in zip(range(200), numbers, strict=False):
                    await socket.send(frame(generator))
                # What was sent is answered before the socket closes.
                await asyncio.wait_for(await socket.ping(), 60)
            except ConnectionClosed:
                found.answers["socket closed"] += 1
        await reader


async def _read(socket: ClientConnection, found: Fuzz) -> None:
    try:
        async for received in socket:
            if isinstance(received, bytes):
                found.answers["frame msgpack"] += 1
                continue
            event = json.loads(received, parse_constant=_refuse_constant)
            code = str((event.get("error") or {}).get("code", "")) if event["type"] == "error" else ""
            found.answers[f"frame {event['type']} {code}".strip()] += 1
            if event.get("status", 0) >= 500 and event["status"] != 503:
                found.faults.append(received[:500])
    except ConnectionClosed:
        pass


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"the server sent {name}, which is no JSON")


async def _bodies(target: Target, numbers: Any, generator: random.Random, found: Fuzz) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        for _ in numbers:
            path, method = generator.choice(PATHS), generator.choice(["POST", "POST", "POST", "GET", "DELETE", "PUT"])
            content = body(generator)
            answer = await client.request(method, target.http + path, content=content, headers={"content-type": "application/json"})
            found.answers[f"body {answer.status_code}"] += 1
            if answer.status_code >= 500 and answer.status_code != 503:
                found.faults.append(f"{method} {path} {content[:300]!r}: {answer.status_code} {answer.text[:300]}")


async def _watch(target: Target, beside: Job, done: asyncio.Event, found: Fuzz) -> None:
    async with await Client.connect(target.websocket) as client:
        while not done.is_set():
            tokens: list[int] = []
            last = 0.0
            async for arrived in over_websocket(client, beside):
                now = time.monotonic()
                found.pauses_ms += [(now - last) * 1e3] if tokens else []
                last = now
                tokens += arrived
            if tuple(tokens) != beside.expected:
                found.faults.append(f"beside the storm {tokens} instead of {list(beside.expected)}")
