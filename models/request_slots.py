"""Turns a request's seat into where its next step starts, and what a step gave into the seat.

A seat is a row of int32 on the device, one for each request in flight. Since a step finds there what the step before it left, the
next step can be launched before anyone has read what this one gave. Seat 0 is null: rows of padding read and write it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree

START, ACCEPTED, TOKENS = 0, 1, 2
"""Columns of a seat: position of the next step's first token, which of the request's slots holds the state before it, and from here
on that token and its drafts."""


class Seats(NamedTuple):
    """What the rows of a decode step start from.

    Attributes:
        tokens: [B, Q] candidates.
        starts: [B] position of the first, within the longest context.
        lengths: [B] valid candidates; 0 in rows of padding and where the context is full.
        read_slots: [B] state slot to start from.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    read_slots: torch.Tensor


def state(limits: Limits) -> Aval:
    """The pool of seats: [C, 2 + k + 1] i32."""
    return Aval((limits.num_seats, TOKENS + limits.drafts + 1), torch.int32, ("seats", None))


def read(pool: torch.Tensor, inputs: Tree, limits: Limits) -> Seats:
    """Where the rows of a decode step start; no row goes beyond the longest context.

    Args:
        pool: [C, 2 + Q].
        inputs: of a decode step (graphs/step_inputs.py).
    """
    seat = pool.index_select(0, inputs["seats"])
    starts, accepted = seat[:, START], seat[:, ACCEPTED]
    slots = inputs["write_slots"].gather(1, accepted[:, None].clamp(0, limits.drafts).to(torch.int64)).view(-1)
    lengths = (starts + inputs["drafts"] + 1).clamp(max=limits.max_model_len) - starts
    # Attention looks up the pages of a row's first token, whether it is valid or not.
    starts = starts.clamp(max=limits.max_model_len - 1)
    return Seats(seat[:, TOKENS:].contiguous(), starts, torch.where(inputs["seats"] > 0, lengths, 0), slots)


def write(pool: torch.Tensor, seats: torch.Tensor, starts: torch.Tensor, accepted: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The pool after a step.

    Args:
        seats: [B].
        starts: [B] position of `tokens[:, 0]`.
        accepted: [B] index of the slot, among the request's, with the state before it.
        tokens: [B, Q] the last token that counts, and the drafts after it.
    """
    values = torch.cat([starts[:, None], accepted[:, None], tokens], 1)
    # What padding leaves in the null seat must be something a row can start from.
    values = torch.where(seats[:, None] > 0, values, 0)
    written: torch.Tensor = ops.seat_write(pool, seats, values)
    return written


def uniforms(inputs: Tree, starts: torch.Tensor, q_len: int) -> torch.Tensor:
    """Of the random numbers from position `base` on, those of this step: [B, 2Q-1] -> [B, Q]."""
    given: torch.Tensor = inputs["uniform"]
    if q_len == 1:
        return given
    step = torch.arange(q_len, dtype=torch.int32, device=starts.device)
    at = (starts - inputs["base"]).clamp(0, q_len - 1)[:, None] + step
    return given.gather(1, at.to(torch.int64))
