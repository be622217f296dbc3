"""Requests whose tokens are known: what each gives when it runs alone is what it has to give in every storm."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from storms.target import Target

from npucompile.server.client import Client, raise_if_refused


@dataclass(frozen=True)
class Job:
    """A request and the tokens it gives alone."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    expected: tuple[int, ...] = ()


async def jobs(target: Target, count: int, vocab: int, longest: int, generator: random.Random) -> list[Job]:
    """Jobs of several lengths, greedy and sampled, each run alone first; some begin alike."""
    common = [generator.randrange(vocab) for _ in range(longest)]
    found = []
    async with await Client.connect(target.websocket) as client:
        for number in range(count):
            own = [generator.randrange(vocab) for _ in range(generator.randint(1, longest // 2))]
            prompt = tuple([*common[: longest // 2], *own] if number % 3 == 0 else own)
            sampling: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
            job = Job(prompt, generator.randint(1, longest // 2), sampling)
            stream = client.create(list(prompt), max_output_tokens=job.max_tokens, ignore_eos=True, **sampling)
            found.append(Job(prompt, job.max_tokens, sampling, (await stream.completion()).token_ids))
    return found


async def over_websocket(client: Client, job: Job, **options: Any) -> AsyncIterator[tuple[int, ...]]:
    """The tokens of a job, as they come."""
    options = {"max_output_tokens": job.max_tokens, "ignore_eos": True, **job.sampling, **options}
    async for event in client.create(list(job.prompt), **options):
        if raise_if_refused(event)["type"] == "response.output_text.delta":
            yield tuple(event["token_ids"])


async def over_http(client: httpx.AsyncClient, target: Target, job: Job) -> AsyncIterator[tuple[int, ...]]:
    """The tokens of a job, as they come."""
    body = {
        "prompt": list(job.prompt), "max_tokens": job.max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True,
        "top_k": 0, "top_p": 1, "min_p": 0, **job.sampling,
    }  # fmt: skip
    async with client.stream("POST", f"{target.http}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        yield tuple(choice["token_ids"])
