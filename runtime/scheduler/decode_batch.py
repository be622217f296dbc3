"""The running requests of a dp group as arrays, while all of them are plain and decode: a step changes them all at once.

The records of the requests are made only when somebody looks at them. What a step does to a batch is by definition what it does to each of
these (`RequestState.decode_launched`, `RequestState.decode_committed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..lazy_sequence import LazySequence
from ..replacing import replacer
from .policy import Policy
from .request_state import RequestState, decode_recorded, one_more
from .token_log import TokenLog

Ints = npt.NDArray[np.int64]
LOOK_AHEAD = 2
"""Steps of one token that are looked ahead, at most: one in flight and the next one."""

T = TypeVar("T")

_progressed = replacer(RequestState, "record", "output_token_ids", "num_computed_tokens", "steps_in_flight", "num_pages", "last_scheduled")


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The requests of a batch, and what no step changes of them. Everything is in the order of their rows.

    Attributes:
        states: the requests as they were when the batch began.
        arrivals: `RequestState.arrival` of each.
        places: of each request, most urgent first, the number of its row; None where rows have that order.
        logs: the lists that their outputs are kept in, which grow.
        prompts: tokens of their prompts.
        ends: how many tokens, with those of the prompt, a request has when it ends at the latest.
        drafts: how many drafts each verifies in a step.
        stops: tokens that end the output of any of them.
        scores: whether any wants log probabilities.
        ones: one for each row.
    """

    states: tuple[RequestState, ...]
    ids: tuple[str, ...]
    arrivals: tuple[int, ...]
    places: tuple[int, ...] | None
    logs: tuple[list[int], ...]
    prompts: Ints
    ends: Ints
    drafts: Ints
    stops: frozenset[int]
    scores: bool
    ones: Ints

    def urgent_first(self, values: Sequence[T]) -> Sequence[T]:
        """What is in the order of rows, in that of the running requests."""
        return values if self.places is None else [values[i] for i in self.places]


class Progress(NamedTuple):
    """What steps have done to a batch since it began. Arrays have an item for each row, and are never changed.

    Attributes:
        num_computed: as `RequestState.num_computed_tokens`.
        num_pages: pages that each holds.
        used_pages: their sum.
        steps_in_flight: of each of them.
        room: at least so many tokens more can be computed of each before one has to end.
        num_output: tokens of all outputs.
        first_scheduled: rank of the first row of the latest step among all rows ever scheduled; None before the first one.
        decode_steps: steps by bucket name, as in `ExecutionRecord`.
        padded_rows: of these steps.
        verify_steps, drafted_tokens, accepted: as in `ExecutionRecord`; accepted is [rows, drafts].
    """

    num_computed: Ints
    num_pages: Ints
    used_pages: int
    steps_in_flight: int
    room: int
    num_output: int
    verify_steps: Ints
    drafted_tokens: Ints
    accepted: Ints
    first_scheduled: int | None = None
    decode_steps: tuple[tuple[str, int], ...] = ()
    padded_rows: int = 0


