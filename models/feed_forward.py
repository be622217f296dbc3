"""Turns a feed-forward block, dense or mixture of experts, into its parameters and its function."""

from __future__ import annotations

from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.layout import constrain
from ..graphs.types import Aval, Tree
from .params import Param, Source


class DenseSizes(Protocol):
    """What a dense block reads of a model's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class MoeSizes(Protocol):
    """What a mixture of experts reads of a model's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...


def swiglu_params(M: int, width: int, dtype: torch.dtype, at: str) -> tuple[Param, Param]:
    """gate_up [2, F, M] and down [M, F] of one SwiGLU; F is `width`."""
    gate_up = Source(
        (at + "gate_proj.weight", at + "up_proj.weight"), ((width, M),) * 2, lambda g, u: torch.stack([g, u]), lambda x: tuple(x.unbind())
    )
    down = Source((at + "down_proj.weight",), ((M, width),))
    return Param(Aval((2, width, M), dtype, (None, "ffn", None)), gate_up), Param(Aval((M, width), dtype, (None, "ffn")), down)


def dense_params(cfg: DenseSizes, dtype: torch.dtype, at: str) -> dict[str, Param]:
    """Parameters of a dense feed-forward; `at` is its prefix in a checkpoint."""
    gate_up, down = swiglu_params(cfg.hidden_size, cfg.intermediate_size, dtype, at)
    return {"gate_up": gate_up, "down": down}


def moe_params(cfg: MoeSizes, dtype: torch.dtype, at: str) -> dict[str, Param]:
    """Parameters of a mixture of experts with a gated shared expert; `at` is its prefix in a checkpoint."""
    M, E, width = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size
    shared_gate_up, shared_down = swiglu_params(M, cfg.shared_expert_intermediate_size, dtype, at + "shared_expert.")
    fused = Source(
        (at + "experts.gate_up_proj",), ((E, 2 * width, M),), lambda w: w.view(E, 2, width, M), lambda x: (x.reshape(E, 2 * width, M),)
    )
    return {
        "router": Param(Aval((E, M), dtype), Source((at + "gate.weight",), ((E, M),))),
        "gate_up": Param(Aval((E, 2, width, M), dtype, ("experts", None, "expert_ffn", None)), fused),
        "down": Param(Aval((E, M, width), dtype, ("experts", None, "expert_ffn")), Source((at + "experts.down_proj",), ((E, M, width),))),
        "shared_gate_up": shared_gate_up,
        "shared_down": shared_down,
        "shared_gate": Param(Aval((1, M), dtype), Source((at + "shared_expert_gate.weight",), ((1, M),))),
    }


def dense(weights: Tree, x: torch.Tensor) -> torch.Tensor:
    """`down @ (silu(gate @ x) * (up @ x))`.

    Args:
        x: [T, M].

    Returns:
        [T, M] before the residual.
    """
    return constrain(ops.linear(ops.swiglu_linear(x, weights["gate_up"]), weights["down"]), None, None)


def moe(cfg: MoeSizes, weights: Tree, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The X best experts of each token, weighted by renormalised router probabilities, and a sigmoid-gated shared expert.

    Args:
        x: [T, M].

    Returns:
        [T, M] before the residual, and the router logits [T, E].
    """
    logits = ops.linear(x, weights["router"])
    share, ids = ops.moe_route(logits, cfg.num_experts_per_tok, True)
    routed = constrain(ops.moe_experts(x, share, ids, weights["gate_up"], weights["down"]), None, None)
    shared = dense({"gate_up": weights["shared_gate_up"], "down": weights["shared_down"]}, x)
    return routed + torch.sigmoid(ops.linear(x, weights["shared_gate"])) * shared, logits
