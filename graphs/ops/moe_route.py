"""Turns router logits into each token's experts and their weights."""

import torch

from ..primitive import Cost, Primitive, nbytes

moe_route = Primitive(
    "moe_route", "(Tensor logits, int experts_per_token, bool renormalise) -> (Tensor, Tensor)", factors="t _ -> t _, t _"
)


@moe_route.abstract
def _abstract(logits: torch.Tensor, experts_per_token: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], experts_per_token)
    return (
        torch.empty(shape, dtype=logits.dtype, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


@moe_route.reference
def moe_route_reference(logits: torch.Tensor, experts_per_token: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in f32, then the X largest.

    Args:
        logits: [T, E].
        experts_per_token: X.
        renormalise: make the X weights sum to 1.

    Returns:
        weights [T, X] in the dtype of logits, and expert ids [T, X] int32.
    """
    weights, ids = torch.softmax(logits.float(), -1).topk(experts_per_token, -1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids.to(torch.int32)


@moe_route.lowering("ge")
def moe_route_ge(logits: torch.Tensor, experts_per_token: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel, in f32 as above; after a softmax it never makes the weights sum to 1."""
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(logits.float(), experts_per_token)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


@moe_route.cost
def _cost(logits: torch.Tensor, experts_per_token: int, renormalise: bool) -> Cost:
    return Cost(5 * logits.numel(), nbytes(logits), logits.shape[0] * experts_per_token * (logits.dtype.itemsize + 4))
