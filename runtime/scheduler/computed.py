"""Tokens of a request whose keys, values and states are in the caches after a step, by the results of that step."""

from __future__ import annotations

from typing import NamedTuple

from .request_state import RequestState


class Computed(NamedTuple):
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

    def token_ids(self, start: int, count: int) -> tuple[int, ...]:
        """Up to `count` known tokens from position `start` on."""
        known = self.request.token_ids(start, count)
        after = max(0, start - self.request.num_tokens)
        return known + self.output[after : after + count - len(known)]

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self.request.num_tokens + len(self.output)
