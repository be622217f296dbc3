"""How a mixture of experts chooses the experts of a token, and weighs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graphs import ops
from ..graphs.errors import ModelError

SOFTMAX = "softmax"
KINDS = (SOFTMAX,)


@dataclass(frozen=True)
class Routing:
    """A router's rule.

    Attributes:
        kind: how logits become scores: "softmax" over all experts.
        top_k: X, experts of a token.
        renormalise: whether the X weights are divided by their sum.
        scale: multiplies the weights.
        groups: the experts form this many groups of adjacent experts.
        top_groups: groups whose experts a token may choose.
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
        ModelError: a bias for a kind of routing that has none.
    """
    if bias is not None:
        raise ModelError(f"{routing.kind} routing with a bias; legal is none")
    weights, ids = ops.moe_route(logits, routing.top_k, routing.renormalise)
    return weights if routing.scale == 1.0 else weights * routing.scale, ids
