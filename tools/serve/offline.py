"""Turns prompts and an artifact into completions, with the serving engine and no server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ...graphs.errors import NpucompileError
from ...runtime.engine import Engine
from ...runtime.executor import Executor
from ...runtime.request import Event, ExecutionRecord, FinishEvent, Request, Sampling, TokenEvent, TokenLogprobs


@dataclass(frozen=True)
class Completion:
    """One finished prompt.

    Attributes:
        token_ids: what was generated, without the token that stopped it.
        reason: "stop" or "length".
        logprobs: of each of the tokens, where they were asked for.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    completion_tokens: int
    reason: str
    record: ExecutionRecord
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a decode step that verifies drafts; 1 without such steps, as every other one gives one."""
        return self.record.acceptance_length or 1.0


def complete(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    max_tokens: int,
    stop_token_ids: frozenset[int],
    *,
    logprobs: int | None = None,
    speculative_tokens: int | None = None,
) -> list[Completion]:
    """Runs prompts to their ends, batched together as a server would.

    Args:
        logprobs, speculative_tokens: as in `Request`.

    Raises:
        RequestError: a prompt can never be served.
        NpucompileError: a step failed.
    """
    engine = Engine(executor, refresh_every_s=None)
    collected = [_Collector() for _ in prompts]
    for i, (prompt, sink) in enumerate(zip(prompts, collected, strict=True)):
        engine.submit(Request(str(i), tuple(prompt), max_tokens, sampling, stop_token_ids, logprobs, speculative_tokens), sink)
    while not all(sink.done.is_set() for sink in collected):
        engine.step()
    return [sink.result() for sink in collected]


class _Collector:
    """Sink of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.end: FinishEvent | None = None
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
        else:
            self.end = event
            self.done.set()

    def result(self) -> Completion:
        end = self.end
        assert end is not None
        if end.reason == "error":
            raise NpucompileError(f"generation failed: {end.message}")
        return Completion(end.prompt_tokens, tuple(self.tokens), end.completion_tokens, end.reason, end.record, tuple(self.logprobs))
