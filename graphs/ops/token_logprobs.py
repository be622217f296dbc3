"""Log probabilities of the sampled tokens and of the most likely ones."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes


class TokenLogprobs(NamedTuple):
    """Operands of `token_logprobs`."""

    logits: Tensor  # [B, Q, V] f32
    tokens: Tensor  # [B, Q] int32, the sampled tokens
    asked: Tensor  # [B] int32, 1 where a row wants log probabilities
    most: int  # n, how many of the most likely tokens are returned


token_logprobs = Primitive("token_logprobs", TokenLogprobs, factors="b q _, b q, b -> b q, b q _, b q _")

Three = tuple[Tensor, Tensor, Tensor]


@token_logprobs.abstract
def _abstract(args: TokenLogprobs) -> Three:
    narrow, device = args.tokens.shape, args.logits.device
    wide = (*narrow, args.most)
    return (
        torch.empty(narrow, dtype=torch.float32, device=device),
        torch.empty(wide, dtype=torch.int32, device=device),
        torch.empty(wide, dtype=torch.float32, device=device),
    )


@token_logprobs.reference
def token_logprobs_reference(args: TokenLogprobs) -> Three:
    """Natural logarithms of the model's own probabilities, before temperature and cuts; zeros for rows that did not ask.

    Returns:
        of the sampled token [B, Q] f32; ids of the n most likely [B, Q, n] int32, most likely first; their log probabilities
        [B, Q, n] f32.
    """
    logits, tokens, asked, most = args
    wide = (*tokens.shape, most)
    chosen = torch.zeros(tokens.shape, dtype=torch.float32, device=logits.device)
    ids = torch.zeros(wide, dtype=torch.int32, device=logits.device)
    values = torch.zeros(wide, dtype=torch.float32, device=logits.device)
    rows = torch.nonzero(asked > 0).squeeze(-1)
    if rows.numel():
        chosen[rows], ids[rows], values[rows] = _logprobs(logits[rows], tokens[rows], most)
    return chosen, ids, values


def _logprobs(logits: Tensor, tokens: Tensor, most: int) -> Three:
    shifted = logits - logits.max(-1, keepdim=True)[0]
    logprobs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    values, ids = torch.topk(logprobs, most, dim=-1)
    # What could not be sampled has none.
    chosen = logprobs.gather(-1, tokens.clamp(min=0)[..., None].to(torch.int64)).squeeze(-1)
    return chosen, ids.to(torch.int32), values


_if_asked = Native("npuc_logprobs", token_logprobs.schema, token_logprobs.rule("abstract")).op


@token_logprobs.lowering("inductor")
def _cpu(args: TokenLogprobs) -> Any:
    """A kernel that skips rows which did not ask (lowering/cpp/sample.cpp): in most steps that is all of them, known by value only."""
    return _if_asked(*args)


@token_logprobs.lowering("npu")
def _npu(args: TokenLogprobs) -> Three:
    """All rows, whether they asked or not."""
    chosen, ids, values = _logprobs(args.logits, args.tokens, args.most)
    wanted = (args.asked > 0)[:, None]
    return torch.where(wanted, chosen, 0.0), torch.where(wanted[:, :, None], ids, 0), torch.where(wanted[:, :, None], values, 0.0)


@token_logprobs.cost
def _cost(args: TokenLogprobs) -> Cost:
    return Cost(6 * args.logits.numel(), nbytes(args.logits, args.tokens, args.asked), args.tokens.numel() * (4 + 8 * args.most))
