"""Sends a load to a server, each request when it is due, and records what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ....graphs.errors import NpucompileError
from .outcome import Arrival, ServerWord, StreamOutcome
from .websocket import Arrived
from .workload import WorkloadPrompt

FAILURES = (NpucompileError, OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError)
"""What a request fails with when the server or the connection does; malformed answers lead to the last four."""


class RequestSender(Protocol):
    """Sends one request and reads its answer to the end."""

    async def send(self, prompt: WorkloadPrompt, arrived: Arrived) -> ServerWord: ...


async def drive(
    sender: RequestSender,
    prompts: Sequence[WorkloadPrompt],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[StreamOutcome], None] = lambda _: None,
) -> tuple[StreamOutcome, ...]:
    """Sends every request when it is due, or as soon after that as fewer than `max_concurrency` are open.

    A failed request does not end the load.

    Args:
        arrivals: seconds since the start at which each request is due, ascending.
        on_end: called with every outcome, as requests end.

    Returns:
        The outcomes, in the order of `prompts`.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    began = time.perf_counter()

    async def serve(index: int, prompt: WorkloadPrompt, due_s: float) -> StreamOutcome:
        async with gate:
            sent_s, arrived, token_ids = time.perf_counter() - began, list[Arrival](), list[int]()

            def arrive(tokens: Sequence[int]) -> None:
                arrived.append(Arrival(time.perf_counter() - began, len(tokens)))
                token_ids.extend(tokens)

            reported, error = ServerWord(), None
            try:
                reported = await sender.send(prompt, arrive)
            except FAILURES as failure:
                error = str(failure) or type(failure).__name__
            ended_s, planned = time.perf_counter() - began, len(prompt.token_ids)
            outcome = StreamOutcome(index, due_s, sent_s, ended_s, planned, tuple(arrived), reported, error, tuple(token_ids))
        on_end(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, (prompt, due_s) in enumerate(zip(prompts, arrivals, strict=True)):
            if (wait := due_s - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(serve(index, prompt, due_s)))
    return tuple(task.result() for task in tasks)
