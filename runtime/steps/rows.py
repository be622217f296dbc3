"""Rows of steps of each kind: what one request, or one picture, has in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...graphs.steps.decode import DECODE
from ...graphs.steps.encode import ENCODE
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.score import SCORE
from ..adjustments import Adjustment
from ..constraint import Bitmask
from ..picture_spans import PictureInput
from ..picture_spans import Places as Places
from ..request import Sampling


class PrefillRow(NamedTuple):
    """One request's chunk in a prefill or score step, with the pages and slots that it reads and writes.

    Attributes:
        tokens: the chunk, 1 to q_len tokens.
        start: position of the first of them: how many tokens of the request are in the cache already.
        pages: ids of its pages in order of position, at least enough for start + len(tokens) tokens.
        slot: state slot to write the state after the last token to.
        request_slot: request slot that its first decode step starts from.
        next_token: the prompt's token after the chunk; -1 where that token is sampled.
        sampling: parameters of the sampled token.
        uniform: random number in [0, 1) of the sampled token; greedy sampling needs none.
        logprobs: whether the request asked for log probabilities.
        bitmask: [1, words] of the sampled token; None restricts nothing.
        adjustment: of the logits of the sampled token; None changes nothing.
        start_slot: state slot to start from; None is the one that it writes.
        places: of its tokens, if its prompt has pictures.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int
    request_slot: int
    next_token: int = -1
    sampling: Sampling = Sampling()
    uniform: float = 0.0
    logprobs: bool = False
    bitmask: Bitmask | None = None
    adjustment: Adjustment | None = None
    start_slot: int | None = None
    places: Places | None = None

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return len(self.tokens)

    @property
    def slot_read(self) -> int:
        """State slot that the step starts from."""
        return self.slot if self.start_slot is None else self.start_slot


class DecodeRow(NamedTuple):
    """One request in a decode step, with the pages and slots that it reads and writes; its request slot holds tokens and position.

    Attributes:
        request_slot: request slot that the step starts from.
        base: smallest position at which it can start, for all the host knows.
        pages: ids of its pages in order of position, at least enough for every token that can be written from `base` on.
        slots: all state slots of the request, in the same order at every step.
        drafts: how many of its drafts are verified, 0 to Q-1.
        sampling: parameters of the sampled tokens.
        uniforms: random numbers in [0, 1) of the tokens that can be sampled after positions base, base + 1, ..., k + Q of them or more;
            greedy sampling needs none.
        logprobs: whether the request asked for log probabilities.
        bitmask: [Q, words] of the sampled tokens; None restricts nothing.
        adjustment: of the logits of the sampled tokens; None changes nothing.
    """

    request_slot: int
    base: int
    pages: Sequence[int]
    slots: Sequence[int]
    drafts: int = 0
    sampling: Sampling = Sampling()
    uniforms: Sequence[float] = ()
    logprobs: bool = False
    bitmask: Bitmask | None = None
    adjustment: Adjustment | None = None


class SegmentRow(NamedTuple):
    """A picture in an encode step, and the rows of the pool that its rows go to."""

    picture: PictureInput
    rows: Sequence[int]


Row = PrefillRow | DecodeRow | SegmentRow

ROWS: Mapping[str, type[Row]] = {PREFILL.name: PrefillRow, SCORE.name: PrefillRow, DECODE.name: DecodeRow, ENCODE.name: SegmentRow}
"""What the rows of a kind of steps are."""
