"""Where the state of a prompt is worth keeping: chunks end there, and each such place costs one step more.

What a step costs is counted in tokens, by `steps.sizes.price`. A chunk that ends early leaves a rest for a step of its own, which
costs as much as one of the smallest prefill bucket or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .prefix_blocks import Match

BRANCH, END = 0.5, 2.0
"""Fewest tokens that a checkpoint saves, in parts of the cost of that step: at a branch, which saves them for every prompt to come
that shares them; and at the end of a prompt, which only a prompt that goes on from there has use for."""


def places(match: Match, num_tokens: int, page_size: int, step_tokens: float) -> tuple[int, ...]:
    """How many tokens of an admitted prompt are computed at each place, in order.

    They are the last page boundary up to which the prompt is known, where that has no state yet, and the last one of the prompt.

    Args:
        match: what is known of the prompt.
        num_tokens: of the prompt.
        page_size: P.
        step_tokens: what a step of the smallest prefill bucket costs, in tokens.
    """
    start, branch, end = match.num_tokens(page_size), len(match.blocks) * page_size, (num_tokens - 1) // page_size * page_size
    # A tail is gone once it was used; what other prompts find is a state between two pages.
    cached = match.without_tail().depth * page_size
    branches = (branch,) if branch > start and branch - cached >= BRANCH * step_tokens else ()
    return (*branches, end) if end > start and end - (*branches, cached)[0] >= END * step_tokens else branches


class Chunk(NamedTuple):
    """What a row computes: `num_tokens` tokens, and whether the state after them is kept."""

    num_tokens: int
    checkpoint: bool


class CheckpointSlots:
    """State slots for the checkpoints of one group's step.

    Args:
        page_size: P.
        available: slots that nothing needs, those of old checkpoints included.
        unused: those of them that hold nothing.
    """

    def __init__(self, page_size: int, available: int, unused: int) -> None:
        self._page_size, self._available, self._unused = page_size, available, unused

    def stop(self, checkpoints: Sequence[int]) -> int:
        """Where a chunk should end, and reserves the slot for it; 0 for nowhere, or for want of a slot."""
        if not checkpoints or not self._available:
            return 0
        self._available -= 1
        return checkpoints[0]

    def chunk(self, start: int, stop: int, num_tokens: int, most: int) -> Chunk:
        """A chunk of up to `most` tokens.

        One that ends between two pages where it ends anyway is kept, too, but no old checkpoint is given up for it.

        Args:
            start: tokens computed before it.
            stop: as `stop` said.
            num_tokens: of the prompt.
        """
        count = min((stop or num_tokens) - start, most)
        end = start + count
        if end == stop:
            return Chunk(count, checkpoint=True)
        extra = end < num_tokens and not end % self._page_size and min(self._available, self._unused) > 0
        if extra:
            self._available, self._unused = self._available - 1, self._unused - 1
        return Chunk(count, checkpoint=extra)
