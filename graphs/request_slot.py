"""What a request slot says: where the next decode step of a request starts. Steps write it, and so does the host behind a handover."""

from __future__ import annotations

import torch

START, ACCEPTED, TOKENS = 0, 1, 2
"""Columns of a request slot: the position of the next step's first token; which of the request's state slots holds the state before that
token; and from here on the token and its drafts."""


def start(position: int, token: int, drafts: int) -> torch.Tensor:
    """The slot [2 + k + 1] i32 of a request that goes on with this token at this position, behind the first of its state slots.

    Args:
        drafts: k; the slot has none.
    """
    return torch.tensor([position, 0, token, *(0 for _ in range(drafts))], dtype=torch.int32)
