"""What a request slot says: where the next decode step of a request starts. Steps write it, and so does the host behind a handover."""

from __future__ import annotations

import torch

from .types import Limits

START, ACCEPTED, TOKENS = 0, 1, 2
"""Columns of a request slot: the position of the next step's first token; which of the request's state slots holds the state before that
token; and from here on the token and its drafts. Where graphs take pictures, behind them what is added to positions."""


def start(position: int, token: int, limits: Limits, offset: int = 0) -> torch.Tensor:
    """The slot [2 + k + 1] i32, and a column more in graphs that take pictures, of a request that goes on with this token at this position,
    behind the first of its state slots and without drafts.

    Args:
        offset: what is added to the position where there are pictures before it.
    """
    return torch.tensor([position, 0, token, *[0] * limits.drafts, *[offset] * bool(limits.picture_rows)], dtype=torch.int32)
