"""Router of a mixture of experts that scores by sigmoids, corrects the choice by a bias, and chooses groups of experts first."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class MoeRouteGrouped(NamedTuple):
    """Operands of `moe_route_grouped`; a group is E / groups adjacent experts, at least two where `top_groups` is smaller than `groups`."""

    logits: Tensor  # [T, E]
    bias: Tensor  # [E] f32, added to the scores for the choice alone
    experts_per_token: int  # X
    groups: int
    top_groups: int  # groups whose experts can be chosen
    renormalise: bool  # divide the X weights by their sum
    scale: float  # multiplies the weights


moe_route_grouped = Primitive("moe_route_grouped", MoeRouteGrouped, factors="t _, _ -> t _, t _")

# Added to the sum that weights are divided by, as in the published models and as the NPU's kernel does by default.
_EPSILON = 1e-20


@moe_route_grouped.abstract
def _abstract(args: MoeRouteGrouped) -> tuple[Tensor, Tensor]:
    shape, device = (args.logits.shape[0], args.experts_per_token), args.logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


@moe_route_grouped.reference
def moe_route_grouped_reference(args: MoeRouteGrouped) -> tuple[Tensor, Tensor]:
    """Chooses by biased score the best experts of the best groups; a group is as good as its two best experts (arXiv:2412.19437).

    Returns:
        weights [T, X] f32, of the scores without bias, and expert ids [T, X] int32.
    """
    scores = args.logits.float().sigmoid()
    biased = scores + args.bias.float()
    if args.top_groups < args.groups:
        grouped = biased.unflatten(1, (args.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(args.top_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0) > 0
        biased = torch.where(kept[..., None], grouped, torch.full((), float("-inf"), device=biased.device)).flatten(1)
    ids = biased.topk(args.experts_per_token, -1).indices
    return _weights(args, scores.gather(1, ids)), ids.to(torch.int32)


def _weights(args: MoeRouteGrouped, weights: Tensor) -> Tensor:
    if args.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _EPSILON)
    return weights if args.scale == 1 else weights * args.scale


_SIGMOID, _TWO_BEST = 1, 1
"""`norm_type` and `group_select_mode` of the NPU's kernel."""


@moe_route_grouped.lowering("npu")
def moe_route_grouped_npu(args: MoeRouteGrouped) -> tuple[Tensor, Tensor]:
    """One kernel, in f32 as above. Of sigmoids it always makes the weights sum to 1 before it scales them, so where they are not to, they
    are read off the scores (moe_gating_top_k_tiling.cpp of hicann/ops-transformer, 8.5.0.alpha001)."""
    logits = args.logits.float()
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits,
        args.experts_per_token,
        bias=args.bias.float(),
        k_group=args.top_groups,
        group_count=args.groups,
        group_select_mode=_TWO_BEST,
        norm_type=_SIGMOID,
        routed_scaling_factor=args.scale,
        eps=_EPSILON,
    )
    return weights if args.renormalise else _weights(args, logits.sigmoid().gather(1, ids.to(torch.int64))), ids


@moe_route_grouped.cost
def _cost(args: MoeRouteGrouped) -> Cost:
    logits, choices = args.logits, args.logits.shape[0] * args.experts_per_token
    return Cost(8 * logits.numel(), nbytes(logits, args.bias), choices * 8)
