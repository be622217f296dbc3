"""Turns prompts and an artifact into completions, with the serving engine and no server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ..graphs.errors import NpucompileError
from ..runtime.device import Executor
from ..runtime.engine import Engine
from ..runtime.request import Event, ExecutionRecord, FinishEvent, Request, Sampling, TokenEvent


@dataclass(frozen=True)
class Completion:
    """One finished prompt.

    Attributes:
        token_ids: what was generated, without the token that stopped it.
        reason: "stop" or "length".
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    completion_tokens: int
    reason: str
    record: ExecutionRecord

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per decode step; the first token comes from prefill."""
        steps = sum(count for _, count in self.record.decode_steps)
        return (self.completion_tokens - 1) / steps if steps else 1.0


def complete(
    executor: Executor, prompts: Sequence[Sequence[int]], sampling: Sampling, max_tokens: int, stop_token_ids: frozenset[int]
) -> list[Completion]:
    """Runs prompts to their ends, batched together as a server would.

    Raises:
        RequestError: a prompt can never be served.
        NpucompileError: a step failed.
    """
    engine = Engine(executor, refresh_every_s=None)
    collected = [_Collector() for _ in prompts]
    for i, (prompt, sink) in enumerate(zip(prompts, collected, strict=True)):
        engine.submit(Request(str(i), tuple(prompt), max_tokens, sampling, stop_token_ids), sink)
    while not all(sink.done.is_set() for sink in collected):
        engine.step()
    return [sink.result() for sink in collected]


class _Collector:
    """Sink of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: FinishEvent | None = None
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.extend(event.token_ids)
        else:
            self.end = event
            self.done.set()

    def result(self) -> Completion:
        assert self.end is not None
        if self.end.reason == "error":
            raise NpucompileError(f"generation failed: {self.end.message}")
        return Completion(self.end.prompt_tokens, tuple(self.tokens), self.end.completion_tokens, self.end.reason, self.end.record)
