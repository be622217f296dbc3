"""The record of one request of a load: when its tokens arrived, and what the server said about it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """Tokens that arrived together, `s` seconds after the start of the load."""

    s: float
    tokens: int


@dataclass(frozen=True)
class ServerWord:
    """What the server said about a request; None where it said nothing.

    Attributes:
        cached_tokens: prompt tokens whose prefill was skipped.
        queue_ms: from the server's receipt to its first step.
        first_token_ms: from the server's receipt to its first token.
        verify_steps: steps that verified drafts.
        accepted_tokens: drafts accepted in them.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None
    first_token_ms: float | None = None
    verify_steps: int | None = None
    accepted_tokens: int | None = None


@dataclass(frozen=True)
class StreamOutcome:
    """What came of one request. All times are seconds since the start of the load.

    Attributes:
        index: among the requests of the load.
        due_s: when it arrived; it was sent at `sent_s`, later if as many as allowed were open.
        ended_s: when the server ended it, or it failed.
        planned_tokens: of the prompt, as it was made.
        arrivals: of its tokens, in order.
        error: why it failed.
        token_ids: that were generated.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    planned_tokens: int
    arrivals: tuple[Arrival, ...] = ()
    told: ServerWord = ServerWord()
    error: str | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """As the server counted them, else as planned."""
        return self.planned_tokens if self.told.prompt_tokens is None else self.told.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """As the server counted them, else those that arrived."""
        return sum(arrival.tokens for arrival in self.arrivals) if self.told.output_tokens is None else self.told.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from sending; None where none arrived."""
        return self.arrivals[0].s - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """From sending to the last token; to the end where no token arrived."""
        return (self.arrivals[-1].s if self.arrivals else self.ended_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no second one."""
        if not self.arrivals or self.output_tokens < 2:
            return None
        return (self.arrivals[-1].s - self.arrivals[0].s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between tokens: those that arrive together share the time since the arrival before."""
        gaps: list[float] = []
        for before, now in itertools.pairwise(self.arrivals):
            gaps += [(now.s - before.s) / now.tokens] * now.tokens
        return gaps
