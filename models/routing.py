"""How a mixture of experts chooses the experts of a token, and weighs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graphs import ops
from ..graphs.errors import ModelError

SOFTMAX, SIGMOID = "softmax", "sigmoid"
KINDS = (SOFTMAX, SIGMOID)


@dataclass(frozen=True)
class Routing:
    """A router's rule.

    Attributes:
        kind: how logits become scores: "softmax" over all experts, or "sigmoid" of each; a sigmoid router's choice is corrected by a bias.
        top_k: X, experts of a token.
        renormalise: whether the X weights are divided by their sum.
        scale: multiplies the weights.
        groups: the experts form this many groups of adjacent experts.
        top_groups: groups whose experts a token may choose: those with the largest sums of their two best scores.
    """

    kind: str
    top_k: int
    renormalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"routing kind is {self.kind!r}; legal are {', '.join(KINDS)}")
        if not 1 <= self.top_groups <= self.groups:
            raise ModelError(f"routing chooses {self.top_groups} of {self.groups} groups; legal are 1 to {self.groups}")
        if self.kind == SOFTMAX and self.groups > 1:
            raise ModelError(f"softmax routing has {self.groups} groups of experts; legal is 1")


def route(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token.

    Args:
        logits: [T, E] of the router.
        bias: [E], added to the scores for the choice only, where the router has one.

    Returns:
        weights [T, X] f32 and expert ids [T, X] int32.

    Raises:
        ModelError: a bias for a kind of routing that has none, or none for one that has it; or experts that do not form the groups.
    """
    if (bias is None) != (routing.kind == SOFTMAX):
        given = "without a bias; legal is one [E]" if bias is None else "with a bias; legal is none"
        raise ModelError(f"{routing.kind} routing {given}")
    if bias is not None:
        _check_groups(routing, logits.shape[-1])
        weights, ids = ops.moe_route_grouped(
            logits, bias, routing.top_k, routing.groups, routing.top_groups, routing.renormalise, routing.scale
        )
        return weights, ids
    weights, ids = ops.moe_route(logits, routing.top_k, routing.renormalise)
    return weights if routing.scale == 1.0 else weights * routing.scale, ids


def _check_groups(routing: Routing, experts: int) -> None:
    each = experts // routing.groups
    least = 2 if routing.top_groups < routing.groups else 1
    if experts % routing.groups or each < least or routing.top_k > each * routing.top_groups:
        raise ModelError(
            f"{experts} experts in {routing.groups} groups, of which a token chooses {routing.top_groups} and {routing.top_k} experts; "
            f"legal are groups of equal size, at least {least}, that hold as many experts as a token chooses"
        )
