"""Many requests over many streams for a long time: every token right, memory flat, and how long tokens take."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from storms.jobs import Job, over_http, over_websocket
from storms.target import Target

from npucompile.server.client import Client

STREAMS_PER_SOCKET = 16
SAMPLE_EVERY = 500


@dataclass
class Soak:
    """What a soak found.

    Attributes:
        wrong: jobs with other tokens than alone, or an error, as text.
        first_ms, between_ms: of every request the time to its first tokens, and of every later arrival the time since the one before.
        resident_bytes: of the server, every SAMPLE_EVERY requests.
    """

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)


async def soak(target: Target, known: Sequence[Job], streams: int, requests: int, generator: random.Random, *, store: bool = True) -> Soak:
    """Runs `requests` jobs, `streams` at a time; three of four over websockets, which several streams share, the others over HTTP.

    Args:
        store: whether the server keeps those over websockets.
    """
    found, numbers, began = Soak(), iter(range(requests)), time.monotonic()

    async def worker(source: Client | httpx.AsyncClient) -> None:
        for number in numbers:
            if not number % SAMPLE_EVERY:
                found.resident_bytes.append(target.resident_bytes)
            job = generator.choice(known)
            over = over_websocket(source, job, store=store) if isinstance(source, Client) else over_http(source, target, job)
            await _measure(job, over, found)

    sockets = -(-(streams - streams // 4) // STREAMS_PER_SOCKET)
    clients = [await Client.connect(target.websocket) for _ in range(sockets)]
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=streams)) as http:
        await asyncio.gather(*(worker(source) for source in _sources(clients, http, streams)))
    await asyncio.gather(*(client.close() for client in clients))
    found.seconds = time.monotonic() - began
    return found


def _sources(clients: Sequence[Client], http: httpx.AsyncClient, streams: int) -> Iterator[Client | httpx.AsyncClient]:
    sockets = itertools.cycle(clients)
    return (http if number % 4 == 3 else next(sockets) for number in range(streams))


async def _measure(job: Job, over: AsyncIterator[tuple[int, ...]], found: Soak) -> None:
    tokens: list[int] = []
    last = began = time.monotonic()
    try:
        async for arrived in over:
            now = time.monotonic()
            (found.between_ms if tokens else found.first_ms).append((now - (last if tokens else began)) * 1e3)
            last = now
            tokens += arrived
    except Exception as error:
        found.wrong.append(f"{type(error).__name__}: {error}")
    if tuple(tokens) != job.expected:
        found.wrong.append(f"{tokens} instead of {list(job.expected)}")
    found.requests += 1
    found.tokens += len(tokens)
