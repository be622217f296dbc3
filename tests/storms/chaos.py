"""Clients that break off: sockets killed in the middle, half-open handshakes, readers that stop, cancels by the dozen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx
from storms import resume
from storms.jobs import Job, over_websocket
from storms.target import Target
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from npucompile.server.client import Client

AT_ONCE = 24
Behaviour = Callable[[Target, Sequence[Job], random.Random], Awaitable[int]]


def _create(job: Job, stream: str, **options: object) -> str:
    body = {"type": "response.create", "stream_id": stream, "input_token_ids": list(job.prompt), "ignore_eos": True}
    return json.dumps({**body, "max_output_tokens": job.max_tokens, **job.sampling, **options})


async def _killed_socket(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """Several streams of up to 4 completions each; the TCP connection is reset after a few events."""
    count = generator.randint(1, 6)
    async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
        for stream in range(count):
            await socket.send(_create(generator.choice(known), f"s{stream}", n=generator.randint(1, 4)))
        # Fewer events may come than are waited for.
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            for _ in range(generator.randint(0, 40)):
                await asyncio.wait_for(socket.recv(), 1)
        socket.transport.abort()
    return count


async def _cancel_storm(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """Streams that are cancelled at once, twice and after they ended."""
    count = generator.randint(2, 12)
    async with await Client.connect(target.websocket) as client:
        streams = [
            await client.create(list(job.prompt), max_output_tokens=job.max_tokens, ignore_eos=True, **job.sampling).start()
            for job in generator.choices(known, k=count)
        ]
        for _ in range(3):
            await asyncio.gather(*(client.cancel(stream_id=stream.stream_id) for stream in streams))
        for stream in streams:
            async for _event in stream:
                pass
    return count


async def _half_open(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A connection that sends part of a handshake, or of a body, and leaves."""
    host, port = target.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 500\r\n\r\n" + "{" * 100
    writer.write(head[: generator.randint(1, len(head))].encode())
    await writer.drain()
    await asyncio.sleep(generator.random() / 20)
    writer.transport.abort()
    del reader
    return 0


async def _slow_reader(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A reader that stops for a while and then reads everything, which has to be whole."""
    job = generator.choice(known)
    async with await Client.connect(target.websocket) as client:
        tokens: list[int] = []
        async for arrived in over_websocket(client, job):
            tokens += arrived
            await asyncio.sleep(generator.random() / 50)
    assert tuple(tokens) == job.expected, f"{tokens} instead of {list(job.expected)}"
    return 1


async def _dropped_answer(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """Server-sent events that nobody reads to the end."""
    job = generator.choice(known)
    body = {"prompt": list(job.prompt), "max_tokens": job.max_tokens, "stream": True, "ignore_eos": True, "n": generator.randint(1, 3)}
    async with httpx.AsyncClient(timeout=60) as client, client.stream("POST", f"{target.http}/v1/completions", json=body) as answer:
        left = generator.randint(0, 5)
        async for _ in answer.aiter_lines():
            left -= 1
            if left < 0:
                break
    return 1


async def _whole(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A client that does nothing wrong, beside all others: its tokens are those it gets alone."""
    job = generator.choice(known)
    async with await Client.connect(target.websocket) as client:
        tokens = tuple([token async for arrived in over_websocket(client, job) for token in arrived])
    assert tokens == job.expected, f"{tokens} instead of {job.expected}"
    return 1


BEHAVIOURS: tuple[Behaviour, ...] = (
    _killed_socket, _cancel_storm, _half_open, _slow_reader, _dropped_answer, _whole, resume.over_sockets, resume.over_http, resume.gone,
)  # fmt: skip
RARE = 0.005
"""Share of clients that come too late for what they ask for: theirs are the longest responses."""


async def chaos(target: Target, known: Sequence[Job], requests: int, generator: random.Random, rare: float = RARE) -> Counter[str]:
    """Runs behaviours at random, AT_ONCE at a time, until they have made `requests` requests; returns how often each ran.

    Args:
        rare: share of clients that come too late.

    Raises:
        AssertionError: a client that read its answer got other tokens.
    """
    ran: Counter[str] = Counter()
    made = 0

    async def worker() -> None:
        nonlocal made
        while made < requests:
            behaviour = resume.too_late if generator.random() < rare else generator.choice(BEHAVIOURS)
            ran[behaviour.__name__.strip("_")] += 1
            count = await behaviour(target, known, generator)
            made += count

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return ran
