"""Turns sampled tokens and the candidates they were sampled beside into how many tokens of each request count."""

import torch

from ..primitive import Cost, Primitive, nbytes

accept = Primitive("accept", "(Tensor sampled, Tensor candidates, Tensor lengths) -> Tensor", factors="b _, b _, b -> b")


@accept.abstract
def _abstract(sampled: torch.Tensor, candidates: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)


@accept.reference
def accept_reference(sampled: torch.Tensor, candidates: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Drafts that equal the token drawn at their place, up to the first that does not, and the token drawn after them.

    Every token that counts was drawn from the model's own distribution with a random number of its place alone, so drafts never
    show in what a request says. For a draft x that is one fixed token this is rejection sampling (arXiv:2211.17192, algorithm 1,
    with all of the draft's distribution at x): kept with probability p(x); where it is not, the token drawn is distributed as p
    without x, renormalised.

    Args:
        sampled: [B, Q] int32; column t is drawn after candidate t.
        candidates: [B, Q] int32; column 0 is the last known token, the others are drafts.
        lengths: [B] int32 valid candidates of each row; 0 is a row of padding.

    Returns:
        [B] int32: accepted drafts and one; 0 for rows of padding.
    """
    going = (lengths > 0).to(torch.int32)
    count = going
    for t in range(1, sampled.shape[1]):
        going = going * ((candidates[:, t] == sampled[:, t - 1]) & (lengths > t)).to(torch.int32)
        count = count + going
    return count


@accept.lowering("ge")
def _npu(sampled: torch.Tensor, candidates: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """All places at once, in as many operators however many drafts there are: a draft counts with nothing wrong up to its place."""
    here = (lengths > 0).to(torch.int32)
    if sampled.shape[1] == 1:
        return here
    place = torch.arange(1, sampled.shape[1], dtype=torch.int32, device=lengths.device)
    wrong = (candidates[:, 1:] != sampled[:, :-1]) | (place >= lengths[:, None])
    right = (wrong.to(torch.int32).cumsum(1, dtype=torch.int32) == 0).to(torch.int32)
    return here + right.sum(1, dtype=torch.int32)


@accept.cost
def _cost(sampled: torch.Tensor, candidates: torch.Tensor, lengths: torch.Tensor) -> Cost:
    return Cost(4 * sampled.numel(), nbytes(sampled, candidates, lengths), nbytes(lengths))