class DecodeBatch(LazySequence[RequestState]):
    """The running requests of a group, most urgent first."""

    __slots__ = ("members", "progress")

    def __init__(self, members: Members, progress: Progress) -> None:
        self.members, self.progress = members, progress

    def __len__(self) -> int:
        return len(self.members.ids)

    def row(self, i: int) -> RequestState:
        """The request of a row."""
        base, p = self.members.states[i], self.progress
        record, computed = base.record, int(p.num_computed[i])
        if p.decode_steps:
            record = decode_recorded(
                record,
                _sum(record.decode_steps, p.decode_steps),
                record.padded_rows + p.padded_rows,
                record.verify_steps + int(p.verify_steps[i]),
                record.drafted_tokens + int(p.drafted_tokens[i]),
                tuple([a + b for a, b in zip(record.accepted_per_position, p.accepted[i].tolist(), strict=False)]),
            )
        return _progressed(
            base,
            record,
            TokenLog.of(self.members.logs[i], computed + 1 - len(base.request.prompt)),
            computed,
            p.steps_in_flight,
            int(p.num_pages[i]),
            base.last_scheduled if p.first_scheduled is None else p.first_scheduled + i,
        )

    def launched(self, num_pages: Ints, used_pages: int, first_scheduled: int) -> DecodeBatch:
        """The batch once a decode step of all its rows is launched."""
        p = self.progress
        in_flight = p.steps_in_flight + 1
        return DecodeBatch(
            self.members,
            p._replace(num_pages=num_pages, used_pages=used_pages, steps_in_flight=in_flight, first_scheduled=first_scheduled),
        )

    def may_end(self, tokens: int) -> bool:
        """Whether a request ends within so many more tokens that are computed of each."""
        p = self.progress
        return p.room <= tokens and bool((p.num_computed + (tokens + 1) >= self.members.ends).any())

    def committed(
        self, bucket_name: str, padded_rows: int, token_ids: Sequence[tuple[int, ...]], counts: Ints, verified: Ints
    ) -> DecodeBatch:
        """The batch after a decode step of which no request has ended; the outputs of all of them grow.

        Args:
            token_ids: of each row.
            counts: how many these are.
            verified: drafts that were verified.
        """
        for log, tokens in zip(self.members.logs, token_ids, strict=True):
            log += tokens
        p, num_computed = self.progress, self.progress.num_computed + counts
        most, total = (1, len(self)) if counts is self.members.ones else (int(counts.max()), int(counts.sum()))
        p = p._replace(
            num_computed=num_computed,
            steps_in_flight=p.steps_in_flight - 1,
            # Where the least that is certain is not enough it is looked up.
            room=p.room - most if p.room > most + LOOK_AHEAD else int((self.members.ends - num_computed).min()) - 1,
            num_output=p.num_output + total,
            decode_steps=one_more(p.decode_steps, bucket_name),
            padded_rows=p.padded_rows + padded_rows,
        )
        drafts = p.accepted.shape[1]
        if drafts:
            p = p._replace(
                verify_steps=p.verify_steps + (verified > 0),
                drafted_tokens=p.drafted_tokens + verified,
                accepted=p.accepted + (counts[:, None] > np.arange(1, drafts + 1)),
            )
        return DecodeBatch(self.members, p)

    @property
    def grows(self) -> bool:
        """Whether it may grow: nobody has let the outputs grow from an older state of it."""
        return sum(map(len, self.members.logs)) == self.progress.num_output

    def _make(self) -> tuple[RequestState, ...]:
        places = range(len(self)) if self.members.places is None else self.members.places
        return tuple([self.row(i) for i in places])


def batch_of(policy: Policy, running: Sequence[RequestState], steps_in_flight: int) -> DecodeBatch | None:
    """The running requests as a batch, whose rows are in the order in which they were last scheduled.

    None where a decode step has not a row for each of them, or one needs to be looked at by itself: it is a prompt in progress, it is not
    plain, or a step in flight is not one that all of them have a row of.
    """
    if not running or len(running) > policy.max_decodes or not all(_joins(request, steps_in_flight) for request in running):
        return None
    places = sorted(range(len(running)), key=lambda i: running[i].last_scheduled)
    states = tuple([running[i] for i in places])
    limits, count = policy.limits, len(states)
    requests = [state.request for state in states]
    members = Members(
        states,
        tuple([request.id for request in requests]),
        tuple([state.arrival for state in states]),
        None if places == list(range(count)) else tuple(sorted(range(count), key=places.__getitem__)),
        tuple([_log(state) for state in states]),
        np.array([len(request.prompt) for request in requests]),
        np.array([min(len(request.prompt) + request.max_tokens, limits.max_model_len) for request in requests]),
        np.array([policy.drafts(request) for request in requests]),
        frozenset().union(*{request.stop_token_ids for request in requests}),
        any(request.logprobs is not None for request in requests),
        np.ones(count, np.int64),
    )
    num_computed, num_pages = (np.array(column) for column in zip(*((s.num_computed_tokens, s.num_pages) for s in states), strict=True))
    none = np.zeros(count, np.int64)
    progress = Progress(
        num_computed,
        num_pages,
        int(num_pages.sum()),
        steps_in_flight,
        int((members.ends - num_computed).min()) - 1,
        sum(len(state.output_token_ids) for state in states),
        none,
        none,
        np.zeros((count, limits.drafts), np.int64),
    )
    return DecodeBatch(members, progress)


def _joins(state: RequestState, steps_in_flight: int) -> bool:
    return (
        state.decoding
        and state.request.plain
        and state.steps_in_flight == steps_in_flight
        # Its first token is known, so that no prefill step of it is in flight.
        and state.num_tokens == state.num_computed_tokens + 1
        and state.record.first_token_ms is not None
    )


def _log(state: RequestState) -> list[int]:
    output = state.output_token_ids
    return (output if isinstance(output, TokenLog) else TokenLog(output)).growing()


def _sum(steps: tuple[tuple[str, int], ...], more: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    for name, count in more:
        steps = one_more(steps, name, count)
    return steps
