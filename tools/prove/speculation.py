"""Checks of what one rank's step sampled, accepted, drafted and left in its request slots."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...graphs.errors import VerifyError
from ...graphs.steps.table import kind_of
from ...models.request_slots import ACCEPTED, START, TOKENS
from .step_trace import ExpectedOutputs, TraceStep

REQUEST_SLOTS = "request_slots"
"""Name of the pool of request slots after the step, among a rank's outputs."""


def check_request_slots(step: TraceStep, group: int, outputs: Mapping[str, torch.Tensor], what: str, *, room: int = 0) -> None:
    """Counts follow from the tokens that the rank sampled, and the request slot of each live row holds what its next step starts from.

    All other request slots are unchanged, and padding has count 0.

    Args:
        outputs: of a rank of the group, with its request slots after the step.
        room: drafts of a request slot; a step that makes fewer fills it with the last token.

    Raises:
        VerifyError: naming the row or the request slot, and both sides.
    """
    before, inputs = step.request_slots[group], step.inputs[group]
    request_slots_after, decode = before.clone(), kind_of(step.case.bucket).decodes
    counts = torch.zeros(step.case.bucket.batch, dtype=torch.int32)
    expected = step.expected[group]
    for row, valid in zip(expected.rows, expected.valid, strict=True) if expected else ():
        request_slot, tokens = int(inputs["request_slots"][row]), outputs["tokens"][row]
        if kind_of(step.case.bucket).wide:
            # What a chunk that does not end its prompt samples is told by nothing but the request slot.
            known = inputs["next_tokens"][row] >= 0
            tokens = outputs[REQUEST_SLOTS][request_slot, TOKENS:][:1] if known else tokens[valid - 1 : valid]
        counts[row] = _accepted(before[request_slot, TOKENS:], tokens, valid) if decode else inputs["query_lens"][row]
        last = int(counts[row]) - 1 if decode else 0
        drafts = outputs["drafts"][row] if "drafts" in outputs else tokens[:0]
        request_slots_after[request_slot, START] = first_position(step, group, row) + counts[row]
        request_slots_after[request_slot, ACCEPTED] = last
        kept = torch.cat([tokens[last : last + 1], drafts, tokens[last : last + 1].expand(max(0, room - len(drafts)))])
        request_slots_after[request_slot, TOKENS : TOKENS + len(kept)] = kept
        if not decode and "positions" in inputs:
            # What is added to an index of a token behind the chunk, then the same for each candidate, if there are any, with its place; a
            # decode step leaves them as they are.
            offset = inputs["positions"][row, int(counts[row]) - 1, 0] + 1 - request_slots_after[request_slot, START]
            offsets = request_slots_after[request_slot, TOKENS + len(kept) :]
            offsets[:1], offsets[1:] = offset, offset + torch.arange(len(offsets) - 1)
    if decode and outputs["counts"].tolist() != counts.tolist():
        raise VerifyError(f"{what}: counts are {outputs['counts'].tolist()}; by the tokens it sampled they are {counts.tolist()}")
    for request_slot, (actual, right) in enumerate(zip(outputs[REQUEST_SLOTS].tolist(), request_slots_after.tolist(), strict=True)):
        if actual != right:
            raise VerifyError(f"{what}: request slot {request_slot} holds {actual}; what the next step starts from is {right}")


def _accepted(candidates: torch.Tensor, sampled: torch.Tensor, valid: int) -> int:
    """Number of tokens that count: up to the first candidate that differs from the token sampled before it."""
    wrong = (t for t in range(1, valid) if int(candidates[t]) != int(sampled[t - 1]))
    return next(wrong, valid)


def first_position(step: TraceStep, group: int, row: int) -> int:
    """Position of the row's first new token in its request."""
    inputs = step.inputs[group]
    return int(
        step.request_slots[group][inputs["request_slots"][row], START]
        if kind_of(step.case.bucket).decodes
        else inputs["num_computed_tokens"][row]
    )


def same_draft_inputs(step: TraceStep, group: int, place: int, outputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether the draft head of a rank read the same tokens as the trace's, in the live row at `place`."""
    expected = step.expected[group]
    assert expected is not None
    row, taken = expected.rows[place], expected.taken[place]
    if kind_of(step.case.bucket).decodes:
        return torch.equal(outputs["tokens"][row, :taken], expected.tokens[place, :taken])
    inputs = step.inputs[group]
    # After any chunk but the last the next token is that of the prompt.
    return bool("next_tokens" in inputs and inputs["next_tokens"][row] >= 0) or torch.equal(outputs["tokens"][row], expected.tokens[place])


def compare_drafts(
    step: TraceStep, group: int, outputs: Mapping[str, torch.Tensor], error: torch.Tensor, typical: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts of live rows equal the trace's, and which must: [rows, k] bool each.

    A draft must be equal where the draft head read the trace's tokens only, and where the best logit leads by more than the difference
    of the row's logits can explain.

    Args:
        error: [rows] largest difference of each row's logits, over the larger of 1 and the largest logit.
        typical: such a difference that is always allowed.
    """
    expected = step.expected[group]
    assert expected is not None
    equal = outputs["drafts"][list(expected.rows)] == expected.drafts
    best = expected.draft_logits.topk(2).values
    slack = 2 * error.clamp(min=typical)[:, None] * expected.draft_logits.abs().amax(-1).clamp(min=1.0)
    same = torch.tensor([same_draft_inputs(step, group, place, outputs) for place in range(len(expected.rows))])
    # The draft head also reads the drafts before this one.
    same_before = torch.cat([same[:, None], equal[:, :-1]], 1).cumprod(1).bool()
    return equal, same_before & (best[:, :, 0] - best[:, :, 1] > slack)


def check_logprobs(
    expected: ExpectedOutputs, requested: torch.Tensor, outputs: Mapping[str, torch.Tensor], error: torch.Tensor, what: str
) -> None:
    """Log probabilities of rows that request them are those of the trace's logits.

    Args:
        requested: [B], 1 where a row requests them.
        error: [rows, W] difference of logits that is allowed, over the larger of 1 and the largest logit.

    Raises:
        VerifyError: naming the row, the largest difference and the legal one.
    """
    for place, (row, valid) in enumerate(zip(expected.rows, expected.valid, strict=True)):
        if not requested[row]:
            continue
        logits = expected.logits[place, :valid].float()
        logprobs, slack = logits.log_softmax(-1), 2 * error[place, :valid] * logits.abs().amax(-1).clamp(min=1.0)
        chosen, top, ids = (outputs[name][row, :valid] for name in ("chosen_logprobs", "top_logprobs", "top_ids"))
        actual = torch.cat([chosen[:, None], top, top], -1)
        # The top ones are compared twice: with those of the same ids, and with the largest ones, whose ids may differ where two are equal.
        index = torch.cat([outputs["tokens"][row, :valid, None], ids], -1).long()
        right = torch.cat([logprobs.gather(-1, index), logprobs.topk(top.shape[-1]).values], -1)
        difference = (actual - right).abs().amax(-1)
        if not bool((difference <= slack).all()):
            raise VerifyError(f"{what}: log probabilities of row {row} are off by {difference.tolist()}; legal is at most {slack.tolist()}")
