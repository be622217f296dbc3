"""Frames and bodies that no client should send: none is a server's fault, none ends anything for others."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from storms.apart import apart
from storms.canary import Calm, watched
from storms.jobs import Job
from storms.target import Target
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

AT_ONCE = 8
LARGE = 0.005
"""Share of bodies that are large: what is wrong with them is found late, or there is much of it."""

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
    """

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


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


def large(generator: random.Random) -> Any:
    """A value of 50 kB to 2 MB."""
    count = generator.choice([1_000, 10_000, 40_000])
    kinds = [
        lambda: "é " * 5 * count,
        lambda: [generator.choice([1, 5, "a", None])] * 5 * count,
        lambda: [{"role": "user", "content": "a"}] * count,
        lambda: {f"name{number}": {"type": "string"} for number in range(count)},
        lambda: {"type": "json_schema", "schema": {"type": "object", "properties": {f"n{i}": {"type": "string"} for i in range(count)}}},
        lambda: "(a|b)*" * count,
    ]
    return generator.choice(kinds)()


def body(generator: random.Random) -> bytes:
    """A body: fields at wrong values around some that are right, or bytes that are no JSON."""
    right: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "input": "a", "text": "a"}
    fields = {name: right[name] for name in right if generator.random() < 0.4}
    fields |= {generator.choice(FIELDS): value(generator) for _ in range(generator.randint(0, 4))}
    if generator.random() < LARGE:
        fields[generator.choice(FIELDS)] = large(generator)
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


async def fuzz(target: Target, beside: Job, frames: int, bodies: int, seed: int, senders: int = 1) -> tuple[Fuzz, Calm]:
    """Sends frames and bodies from processes of their own, while another asks for what is known, and compares it."""
    shares = [(frames * n // senders - frames * (n - 1) // senders, bodies * n // senders - bodies * (n - 1) // senders)
              for n in range(1, senders + 1)]  # fmt: skip
    async with watched(target, beside) as calm:
        parts = await asyncio.gather(*(apart(send, target, *share, seed + number) for number, share in enumerate(shares)))
    found = Fuzz()
    for part in parts:
        found.answers += part.answers
        found.faults += part.faults
    return found, calm


async def send(target: Target, frames: int, bodies: int, seed: int) -> Fuzz:
    """Sends frames and bodies, several at a time."""
    found, generator = Fuzz(), random.Random(seed)
    count, numbers = iter(range(frames)), iter(range(bodies))
    await asyncio.gather(
        *(_frames(target, count, generator, found) for _ in range(AT_ONCE)),
        *(_bodies(target, numbers, generator, found) for _ in range(AT_ONCE)),
    )
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
            try:
                answer = await client.request(method, target.http + path, content=content, headers={"content-type": "application/json"})
            except httpx.TransportError as error:
                # Whatever is wrong with a body, its answer arrives.
                found.faults.append(f"{method} {path} of {len(content)} bytes {content[:300]!r}: {error!r}")
                continue
            found.answers[f"body {answer.status_code}"] += 1
            if answer.status_code >= 500 and answer.status_code != 503:
                found.faults.append(f"{method} {path} {content[:300]!r}: {answer.status_code} {answer.text[:300]}")
