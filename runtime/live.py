"""Turns the progress of one unfinished request into a frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .request import ExecutionRecord, FinishEvent, Request


class Live(NamedTuple):
    """A request that is waiting or running. Times are in ms of the engine's clock.

    A named tuple, because one is made for each row of each step and a frozen dataclass takes several times as long.

    Attributes:
        arrival: its place in the total order of submissions.
        generated: tokens sampled so far, the one that ended the output included.
        computed: tokens whose keys, values and state are in the caches. While decoding that is all but the last one.
        pages: KV pages held.
        state_index: which slot of its group holds the state after the last computed token.
        served: rank of its last turn among all turns ever; the smallest is next when not all fit a step.
        decode_steps: (bucket name, steps) pairs.
    """

    request: Request
    arrival: int
    submitted_ms: float
    generated: tuple[int, ...] = ()
    computed: int = 0
    pages: int = 0
    state_index: int = 0
    served: int = 0
    started_ms: float | None = None
    first_token_ms: float | None = None
    prefill_chunks: tuple[str, ...] = ()
    decode_steps: tuple[tuple[str, int], ...] = ()
    padded_rows: int = 0
    preemptions: int = 0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def total(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def decoding(self) -> bool:
        """Whether only its last generated token is not in the cache yet; else it is to be prefilled."""
        return bool(self.generated) and self.computed == self.total - 1

    def known(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on."""
        boundary = len(self.request.prompt)
        if start >= boundary:
            return self.generated[start - boundary : start - boundary + count]
        return (self.request.prompt[start : start + count] + self.generated)[:count]

    def preempted(self) -> Live:
        """The request after it lost its pages and its state; what it generated stays."""
        return self._replace(computed=0, pages=0, state_index=0, preemptions=self.preemptions + 1)

    def prefilled(self, chunk: str, count: int, new: Sequence[int], padded_rows: int, times_ms: tuple[float, float], served: int) -> Live:
        """The request after a prefill step.

        Args:
            chunk: name of the bucket.
            count: known tokens that were fed.
            new: tokens that were sampled; empty unless this was the last chunk.
            padded_rows: rows of padding that ran beside it.
            times_ms: when the step began and ended.
            served: rank of this turn.
        """
        started_ms, now_ms = times_ms
        return self._replace(
            generated=(*self.generated, *new),
            computed=self.computed + count,
            served=served,
            started_ms=started_ms if self.started_ms is None else self.started_ms,
            first_token_ms=now_ms if new and self.first_token_ms is None else self.first_token_ms,
            prefill_chunks=(*self.prefill_chunks, chunk),
            padded_rows=self.padded_rows + padded_rows,
        )

    def decoded(self, bucket_name: str, new: Sequence[int], padded_rows: int, served: int) -> Live:
        """The request after a decode step that sampled the tokens `new`; arguments as for `prefilled`."""
        steps = dict(self.decode_steps)
        steps[bucket_name] = steps.get(bucket_name, 0) + 1
        return self._replace(
            generated=(*self.generated, *new),
            computed=self.computed + len(new),
            state_index=len(new) - 1,
            served=served,
            decode_steps=tuple(steps.items()),
            padded_rows=self.padded_rows + padded_rows,
        )

    def output(self, new: Sequence[int], max_model_len: int) -> tuple[Sequence[int], str | None]:
        """How much of the tokens just sampled belongs to the output.

        Returns:
            The tokens up to the one that ends the output, that one included, and the finish reason if there is one.
        """
        request, generated, total = self.request, len(self.generated), self.total
        for count, token in enumerate(new, start=1):
            if token in request.stop_token_ids:
                return new[:count], "stop"
            if generated + count >= request.max_tokens or total + count >= max_model_len:
                return new[:count], "length"
        return new, None

    def finished(self, reason: str, now_ms: float, message: str | None = None) -> FinishEvent:
        """The last event of the request, with its execution record."""
        record = ExecutionRecord(
            queue_ms=(now_ms if self.started_ms is None else self.started_ms) - self.submitted_ms,
            first_token_ms=None if self.first_token_ms is None else self.first_token_ms - self.submitted_ms,
            total_ms=now_ms - self.submitted_ms,
            prefill_chunks=self.prefill_chunks,
            decode_steps=tuple(sorted(self.decode_steps)),
            padded_rows=self.padded_rows,
            preemptions=self.preemptions,
        )
        return FinishEvent(self.id, reason, len(self.request.prompt), len(self.generated), record, message)
