"""Turns logits and random numbers into tokens."""

import torch

from ..primitive import Cost, Primitive, nbytes

sample = Primitive(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    factors="b q _, b, b, b, b, b q -> b q",
)


@sample.abstract
def _abstract(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    return torch.empty(uniform.shape, dtype=torch.int32, device=logits.device)


@sample.reference
def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Greedy where temperature is 0, else by inverting the distribution function of the kept tokens.

    In order: divide by temperature; keep the top_k largest (0 keeps all); of their renormalised probabilities keep the
    smallest leading set that reaches top_p; keep those at least min_p times as likely as the most likely. Ties keep the
    lower id first.

    Args:
        logits: [B, Q, V] f32.
        temperature, top_p, min_p: [B] f32.
        top_k: [B] int32.
        uniform: [B, Q] f32 in [0, 1), one random number a token.

    Returns:
        [B, Q] int32.
    """
    greedy = logits.argmax(-1)
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    ranked, order = torch.sort(logits / heat, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    kept = (rank < top_k[:, None, None]) | (top_k[:, None, None] <= 0)
    weight = torch.where(kept, torch.softmax(ranked, -1), 0.0)
    share = weight / weight.sum(-1, keepdim=True)
    kept = kept & (share.cumsum(-1) - share < top_p[:, None, None]) & (weight >= min_p[:, None, None] * weight[..., :1])
    mass = torch.where(kept, weight, 0.0).cumsum(-1)
    # The last kept token closes the distribution, so that rounding in the sums can never pick a dropped one.
    picked = torch.minimum((mass <= uniform[..., None] * mass[..., -1:]).sum(-1), kept.sum(-1) - 1).clamp(min=0)
    drawn = order.gather(-1, picked[..., None]).squeeze(-1)
    return torch.where(temperature[:, None] > 0, drawn, greedy).to(torch.int32)


@sample.cost
def _cost(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> Cost:
    passes = max(1, (logits.shape[-1] - 1).bit_length()) + 12
    return Cost(passes * logits.numel(), nbytes(logits, temperature, top_k, top_p, min_p, uniform), uniform.numel() * 4)
