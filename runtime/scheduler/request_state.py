"""Turns the progress of one unfinished request into a frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..request import ExecutionRecord, FinishEvent, Request


class Live(NamedTuple):
    """A request that is waiting or running. Times are in ms of the engine's clock.

    A step changes it twice: when it is launched, as far as that tells what it will do, and when what it gave is known.

    A named tuple, because two are made for each row of each step and a frozen dataclass takes several times as long.

    Attributes:
        arrival: its place in the total order of submissions, which is what it is known by: an id may be used again.
        generated: tokens sampled so far, the one that ended the output included.
        computed: tokens whose keys, values and state are in the caches once the prefill steps in flight have run. While decoding: the
            position at which the oldest decode step in flight starts, or the next one where none is.
        decoding: its last prefill chunk was launched, so that its seat says where the next decode step starts.
        in_flight: decode steps launched whose outcome is not known.
        pages: KV pages held.
        served: rank of its last turn among all turns ever; the smallest is next when not all fit a step.
        decode_steps: (bucket name, steps) pairs.
        accepted: how often the first, second, ... draft of a step was accepted; as long as the steps have drafts.
    """

    request: Request
    arrival: int
    submitted_ms: float
    generated: tuple[int, ...] = ()
    computed: int = 0
    decoding: bool = False
    in_flight: int = 0
    pages: int = 0
    served: int = 0
    started_ms: float | None = None
    first_token_ms: float | None = None
    prefill_chunks: tuple[str, ...] = ()
    decode_steps: tuple[tuple[str, int], ...] = ()
    padded_rows: int = 0
    preemptions: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def total(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def least_total(self) -> int:
        """Tokens that are known, at the least, once all that is in flight has ended: each decode step gives one or more."""
        return self.computed + 1 + self.in_flight if self.decoding else self.total

    def known(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on."""
        boundary = len(self.request.prompt)
        if start >= boundary:
            return self.generated[start - boundary : start - boundary + count]
        return (self.request.prompt[start : start + count] + self.generated)[:count]

    def surely_ends(self, max_model_len: int) -> bool:
        """Whether it ends with what is in flight, however little that gives."""
        least = self.least_total
        return least - len(self.request.prompt) >= self.request.max_tokens or least >= max_model_len

    def preempted(self) -> Live:
        """The request after it lost its pages and its state; what it generated stays."""
        return self._replace(computed=0, decoding=False, pages=0, preemptions=self.preemptions + 1)

    def feeding(self, count: int, pages: int, served: int, started_ms: float) -> Live:
        """The request once a prefill step is launched.

        Args:
            count: known tokens that it feeds.
            pages: held during the step.
            served: rank of this turn.
            started_ms: when it was launched.
        """
        computed = self.computed + count
        return self._replace(
            computed=computed,
            decoding=computed == self.total,
            pages=pages,
            served=served,
            started_ms=started_ms if self.started_ms is None else self.started_ms,
        )

    def stepping(self, pages: int, served: int) -> Live:
        """The request once a decode step is launched; arguments as for `feeding`."""
        return self._replace(in_flight=self.in_flight + 1, pages=pages, served=served)

    def prefilled(self, chunk: str, new: Sequence[int], padded_rows: int, now_ms: float) -> Live:
        """The request after a prefill step.

        Args:
            chunk: name of the bucket.
            new: tokens that were sampled; empty unless this was the last chunk.
            padded_rows: rows of padding that ran beside it.
            now_ms: when that was known.
        """
        return self._replace(
            generated=(*self.generated, *new),
            first_token_ms=now_ms if new and self.first_token_ms is None else self.first_token_ms,
            prefill_chunks=(*self.prefill_chunks, chunk),
            padded_rows=self.padded_rows + padded_rows,
        )

    def decoded(self, bucket_name: str, new: Sequence[int], count: int, drafted: int, padded_rows: int) -> Live:
        """The request after a decode step.

        Args:
            bucket_name: of the step.
            new: tokens of the output.
            count: tokens that the step gave; more than those of the output where that ended before.
            drafted: drafts that were verified; `count` - 1 of them were accepted.
            padded_rows: rows of padding that ran beside it.
        """
        steps = dict(self.decode_steps)
        steps[bucket_name] = steps.get(bucket_name, 0) + 1
        return self._replace(
            generated=(*self.generated, *new),
            computed=self.computed + count,
            in_flight=self.in_flight - 1,
            decode_steps=tuple(steps.items()),
            padded_rows=self.padded_rows + padded_rows,
            verify_steps=self.verify_steps + (drafted > 0),
            drafted_tokens=self.drafted_tokens + drafted,
            accepted=tuple(times + (place < count - 1) for place, times in enumerate(self.accepted)),
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
            verify_steps=self.verify_steps,
            drafted_tokens=self.drafted_tokens,
            accepted_per_position=self.accepted,
        )
        return FinishEvent(self.id, reason, len(self.request.prompt), len(self.generated), record, message)
