"""Completes prompts with the serving engine, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...graphs.errors import NpucompileError
from ...runtime.engine import Engine
from ...runtime.executor import Executor
from ...runtime.picture_spans import PictureInput
from ...runtime.request import Event, ExecutionRecord, FinishEvent, Logprobs, Request, Sampling, TokenEvent


@dataclass(frozen=True)
class OfflineCompletion:
    """One finished prompt.

    Attributes:
        token_ids: the generated tokens, without a stop token.
        reason: "stop" or "length".
        logprobs: of each token, if they were asked for.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    completion_tokens: int
    reason: str
    record: ExecutionRecord
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of the decode steps that verified drafts; 1 without such steps, because every other step produces one token."""
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
    pictures: Sequence[tuple[PictureInput, ...]] | None = None,
) -> list[OfflineCompletion]:
    """Completes prompts, batched together as by a server.

    Args:
        logprobs, speculative_tokens: as in `Request`.
        pictures: of each prompt; None where no prompt has any.

    Raises:
        RequestError: a prompt can never be served.
        NpucompileError: a step failed.
    """
    engine = Engine(executor, measured=True, refresh_every_s=None)
    collectors = [_Collector() for _ in prompts]
    shown = pictures or [() for _ in prompts]
    for i, (prompt, places, sink) in enumerate(zip(prompts, shown, collectors, strict=True)):
        request = Request(str(i), tuple(prompt), max_tokens, sampling, stop_token_ids, logprobs, speculative_tokens, pictures=places)
        engine.submit(request, sink)
    # To the end of what is in flight, so that another engine may use the executor.
    while engine.step():
        pass
    return [sink.result() for sink in collectors]


class _Collector:
    """Sink that collects the events of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish: FinishEvent | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
        else:
            self.finish = event

    def result(self) -> OfflineCompletion:
        finish = self.finish
        assert finish is not None
        if finish.reason == "error":
            raise NpucompileError(f"generation failed: {finish.message}")
        token_ids, logprobs = tuple(self.tokens), tuple(self.logprobs)
        return OfflineCompletion(finish.prompt_tokens, token_ids, finish.completion_tokens, finish.reason, finish.record, logprobs)
