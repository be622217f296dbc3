"""Acceptance of drafts: how many sampled tokens of each request count."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class Accept(NamedTuple):
    """Operands of `accept`."""

    sampled: Tensor  # [B, Q] int32; column t is drawn after candidate t
    candidates: Tensor  # [B, Q] int32; column 0 is the last known token, the others are drafts
    query_lens: Tensor  # [B] int32 valid candidates of each row; 0 is a row of padding


accept = Primitive("accept", Accept, factors="b _, b _, b -> b")


@accept.abstract
def _abstract(args: Accept) -> Tensor:
    return torch.empty(args.query_lens.shape, dtype=torch.int32, device=args.query_lens.device)


@accept.reference
def accept_reference(args: Accept) -> Tensor:
    """Counts drafts that equal the token sampled at their position, up to the first that does not, and the token sampled after them.

    Every token that counts is sampled from the model's own distribution with a random number of its position alone, so drafts never
    change the output. For a deterministic draft x this is rejection sampling (arXiv:2211.17192, algorithm 1, with all of the draft's
    distribution at x): x is kept with probability p(x); otherwise the sampled token is distributed as p without x, renormalised.

    Returns:
        [B] int32: accepted drafts plus one; 0 for rows of padding.
    """
    sampled, candidates, query_lens = args
    accepting = (query_lens > 0).to(torch.int32)
    count = accepting
    for t in range(1, sampled.shape[1]):
        accepting = accepting * ((candidates[:, t] == sampled[:, t - 1]) & (query_lens > t)).to(torch.int32)
        count = count + accepting
    return count


@accept.lowering("npu")
def _npu(args: Accept) -> Tensor:
    """All positions at once, so that the number of operators does not grow with the drafts: the first mismatch ends the count.

    The smallest is taken in f32, in which every reduction of the device is exact and fast.
    """
    sampled, candidates, query_lens = args
    Q = sampled.shape[1]
    if Q == 1:
        return query_lens.clamp(max=1)
    position = torch.arange(1, Q, dtype=torch.float32, device=query_lens.device)
    first = torch.where(candidates[:, 1:] != sampled[:, :-1], position, float(Q)).amin(1)
    return torch.minimum(first.to(torch.int32), query_lens)


@accept.cost
def _cost(args: Accept) -> Cost:
    return Cost(4 * args.sampled.numel(), nbytes(*args), nbytes(args.query_lens))
