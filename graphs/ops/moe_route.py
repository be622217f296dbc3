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
    return torch.empty(shape, dtype=args.logits.dtype, device=device), torch.empty(shape, dtype=torch.int32, device=device)


@moe_route.reference
def moe_route_reference(args: MoeRoute) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in f32, then the X largest.

    Returns:
        weights [T, X] in the dtype of logits, and expert ids [T, X] int32.
    """
    weights, ids = torch.softmax(args.logits.float(), -1).topk(args.experts_per_token, -1)
    if args.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(args.logits.dtype), ids.to(torch.int32)


@moe_route.lowering("npu")
def moe_route_ge(args: MoeRoute) -> tuple[Tensor, Tensor]:
    """One kernel, in f32 as above; after a softmax it never makes the weights sum to 1."""
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(args.logits.float(), args.experts_per_token)
    if args.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(args.logits.dtype), ids


@moe_route.cost
def _cost(args: MoeRoute) -> Cost:
    logits, choices = args.logits, args.logits.shape[0] * args.experts_per_token
    return Cost(5 * logits.numel(), nbytes(logits), choices * (logits.dtype.itemsize + 4))
