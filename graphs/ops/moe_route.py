"""Router of a mixture of experts: each token's experts and their weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..primitive import Cost, Primitive, nbytes


class MoeRoute(NamedTuple):
    """Operands of `moe_route`."""

    logits: Tensor  # [T, E]
    experts_per_token: int  # X
    renormalise: bool  # make the X weights sum to 1


moe_route = Primitive("moe_route", MoeRoute, factors="t _ -> t _, t _")


@moe_route.abstract
def _abstract(args: MoeRoute) -> tuple[Tensor, Tensor]:
    shape, device = (args.logits.shape[0], args.experts_per_token), args.logits.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


@moe_route.reference
def moe_route_reference(args: MoeRoute) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in f32, then the X largest.

    Returns:
        weights [T, X] f32, and expert ids [T, X] int32.
    """
    weights, ids = torch.softmax(args.logits.float(), -1).topk(args.experts_per_token, -1)
    if args.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


@moe_route.lowering("npu")
def moe_route_ge(args: MoeRoute) -> tuple[Tensor, Tensor]:
    """One kernel, in f32 as above. With `renorm` it takes the largest logits first and their softmax then: the weights sum to 1.

    MoeGatingTopK, the other kernel, refuses `renorm` and never makes the weights of a softmax sum to 1
    (moe_gating_top_k_tiling.cpp and moe_gating_top_k_softmax_v2_def.cpp of hicann/ops-transformer, 8.5.0.alpha001).
    """
    route = torch.ops.npu.npu_moe_gating_top_k_softmax_v2
    weights, ids, _ = route(args.logits.float(), k=args.experts_per_token, renorm=int(args.renormalise))
    return weights, ids


@moe_route.cost
def _cost(args: MoeRoute) -> Cost:
    logits, choices = args.logits, args.logits.shape[0] * args.experts_per_token
    return Cost(5 * logits.numel(), nbytes(logits), choices * 8)
