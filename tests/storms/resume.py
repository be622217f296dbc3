"""Clients that lose their connection in the middle of a response and go on with it on another one: no token is lost, none comes twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from storms.jobs import Job
from storms.target import Target
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from npucompile.server.response.events import TERMINAL_TYPES

MOST_DROPS = 4
MOST_KEPT_BYTES = 8 * 2**20
"""Of the events of a response, as the server has it by default (`SocketLimits.max_replay_bytes`)."""

Event = dict[str, Any]


class Followed:
    """The events of one response, over any number of connections.

    Attributes:
        events: by sequence number.
        repeated: how many came more than once, which those of an overlap have to.
    """

    def __init__(self) -> None:
        self.events: dict[int, Event] = {}
        self.repeated = 0

    def take(self, event: Event) -> None:
        """One more event; one that came before is the same."""
        number = event["sequence_number"]
        event = {name: value for name, value in event.items() if name != "stream_id"}
        if number in self.events:
            assert self.events[number] == event, f"event {number} was {self.events[number]} and is {event}"
            self.repeated += 1
        self.events[number] = event

    @property
    def response_id(self) -> str:
        return str(self.events[0]["response"]["id"])

    @property
    def last(self) -> int:
        return max(self.events, default=-1)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[self.last]["type"] in TERMINAL_TYPES

    def check(self, job: Job, first: int = 0) -> None:
        """Every event from the first on came, and their tokens are the job's."""
        missing = [number for number in range(first, self.last + 1) if number not in self.events]
        assert not missing, f"events {missing[:5]} of {self.last + 1} never came"
        if not first:
            tokens = tuple(token for number in sorted(self.events) for token in self.events[number].get("token_ids", ()))
            assert tokens == job.expected, f"resumed {tokens} instead of {job.expected}"


def _behind(followed: Followed, generator: random.Random) -> int:
    """Where a client goes on: behind its last event, or some before it, as one that wrote down less than it read."""
    return max(-1, followed.last - generator.choice([0, 0, 0, 1, 2, 7]))


async def _read(events: AsyncIterator[Event], followed: Followed, most: int) -> None:
    """Up to so many events, and none behind the last of a response."""
    async for event in events:
        assert event["type"] != "error", event
        followed.take(event)
        most -= 1
        if followed.ended or not most:
            return


async def over_sockets(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A resumable response; its socket is reset at some event, up to MOST_DROPS times."""
    job, followed = generator.choice(known), Followed()
    body: Event = {"type": "response.create", "input_token_ids": list(job.prompt), "ignore_eos": True, "resumable": True}
    body |= {"max_output_tokens": job.max_tokens, "store": generator.random() < 0.5, **job.sampling}
    for drop in range(MOST_DROPS + 1):
        async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
            await socket.send(json.dumps(body))
            # The first event has the id that it takes to go on.
            most = -1 if drop == MOST_DROPS else generator.randint(1, 12)
            await _read((json.loads(frame) async for frame in socket), followed, most)
            if not followed.ended:
                socket.transport.abort()
        if followed.ended:
            break
        if generator.random() < 0.3:
            await asyncio.sleep(generator.random() / 4)
        body = {"type": "response.resume", "response_id": followed.response_id, "starting_after": _behind(followed, generator)}
    followed.check(job)
    return 1


async def over_http(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A response in the background, followed by server-sent events that are dropped and asked for again."""
    job, followed = generator.choice(known), Followed()
    body = {"input": list(job.prompt), "max_output_tokens": job.max_tokens, "stream": True, "background": True, "ignore_eos": True}
    body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **body, **job.sampling}
    body["input_token_ids"] = body.pop("input")
    async with httpx.AsyncClient(timeout=120) as client:
        request = client.build_request("POST", f"{target.http}/v1/responses", json=body)
        for drop in range(MOST_DROPS + 1):
            answer = await client.send(request, stream=True)
            try:
                assert answer.status_code == 200, (await answer.aread())[:500]
                lines = (json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {"))
                await _read(lines, followed, -1 if drop == MOST_DROPS else generator.randint(1, 12))
            finally:
                await answer.aclose()
            if followed.ended:
                break
            query = {"stream": "true", "starting_after": str(_behind(followed, generator))}
            request = client.build_request("GET", f"{target.http}/v1/responses/{followed.response_id}", params=query)
    followed.check(job)
    return 1


async def too_late(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """A response of more events than are kept: who asks for the first ones is told which are there, and has all of those."""
    job = max(known, key=lambda job: job.max_tokens)
    body = {
        "type": "response.create",
        "input_token_ids": list(job.prompt),
        "ignore_eos": True,
        "resumable": True,
        "n": 8,
        "top_logprobs": 20,
    }
    kept, whole = Followed(), Followed()
    async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
        await socket.send(json.dumps({**body, "max_output_tokens": target.max_model_len // 3, "store": True}))
        await _read((json.loads(frame) async for frame in socket), whole, -1)
    async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
        resume = {"type": "response.resume", "response_id": whole.response_id, "starting_after": generator.randint(-1, 1)}
        await socket.send(json.dumps(resume))
        refusal = json.loads(await socket.recv())
        size = sum(len(json.dumps(event, separators=(",", ":"))) for event in whole.events.values())
        assert (refusal["type"] == "error") == (size > MOST_KEPT_BYTES), (size, refusal)
        if refusal["type"] != "error":
            return 8
        assert refusal["error"]["code"] == "events_expired", refusal
        first = int(refusal["error"]["message"].split("kept from ")[1].split()[0])
        await socket.send(json.dumps({**resume, "starting_after": first - 1}))
        await _read((json.loads(frame) async for frame in socket), kept, -1)
    assert kept.events == {number: event for number, event in whole.events.items() if number >= first}
    return 8


async def gone(target: Target, known: Sequence[Job], generator: random.Random) -> int:
    """Who asks for a response that was not made to be resumed, or by another's id, is told so."""
    job = generator.choice(known)
    async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
        body = {"type": "response.create", "input_token_ids": list(job.prompt), "max_output_tokens": job.max_tokens, "store": True}
        await socket.send(json.dumps(body))
        response_id = json.loads(await socket.recv())["response"]["id"]
        for number in range(generator.randint(0, 5)):
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                await asyncio.wait_for(socket.recv(), 0.1 + number / 100)
        socket.transport.abort()
    async with connect(target.websocket, max_size=None, compression=None, proxy=None) as socket:
        for name in (response_id, "resp_nobody"):
            await socket.send(json.dumps({"type": "response.resume", "response_id": name, "starting_after": 0}))
            event = json.loads(await socket.recv())
            assert event["type"] == "error", event
            assert event["error"]["code"] in ("not_resumable", "response_not_found"), event
    return 1
