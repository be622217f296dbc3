"""The scheduler's record of one unfinished request."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ..request import NO_INPUTS, SEND, DecodedRow, ExecutionRecord, FinishEvent, HostInputs, Request
from .picture_numbers import with_numbers
from .token_log import TokenLog

AGED = -(2**31)
"""A level that is more urgent than every priority."""


class RequestState(NamedTuple):
    """A request that is waiting or running. Times are in ms of the engine's clock.

    A step changes it twice: when it is launched, by what is certain then, and when its results are known.

    Attributes:
        arrival: rank in the total order of submissions. It identifies the request: a client may reuse an id.
        record: the execution record so far; `finish_event` adds decode steps, and the times that are known at the end.
        output_token_ids: tokens sampled so far, including the one that ended the output, with the rows of decode steps.
        num_computed_tokens: tokens whose keys, values and state are in the caches once the prefill steps in flight have run. While
            decoding: the position at which the oldest decode step in flight starts, or the next one where none is.
        decoding: the last prefill chunk was launched, so the device knows where the next decode step starts.
        steps_in_flight: decode steps launched whose results are not known.
        num_pages: KV pages held.
        last_scheduled: rank of its latest row among all rows ever scheduled.
        started_ms: when its first step was launched.
        drafts: what the device drafted after the last token; known where what may follow depends on them.
        parked: it holds pages and is not scheduled, because a handover reads or fills them (`Request.handover`).
        drafted: how many drafts the last step that was launched leaves for the next; none behind pages that were received.
        unscored: tokens at the end of the prompt that are still to be scored (`Request.num_scored`): the steps so far have not got there.
        in_chunks: score steps score the prompt, and its tokens are known; else decode steps do, to which they become known one by one.
        aged: it has waited so long that it goes before all others (`turns.py`).
        checkpoints: how many tokens are computed where a chunk of the prompt should end, because its state is worth keeping.
        picture_numbers: of its pictures, in keys of prefixes (`picture_numbers.py`).
    """

    request: Request
    arrival: int
    submitted_ms: float
    # What decode steps change stands together: `decode_launched` and `decode_committed` go by the order.
    record: ExecutionRecord = ExecutionRecord()
    output_token_ids: TokenLog | tuple[int, ...] = ()
    num_computed_tokens: int = 0
    drafts: tuple[int, ...] = ()
    steps_in_flight: int = 0
    num_pages: int = 0
    last_scheduled: int = 0
    drafted: int = 0
    decoding: bool = False
    started_ms: float | None = None
    aged: bool = False
    checkpoints: tuple[int, ...] = ()
    unscored: int = 0
    parked: bool = False
    picture_numbers: tuple[int, ...] = ()
    in_chunks: bool = False

    @property
    def level(self) -> int:
        """Its priority, or where it is aged one before all others."""
        return AGED if self.aged else self.request.priority

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt, as far as decode steps need not score it, and generated."""
        return len(self.request.prompt) - (0 if self.in_chunks else self.unscored) + len(self.output_token_ids)

    @property
    def score_from(self) -> int:
        """Position from which on its chunks are those of score steps; behind all its tokens where none are."""
        return self.num_tokens - (self.unscored + 1 if self.in_chunks and self.unscored else 0)

    @property
    def num_to_prefill(self) -> int:
        """Tokens that prefill steps compute: all that are known, but for the last of a prompt that is handed over."""
        return self.num_tokens - (self.request.handover == SEND)

    @property
    def min_num_tokens(self) -> int:
        """Tokens that are known, at the least, once all steps in flight have ended: each decode step produces one or more."""
        return self.num_computed_tokens + 1 + self.steps_in_flight if self.decoding else self.num_tokens

    @property
    def deadline_ms(self) -> float:
        """When it ends if it has not by then; infinity where it may run, or nobody may end it but who handed it over."""
        request, deadline = self.request, math.inf
        if self.parked:
            # Its pages may be written, and must not be given to others meanwhile.
            return deadline
        if request.timeout_ms is not None:
            deadline = self.submitted_ms + request.timeout_ms
        if request.first_token_timeout_ms is not None and not self.output_token_ids and self.unscored == request.num_scored:
            deadline = min(deadline, self.submitted_ms + request.first_token_timeout_ms)
        return deadline

    @property
    def restricted(self) -> bool:
        """Whether its next step needs a bitmask (`Request.restricted`)."""
        return not self.request.plain and self.request.restricted(self.min_num_tokens - len(self.request.prompt))

    @property
    def host_inputs(self) -> HostInputs:
        """What its next step needs of the inputs that are for a few rows (`Request.host_inputs`)."""
        return NO_INPUTS if self.request.plain else self.request.host_inputs(self.min_num_tokens - len(self.request.prompt))

    @property
    def follows_output(self) -> bool:
        """Whether its next step needs the tokens of all its steps so far (`Request.follows_output`)."""
        return not self.request.plain and self.request.follows_output(self.min_num_tokens - len(self.request.prompt))

    @property
    def settled(self) -> bool:
        """Whether the tokens of all its steps are known."""
        return not self.steps_in_flight and self.num_tokens == self.num_computed_tokens + self.decoding

    def token_ids(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on."""
        boundary = len(self.request.prompt) - (0 if self.in_chunks else self.unscored)
        if start >= boundary:
            return self.output_token_ids[start - boundary : start - boundary + count]
        known = self.request.prompt[start : min(start + count, boundary)]
        return known + self.output_token_ids[: count - len(known)]

    def key_ids(self, start: int, count: int) -> tuple[int, ...]:
        """The same in keys of prefixes: with the numbers of pictures in the places of their rows."""
        return self.with_numbers(self.token_ids(start, count), start)

    def with_numbers(self, tokens: tuple[int, ...], start: int) -> tuple[int, ...]:
        """Its tokens from `start` on, with the numbers of pictures in the places of their rows."""
        return with_numbers(tokens, start, self.request.pictures, self.picture_numbers) if self.picture_numbers else tokens

    def finishes_in_flight(self, max_model_len: int) -> bool:
        """Whether the steps in flight finish the request, however few tokens they produce; where there are none, nothing does."""
        request, least = self.request, self.num_computed_tokens + 1 + self.steps_in_flight if self.decoding else self.num_tokens
        return (least >= request.longest or least >= max_model_len) and least > self.num_tokens

    def preempted(self) -> RequestState:
        """The request after it lost its pages and its state; the tokens it generated remain."""
        record = self.record._replace(preemptions=self.record.preemptions + 1)
        return self._replace(record=record, num_computed_tokens=0, decoding=False, num_pages=0, checkpoints=())

    def resumed(self, num_tokens: int, checkpoints: tuple[int, ...]) -> RequestState:
        """The waiting request when it is admitted and so many of its tokens are in the caches already."""
        record = self.record if self.record.preemptions else self.record._replace(cached_tokens=num_tokens)
        return self._replace(record=record, num_computed_tokens=num_tokens, checkpoints=checkpoints)

    def prefill_launched(self, num_tokens: int, num_pages: int, last_scheduled: int, now_ms: float, drafted: int) -> RequestState:
        """The request once a prefill step of so many of its tokens is launched, which drafts so many."""
        computed = self.num_computed_tokens + num_tokens
        return self._replace(
            num_computed_tokens=computed,
            decoding=computed == self.num_tokens,
            parked=computed == self.num_to_prefill < self.num_tokens,
            checkpoints=tuple(place for place in self.checkpoints if place > computed),
            num_pages=num_pages,
            last_scheduled=last_scheduled,
            drafted=drafted,
            started_ms=now_ms if self.started_ms is None else self.started_ms,
        )

    def encoded(self, count: int) -> RequestState:
        """The request once so many of its pictures were encoded."""
        return self._replace(record=self.record._replace(encoded_pictures=self.record.encoded_pictures + count))

    def reserved(self, num_pages: int, num_cached: int) -> RequestState:
        """The waiting request once it has pages for a handover, of whose tokens so many are computed already."""
        record = self.record._replace(cached_tokens=num_cached)
        return self._replace(record=record, num_computed_tokens=num_cached, num_pages=num_pages, parked=True)

    def unparked(self) -> RequestState:
        """The parked request once it has given its pages back and is one that nobody hands over."""
        return self._replace(request=replace(self.request, handover=""), num_computed_tokens=0, num_pages=0, parked=False)

    def landed(self, now_ms: float) -> RequestState:
        """The parked request once all of its prompt but the last token is in its pages."""
        started_ms = now_ms if self.started_ms is None else self.started_ms
        return self._replace(num_computed_tokens=self.num_tokens - 1, decoding=True, parked=False, drafted=0, started_ms=started_ms)

    def decode_launched(self, num_pages: int, last_scheduled: int, drafted: int) -> RequestState:
        """The request once a decode step is launched that drafts so many tokens."""
        # As `_replace` would, in a tenth of the time: every row of every step comes here.
        return tuple.__new__(RequestState, (*self[:7], self[7] + 1, num_pages, last_scheduled, drafted, *self[11:]))

    def prefill_committed(
        self, bucket_name: str, output: tuple[int, ...], padded_rows: int, now_ms: float, drafts: tuple[int, ...] = ()
    ) -> RequestState:
        """The request after a prefill step.

        Args:
            output: the sampled token; empty unless this was the last chunk.
            padded_rows: rows of padding in the step.
            now_ms: when the results were known.
            drafts: after the sampled token, where they are read.
        """
        record = self.record
        first_token_ms = now_ms - self.submitted_ms if output and record.first_token_ms is None else record.first_token_ms
        record = record._replace(
            first_token_ms=first_token_ms,
            prefill_chunks=(*record.prefill_chunks, bucket_name),
            padded_rows=record.padded_rows + padded_rows,
        )
        return self._replace(record=record, output_token_ids=self._log.extended(output), drafts=drafts)

    def decode_committed(self, row: DecodedRow, output: tuple[int, ...], drafts: tuple[int, ...] = ()) -> RequestState:
        """The request after a decode step.

        Args:
            row: of the request; its drafts that were accepted, and one token more, were sampled.
            output: sampled tokens that belong to the output.
            drafts: after the last of the tokens, where they are read.
        """
        log, computed = self[4], self[5] + row[3] + 1
        log = (log if type(log) is TokenLog else self._log).extended(output, row)
        return tuple.__new__(RequestState, (*self[:4], log, computed, drafts, self[7] - 1, *self[8:]))

    @property
    def _log(self) -> TokenLog:
        """The output, to be extended: a tuple would be copied at every step, and a record of the steps made anew."""
        log = self.output_token_ids
        return log if type(log) is TokenLog else TokenLog(log)

    def clip_output(self, sampled: tuple[int, ...], max_model_len: int) -> tuple[tuple[int, ...], str | None]:
        """Which of the tokens just sampled belong to the output.

        Returns:
            The tokens up to and including the one that ends the output, and the finish reason if there is one. Tokens that belong to
            the prompt (`unscored`) are no output.
        """
        request, unscored, stops = self.request, self.unscored, self.request.stop_token_ids
        # Far from its end nothing is counted. What is computed lies one token behind what is known, at most.
        known = self.num_computed_tokens + len(sampled) + 1
        if known < max_model_len and known < request.longest and not unscored and (not stops or stops.isdisjoint(sampled)):
            return sampled, None
        generated = len(self.output_token_ids)
        total = len(request.prompt) + generated
        if not request.max_tokens and len(sampled) >= unscored:
            return (), "length"
        sampled = sampled[unscored:] if unscored else sampled
        for count, token in enumerate(sampled, start=1):
            if token in stops:
                return sampled[:count], "stop"
            if generated + count >= request.max_tokens or total + count >= max_model_len:
                return sampled[:count], "length"
        return sampled, None

    def scored(self, count: int, now_ms: float, generated: bool) -> RequestState:
        """The request, of which a step has just been committed, after so many tokens more of its prompt were scored in it.

        Args:
            now_ms: when the results were known.
            generated: whether the step sampled tokens behind the prompt.
        """
        record = self.record
        if generated and record.first_token_ms is None:
            record = record._replace(first_token_ms=now_ms - self.submitted_ms)
        return self._replace(record=record, unscored=self.unscored - count)

    def finish_event(self, reason: str, now_ms: float, message: str | None = None, code: str | None = None) -> FinishEvent:
        """The last event of the request, with its execution record."""
        record = self.record.decoded(self._log.rows)._replace(
            queue_ms=(now_ms if self.started_ms is None else self.started_ms) - self.submitted_ms, total_ms=now_ms - self.submitted_ms
        )
        return FinishEvent(self.id, reason, len(self.request.prompt), len(self.output_token_ids), record, message, code=code)


class ComputedTokens(NamedTuple):
    """A request and its tokens in the caches, once the results of one of its steps are read.

    Attributes:
        request: as it was before the results.
        output: its tokens among them that were not known before.
        num_computed_tokens: of its tokens; those of steps in flight do not count.
        not_finite: it computed what is no number, and nobody knows where that began.
        first: position of the first token that a decode step computed; None of a prefill step.
    """

    request: RequestState
    output: tuple[int, ...]
    num_computed_tokens: int
    not_finite: bool = False
    first: int | None = None

    def key_ids(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on, as keys of prefixes have them (`RequestState.key_ids`)."""
        known = self.request.token_ids(start, count)
        after = max(0, start - self.request.num_tokens)
        return self.request.with_numbers(known + self.output[after : after + count - len(known)], start)

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self.request.num_tokens + len(self.output)
