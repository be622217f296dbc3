"""Request slots: for each request in flight one row on the device that says where its next decode step starts.

A step reads there what the step before it wrote, so it can be launched before the host has read the outputs of that one. Slot 0 is null:
rows of padding read and write it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..graphs import ops
from ..graphs.types import Aval, Limits, Tree

START, ACCEPTED, TOKENS = 0, 1, 2
"""Columns of a request slot: the position of the next step's first token; which of the request's state slots holds the state before that
token; and from here on the token and its drafts."""


class DecodeStart(NamedTuple):
    """Where the rows of a decode step start.

    Attributes:
        tokens: [B, Q] candidates: the last token and its drafts.
        starts: [B] position of the first, within the longest context.
        lengths: [B] valid candidates; 0 in rows of padding and where the context is full.
        read_slots: [B] state slot to start from.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    read_slots: torch.Tensor


def state(limits: Limits) -> Aval:
    """The pool of request slots: [C, 2 + k + 1] i32."""
    return Aval((limits.num_seats, TOKENS + limits.drafts + 1), torch.int32, ("seats", None))


def read(pool: torch.Tensor, inputs: Tree, limits: Limits) -> DecodeStart:
    """Where the rows of a decode step start; no row goes beyond the longest context.

    Args:
        pool: [C, 2 + Q].
        inputs: of a decode step (graphs/step_inputs.py).
    """
    values = pool.index_select(0, inputs["seats"])
    starts, accepted = values[:, START], values[:, ACCEPTED]
    read_slots = inputs["write_slots"].gather(1, accepted[:, None].clamp(0, limits.drafts).to(torch.int64)).view(-1)
    lengths = (starts + inputs["drafts"] + 1).clamp(max=limits.max_model_len) - starts
    # Attention looks up the page of a row's first token, whether that token is valid or not.
    starts = starts.clamp(max=limits.max_model_len - 1)
    return DecodeStart(values[:, TOKENS:].contiguous(), starts, torch.where(inputs["seats"] > 0, lengths, 0), read_slots)


def write(pool: torch.Tensor, seats: torch.Tensor, starts: torch.Tensor, accepted: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The pool after a step.

    Args:
        seats: [B] request slots.
        starts: [B] position of `tokens[:, 0]`.
        accepted: [B] index, among the request's state slots, of the one with the state before it.
        tokens: [B, Q] the last token that was sampled and accepted, and the drafts after it.
    """
    values = torch.cat([starts[:, None], accepted[:, None], tokens], 1)
    # Padding writes the null slot too; zeros there are a legal start for the padding of the next step.
    values = torch.where(seats[:, None] > 0, values, 0)
    pool_after: torch.Tensor = ops.seat_write(pool, seats, values)
    return pool_after


def uniforms(inputs: Tree, starts: torch.Tensor, q_len: int) -> torch.Tensor:
    """This step's random numbers, of those that are given from position `base` on: [B, 2Q-1] -> [B, Q]."""
    numbers: torch.Tensor = inputs["uniform"]
    if q_len == 1:
        return numbers
    offsets = torch.arange(q_len, dtype=torch.int32, device=starts.device)
    index = (starts - inputs["base"]).clamp(0, q_len - 1)[:, None] + offsets
    return numbers.gather(1, index.to(torch.int64))
