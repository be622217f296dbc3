"""What a request slot says: where the next decode step of a request starts. Steps write it, and so does the host behind a handover."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import Limits

START, ACCEPTED, TOKENS = 0, 1, 2
"""Columns of a request slot: the position of the next step's first token; which of the request's state slots holds the state before that
token; and from here on the token and its drafts. Where graphs take pictures, behind them what is added to the first token's position, and
the same of each candidate where there are several, places counted: a step adds them to positions as it would add the places alone."""


def widths(limits: Limits) -> list[int]:
    """Columns of the parts of a slot, in their order."""
    candidates = limits.drafts + 1
    offsets = [1, candidates] if limits.drafts else [1]
    return [1, 1, candidates, *(offsets if limits.picture_rows else [])]


def start(position: int, tokens: Sequence[int], limits: Limits, offset: int = 0, accepted: int = 0) -> torch.Tensor:
    """The slot [sum of `widths`] i32 of a request that goes on with the first of these tokens at this position.

    Args:
        tokens: behind the first its drafts; those that are missing are 0.
        offset: what is added to the position where there are pictures before it.
        accepted: which of its state slots has the state before the position.
    """
    missing = [0] * (limits.drafts + 1 - len(tokens))
    return torch.tensor([position, accepted, *tokens, *missing, *offsets(offset, limits)], dtype=torch.int32)


def offsets(offset: int, limits: Limits) -> list[int]:
    """What stands behind the candidates in a slot; nothing where graphs take no pictures."""
    return [offset, *(offset + place for place in range(limits.drafts + 1))][: sum(widths(limits)[TOKENS + 1 :])]
