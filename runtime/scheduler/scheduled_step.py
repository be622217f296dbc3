"""A scheduled step: the bucket that it runs in, and the rows of each dp group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ...graphs.types import Bucket
from ..picture_spans import PictureInput
from ..request import Request
from .prefix_blocks import Match
from .request_state import RequestState


class ScheduledRequest(NamedTuple):
    """One request's row of a step.

    Attributes:
        state: of the request when the step was scheduled.
        num_pages: pages the request holds during the step; the pool grows its share to this count first.
        num_tokens: prefill: prompt or generated tokens to compute; decode: candidates, the last token and the drafts to verify; encode: 0.
        match: of a request that is admitted where prefixes are kept: what is known of it; `state` is that after the cached tokens.
        checkpoint: the recurrent state after these tokens gets a slot of its own, to be kept.
    """

    state: RequestState
    num_pages: int
    num_tokens: int
    match: Match | None = None
    checkpoint: bool = False

    @property
    def request(self) -> Request:
        """The client's request."""
        return self.state.request

    @property
    def start(self) -> int:
        """Position of the row's first token; of decode the smallest possible one, as steps in flight produce one token at least."""
        return self.state.num_computed_tokens + self.state.steps_in_flight

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens to compute in prefill. A decode step finds its candidates on the device."""
        return self.state.token_ids(self.start, self.num_tokens)

    @property
    def next_token(self) -> int:
        """The known token after those of a prefill; -1 where the step samples it."""
        (token,) = self.state.token_ids(self.start + self.num_tokens, 1) or (-1,)
        return token

    @property
    def samples(self) -> bool:
        """Whether the sampled token is part of the output; false for a prefill chunk that is not the last."""
        return self.state.decoding or self.start + self.num_tokens == self.state.num_tokens

    @property
    def output_index(self) -> int:
        """Index among the generated tokens of the first one that the row can sample; negative for one of the prompt that is scored."""
        state = self.state
        known = state.num_computed_tokens + state.steps_in_flight + 1 if state.decoding else state.num_tokens
        return known - len(state.request.prompt)

    @property
    def scores(self) -> bool:
        """Whether it is a chunk whose tokens a score step scores."""
        return not self.state.decoding and self.start >= self.state.score_from

    @property
    def first_index(self) -> int:
        """The same of the first token that its results have: a score step's begin with the prompt's token behind the first of the chunk."""
        return self.start + 1 - len(self.request.prompt) if self.scores else self.output_index

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens of the prompt that the row scores: nothing else can be sampled in their places, the first of those that it samples."""
        # While there are any no other step of the request is in flight, so that the index is exact.
        if self.state.request.plain or self.output_index >= 0 or not self.samples:
            return ()
        return self.request.prompt[self.output_index :][: 1 + self.num_drafts]

    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens to return log probabilities of; None returns none at all."""
        most, prompts = self.state.request.logprobs, self.state.request.prompt_logprobs
        if prompts is None or self.first_index >= 0:
            return most
        return prompts if most is None else max(most, prompts)

    @property
    def num_drafts(self) -> int:
        """Drafts to verify."""
        return self.num_tokens - 1 if self.state.decoding else 0


arrival_of: Callable[[ScheduledRequest], int] = attrgetter("state.arrival")
_plain: Callable[[ScheduledRequest], bool] = attrgetter("state.request.plain")


class Reservation(NamedTuple):
    """A request that gets the pages and slots that a handover fills.

    Attributes:
        state: of the request once it has them.
        match: the pages that are filled already.
    """

    state: RequestState
    match: Match


class ScheduledSegment(NamedTuple):
    """A picture that an encode step encodes, and the row of the first request that lacks it."""

    row: ScheduledRequest
    picture: PictureInput


class GroupStep(NamedTuple):
    """A dp group's part of a step; a group without rows runs padding.

    Attributes:
        preempted: ids of requests whose pages and slots are freed first.
        admitted: ids of the requests that get state slots and a request slot first, in order of arrival.
        segments: of an encode step.
    """

    rows: Sequence[ScheduledRequest] = ()
    preempted: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    segments: tuple[ScheduledSegment, ...] = ()

    @property
    def pictures(self) -> list[PictureInput]:
        """Those that it encodes."""
        return [segment.picture for segment in self.segments]


class ScheduledStep(NamedTuple):
    """What all dp groups run next, in one bucket.

    Attributes:
        bucket: one of the executor's.
        sizes: rows, and tokens a row, that are computed, where these are values (`Policy.any_size`); None is all that the bucket has.
    """

    bucket: Bucket
    groups: tuple[GroupStep, ...]
    sizes: Bucket | None = None

    @property
    def shape(self) -> Bucket:
        """Rows, and tokens a row, that inputs and outputs have."""
        return self.sizes or self.bucket

    @property
    def rows_with_rules(self) -> Iterator[ScheduledRequest]:
        """The rows of requests that are not plain."""
        return (row for part in self.groups if not all(map(_plain, part.rows)) for row in part.rows if not _plain(row))
