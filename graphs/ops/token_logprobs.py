"""Turns logits into the log probabilities of the tokens that were taken, and of the most likely ones."""

import torch

from ..native_ops import Native
from ..primitive import Cost, Primitive, nbytes

token_logprobs = Primitive(
    "token_logprobs",
    "(Tensor logits, Tensor tokens, Tensor asked, int most) -> (Tensor, Tensor, Tensor)",
    factors="b q _, b q, b -> b q, b q _, b q _",
)

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@token_logprobs.abstract
def _abstract(logits: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, most: int) -> Three:
    wide = (*tokens.shape, most)
    return (
        torch.empty(tokens.shape, dtype=torch.float32, device=logits.device),
        torch.empty(wide, dtype=torch.int32, device=logits.device),
        torch.empty(wide, dtype=torch.float32, device=logits.device),
    )


@token_logprobs.reference
def token_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, most: int) -> Three:
    """Natural logarithms of the model's own probabilities, before temperature and cuts; zeros for rows that did not ask.

    Args:
        logits: [B, Q, V] f32.
        tokens: [B, Q] int32, those that were taken.
        asked: [B] int32, 1 where a row wants them.
        most: n, how many of the most likely tokens are told.

    Returns:
        of the taken token [B, Q] f32; ids of the n most likely [B, Q, n] int32, most likely first; their log probabilities
        [B, Q, n] f32.
    """
    wide = (*tokens.shape, most)
    chosen = torch.zeros(tokens.shape, dtype=torch.float32, device=logits.device)
    ids = torch.zeros(wide, dtype=torch.int32, device=logits.device)
    values = torch.zeros(wide, dtype=torch.float32, device=logits.device)
    rows = torch.nonzero(asked > 0).squeeze(-1)
    if rows.numel():
        chosen[rows], ids[rows], values[rows] = _told(logits[rows], tokens[rows], most)
    return chosen, ids, values


def _told(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> Three:
    shifted = logits - logits.max(-1, keepdim=True)[0]
    told = shifted - shifted.exp().sum(-1, keepdim=True).log()
    values, ids = torch.topk(told, most, dim=-1)
    return told.gather(-1, tokens[..., None].to(torch.int64)).squeeze(-1), ids.to(torch.int32), values


# Most steps are asked by nobody, which only the values tell: a compiled CPU graph calls a kernel that looks at them
# (lowering/cpp/sample.cpp).
token_logprobs.lowering("inductor")(Native("npuc_logprobs", token_logprobs.schema, _abstract).op)


@token_logprobs.lowering("ge")
def _npu(logits: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, most: int) -> Three:
    """All rows, whether they asked or not."""
    chosen, ids, values = _told(logits, tokens, most)
    wanted = (asked > 0)[:, None]
    return torch.where(wanted, chosen, 0.0), torch.where(wanted[:, :, None], ids, 0), torch.where(wanted[:, :, None], values, 0.0)


@token_logprobs.cost
def _cost(logits: torch.Tensor, tokens: torch.Tensor, asked: torch.Tensor, most: int) -> Cost:
    return Cost(6 * logits.numel(), nbytes(logits, tokens, asked), tokens.numel() * (4 + 8 * most))
