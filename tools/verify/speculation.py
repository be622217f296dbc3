"""Turns what a rank said in a step of a script into proof that it accepted, drafted and left its seats as it must."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...graphs.errors import VerifyError
from ...models.request_slots import ACCEPTED, START, TOKENS
from .step_trace import Expected, Turn

SEATS = "seats"
"""Name of the pool of seats after a step, among what a rank said in it."""


def check_seats(turn: Turn, group: int, said: Mapping[str, torch.Tensor], what: str) -> None:
    """Counts are those of the tokens a rank sampled itself, and each live row's seat holds what the next step starts from.

    All other seats are as they were, and padding counts nothing.

    Args:
        said: outputs of a rank of the group, and its seats after the step.

    Raises:
        VerifyError: naming the row or the seat, and both sides.
    """
    before, inputs = turn.seats[group], turn.inputs[group]
    wanted, decode = before.clone(), turn.case.bucket.kind == "decode"
    counts = torch.zeros(turn.case.bucket.batch, dtype=torch.int32)
    expected = turn.expected[group]
    for row, valid in zip(expected.rows, expected.valid, strict=True) if expected else ():
        seat, tokens = int(inputs["seats"][row]), said["tokens"][row]
        counts[row] = _accepted(before[seat, TOKENS:], tokens, valid) if decode else inputs["lengths"][row]
        last = int(counts[row]) - 1 if decode else 0
        drafts = said["drafts"][row] if "drafts" in said else tokens[:0]
        wanted[seat, START] = start(turn, group, row) + counts[row]
        wanted[seat, ACCEPTED] = last
        wanted[seat, TOKENS:] = torch.cat([tokens[last : last + 1], drafts])
    if decode and said["counts"].tolist() != counts.tolist():
        raise VerifyError(f"{what}: counts are {said['counts'].tolist()}; by the tokens it sampled they are {counts.tolist()}")
    for seat, (found, right) in enumerate(zip(said[SEATS].tolist(), wanted.tolist(), strict=True)):
        if found != right:
            raise VerifyError(f"{what}: seat {seat} holds {found}; what the next step starts from is {right}")


def _accepted(candidates: torch.Tensor, sampled: torch.Tensor, valid: int) -> int:
    """Tokens that count."""
    wrong = (t for t in range(1, valid) if int(candidates[t]) != int(sampled[t - 1]))
    return next(wrong, valid)


def start(turn: Turn, group: int, row: int) -> int:
    """Position of the first token that a row takes in."""
    inputs = turn.inputs[group]
    return int(turn.seats[group][inputs["seats"][row], START] if turn.case.bucket.kind == "decode" else inputs["starts"][row])


def alike(turn: Turn, group: int, place: int, said: Mapping[str, torch.Tensor]) -> bool:
    """Whether the draft head of a rank took in, for the live row at `place`, the tokens that it takes in by the script."""
    expected = turn.expected[group]
    assert expected is not None
    row, taken = expected.rows[place], expected.taken[place]
    if turn.case.bucket.kind == "decode":
        return torch.equal(said["tokens"][row, :taken], expected.tokens[place, :taken])
    inputs = turn.inputs[group]
    return bool("next_tokens" in inputs and inputs["next_tokens"][row] >= 0) or torch.equal(said["tokens"][row], expected.tokens[place])


def drafts(
    turn: Turn, group: int, said: Mapping[str, torch.Tensor], error: torch.Tensor, typical: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts of live rows are the script's, and which must be: [rows, k] bool each.

    A draft must be where all that the draft head took in was the script's, and its logit led by more than the difference of the row's
    logits allows.

    Args:
        error: [rows] largest difference of each row's logits, over the larger of 1 and the largest logit.
        typical: such a difference that is always allowed.
    """
    expected = turn.expected[group]
    assert expected is not None
    equal = said["drafts"][list(expected.rows)] == expected.drafts
    best = expected.thoughts.topk(2).values
    slack = 2 * error.clamp(min=typical)[:, None] * expected.thoughts.abs().amax(-1).clamp(min=1.0)
    same = torch.tensor([alike(turn, group, place, said) for place in range(len(expected.rows))])
    # What was drafted before is taken in too.
    before = torch.cat([same[:, None], equal[:, :-1]], 1).cumprod(1).bool()
    return equal, before & (best[:, :, 0] - best[:, :, 1] > slack)


def check_logprobs(expected: Expected, asked: torch.Tensor, said: Mapping[str, torch.Tensor], error: torch.Tensor, what: str) -> None:
    """Log probabilities that a rank told to rows that asked are those of the script's logits.

    Args:
        asked: [B], 1 where a row did.
        error: [rows, W] difference of logits that is allowed, over the larger of 1 and the largest logit.

    Raises:
        VerifyError: naming the row, the largest difference and the legal one.
    """
    for place, (row, valid) in enumerate(zip(expected.rows, expected.valid, strict=True)):
        if not asked[row]:
            continue
        logits = expected.logits[place, :valid].float()
        right, slack = logits.log_softmax(-1), 2 * error[place, :valid] * logits.abs().amax(-1).clamp(min=1.0)
        chosen, top, ids = (said[name][row, :valid] for name in ("chosen_logprobs", "top_logprobs", "top_ids"))
        told = torch.cat([chosen[:, None], top, top], -1)
        at = torch.cat([said["tokens"][row, :valid, None], ids], -1).long()
        wanted = torch.cat([right.gather(-1, at), right.topk(top.shape[-1]).values], -1)
        off = (told - wanted).abs().amax(-1)
        if not bool((off <= slack).all()):
            raise VerifyError(f"{what}: log probabilities of row {row} are off by {off.tolist()}; legal is at most {slack.tolist()}")
