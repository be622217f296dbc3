"""What is known to be in the caches of requests once a step's results are."""

from __future__ import annotations

from typing import NamedTuple

from ..lazy_sequence import LazySequence
from ..step_outputs import BatchTokens
from .decode_batch import DecodeBatch, Ints
from .request_state import RequestState


class Computed(NamedTuple):
    """What is known to be in the caches once a step's results are.

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

    def token_ids(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on."""
        known = self.request.token_ids(start, count)
        after = max(0, start - self.request.num_tokens)
        return known + self.output[after : after + count - len(known)]

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self.request.num_tokens + len(self.output)


class ComputedBatch(LazySequence[Computed]):
    """What a step of a whole batch has computed, of each row.

    Attributes:
        batch: as it was before the results.
        num_computed: as `Computed.num_computed_tokens`, of each row.
    """

    __slots__ = ("_token_ids", "batch", "num_computed")

    def __init__(self, batch: DecodeBatch, tokens: BatchTokens) -> None:
        self.batch, self._token_ids = batch, tokens.token_ids
        self.num_computed: Ints = batch.progress.num_computed + tokens.counts

    def __len__(self) -> int:
        return len(self.batch)

    def row(self, i: int) -> Computed:
        """What the row has computed."""
        request = self.batch.row(i)
        return Computed(request, self._token_ids[i], int(self.num_computed[i]), first=request.num_computed_tokens)

    def _make(self) -> tuple[Computed, ...]:
        return tuple([self.row(i) for i in range(len(self))])
