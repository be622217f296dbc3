"""Request slots: for each request in flight one row on the device that says where its next decode step starts.

A step reads there what the step before it wrote, so it can be launched before the host has read the outputs of that one. Slot 0 is null:
rows of padding read and write it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..graphs import ops
from ..graphs.steps.request_slot import ACCEPTED as ACCEPTED
from ..graphs.steps.request_slot import START as START
from ..graphs.steps.request_slot import TOKENS as TOKENS
from ..graphs.steps.request_slot import widths
from ..graphs.types import Aval, Limits, Tree


class DecodeStart(NamedTuple):
    """Where the rows of a decode step start.

    Attributes:
        tokens: [B, Q] candidates: the last token and the first of its drafts.
        num_computed_tokens: [B] position of the first, within the longest context.
        query_lens: [B] valid candidates; 0 in rows of padding and where the context is full.
        state_slots_in: [B] state slot to start from.
        offsets: what stands behind the candidates in request slots, for `write`; nothing in graphs that take no pictures.
        position_offsets: [B, 1], what is added to indices of tokens to give their positions; None in those graphs.
        candidate_offsets: [B, Q], the same of each candidate, plus its place; None there, and where a step never has drafts.
    """

    tokens: torch.Tensor
    num_computed_tokens: torch.Tensor
    query_lens: torch.Tensor
    state_slots_in: torch.Tensor
    offsets: tuple[torch.Tensor, ...] = ()
    position_offsets: torch.Tensor | None = None
    candidate_offsets: torch.Tensor | None = None

    def inputs(self) -> dict[str, torch.Tensor]:
        """Those that the step has, by name."""
        return {name: value for name, value in self._asdict().items() if isinstance(value, torch.Tensor)}


def state(limits: Limits) -> Aval:
    """The pool of request slots: [C, sum of `widths`] i32."""
    return Aval((limits.num_request_slots, sum(widths(limits))), torch.int32, ("request_slots", None))


def read(pool: torch.Tensor, inputs: Tree, limits: Limits, q_len: int) -> DecodeStart:
    """Where the rows of a decode step start; no row goes beyond the longest context.

    Args:
        pool: as of `state`.
        inputs: of a decode step (graphs/steps/).
        q_len: Q, at most k + 1; further drafts are not read.
    """
    unread = limits.drafts + 1 - q_len
    candidates = [q_len, *[unread] * bool(unread)]
    of_pictures = [1, *candidates] if limits.drafts else [1]
    columns = [1, 1, *candidates, *(of_pictures if limits.picture_rows else [])]
    start, accepted, tokens, *rest = pool.index_select(0, inputs["request_slots"]).split(columns, 1)
    offsets = rest[bool(unread) :]
    state_slots_in = inputs["state_slots_out"].gather(1, accepted.clamp(0, limits.drafts).to(torch.int64)).view(-1)
    num_computed_tokens = start.reshape(-1)
    longest = torch.full((), limits.max_model_len, dtype=torch.int32, device=pool.device)
    query_lens = torch.minimum(inputs["drafts"] + 1, longest - num_computed_tokens)
    # Attention looks up the page of a row's first token, whether that token is valid or not.
    num_computed_tokens = num_computed_tokens.clamp(max=limits.max_model_len - 1)
    tokens, query_lens = tokens.contiguous(), torch.where(inputs["request_slots"] > 0, query_lens, 0)
    return DecodeStart(tokens, num_computed_tokens, query_lens, state_slots_in, tuple(offsets), *offsets[:2])


def write(
    pool: torch.Tensor, request_slots: torch.Tensor, num_computed_tokens: torch.Tensor, accepted: torch.Tensor, *tokens: torch.Tensor
) -> torch.Tensor:
    """The pool after a step; the null request slot keeps its zeros, a legal start for the padding of the next step.

    Args:
        request_slots: [B] request slots.
        num_computed_tokens: [B] position of the first token.
        accepted: [B] index, among the request's state slots, of the one with the state before it.
        tokens: the last token that was sampled and accepted, [B, 1], and k columns of drafts after it; or both together. Behind them
            `DecodeStart.offsets` in graphs that take pictures.
    """
    values = torch.cat([num_computed_tokens[:, None], accepted[:, None], *tokens], 1)
    pool_after: torch.Tensor = ops.request_slot_write(pool, request_slots, values)
    return pool_after


def uniforms(inputs: Tree, num_computed_tokens: torch.Tensor, q_len: int, limits: Limits) -> torch.Tensor:
    """This step's random numbers, of those that are given from position `base` on: [B, k + Q] -> [B, Q]."""
    numbers: torch.Tensor = inputs["uniform"]
    if not limits.drafts:
        return numbers
    offsets = torch.arange(q_len, dtype=torch.int32, device=num_computed_tokens.device)
    index = (num_computed_tokens - inputs["base"]).clamp(0, limits.drafts)[:, None] + offsets
    return numbers.gather(1, index.to(torch.int64))
