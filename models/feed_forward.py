"""Turns one feed-forward block, dense or mixture of experts, into its parameters and its function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.errors import ModelError
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import Sum, all_gather, axis_index, group_of, reduce_scatter, shard_map
from ..graphs.types import Aval, Tree
from . import quant, sequence_parallel
from .params import Param, Source
from .variant import Variant


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
    @property
    def variant(self) -> Variant: ...


def swiglu_params(M: int, width: int, dtype: torch.dtype, at: str, axis: str = "ffn") -> tuple[Param, Param]:
    """gate_up [2, F, M] and down [M, F] of one SwiGLU; F is `width`, `axis` its logical name."""
    gate_up = Source(
        (at + "gate_proj.weight", at + "up_proj.weight"), ((width, M),) * 2, lambda g, u: torch.stack([g, u]), lambda x: tuple(x.unbind())
    )
    down = Source((at + "down_proj.weight",), ((M, width),))
    return Param(Aval((2, width, M), dtype, (None, axis, None)), gate_up), Param(Aval((M, width), dtype, (None, axis)), down)


def dense_params(cfg: DenseSizes, dtype: torch.dtype, at: str) -> dict[str, Param]:
    """Parameters of a dense feed-forward; `at` is its prefix in a checkpoint."""
    gate_up, down = swiglu_params(cfg.hidden_size, cfg.intermediate_size, dtype, at)
    return {"gate_up": gate_up, "down": down}


def moe_params(cfg: MoeSizes, dtype: torch.dtype, at: str) -> dict[str, Tree]:
    """Parameters of a mixture of experts with a gated shared expert; `at` is its prefix in a checkpoint.

    Keys: `router`, `experts` (the operands of the expert products, in order), `shared_gate_up`, `shared_down`, `shared_gate`.
    """
    M, E = cfg.hidden_size, cfg.num_experts
    shared_gate_up, shared_down = swiglu_params(M, cfg.shared_expert_intermediate_size, dtype, at + "shared_expert.", "shared_ffn")
    return {
        "router": Param(Aval((E, M), dtype), Source((at + "gate.weight",), ((E, M),))),
        **_expert_params(cfg, dtype, at + "experts."),
        "shared_gate_up": shared_gate_up,
        "shared_down": shared_down,
        "shared_gate": Param(Aval((1, M), dtype), Source((at + "shared_expert_gate.weight",), ((1, M),))),
    }


def _expert_params(cfg: MoeSizes, dtype: torch.dtype, at: str) -> dict[str, Tree]:
    M, E, F, form = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size, cfg.variant.experts
    names, wide, narrow = (at + "gate_up_proj", at + "down_proj"), (E, 2 * F, M), (E, M, F)
    if form == "plain":
        fused = Source(names[:1], (wide,), lambda w: w.view(E, 2, F, M), lambda x: (x.reshape(wide),))
        return {
            "gate_up": Param(Aval((E, 2, F, M), dtype, ("experts", None, "expert_ffn", None)), fused),
            "down": Param(Aval(narrow, dtype, ("experts", None, "expert_ffn")), Source(names[1:], (narrow,))),
        }
    axes = ("experts", None, None)
    turned = [
        Param(Aval((E, K, N), dtype, axes), Source((name,), ((E, N, K),), _turn, lambda x: (_turn(x),)))
        for name, K, N in ((names[0], M, 2 * F), (names[1], F, M))
    ]
    return {"gate_up": quant.grouped(turned[0], form), "down": quant.grouped(turned[1], form)}


def _turn(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def dense(weights: Tree, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """`down @ (silu(gate @ x) * (up @ x))`.

    Args:
        x: [T, M], laid out as the stream (rows.py).
        tokens: rows that are not padding.

    Returns:
        the same before the residual.
    """
    return sequence_parallel.project(ops.swiglu_linear(sequence_parallel.whole(x, tokens), weights["gate_up"]), weights["down"])


def moe(cfg: MoeSizes, weights: Tree, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The X best experts of each token, weighted by renormalised router probabilities, and a sigmoid-gated shared expert.

    Where experts are spread over devices each device has tokens of its own (`expert_tokens`), which are dispatched to the
    experts' devices and combined again, or gathered and scattered when they are many. Where each expert is split
    (`expert_ffn`), every device has all tokens and a part of every product, and the parts are summed once.

    Args:
        x: [T, M], laid out as the stream (rows.py).

    Returns:
        the same before the residual, and the router logits of the tokens of this device [T, E].

    Raises:
        ModelError: the layout splits each expert, and they are held in a form that is whole.
    """
    if (parts := num_shards("expert_ffn")) > 1 and cfg.variant.experts != "plain":
        raise ModelError(f"experts are held {cfg.variant.experts!r}, each whole; the layout splits each in {parts}: legal is 'plain'")
    x = constrain(x, "expert_tokens", None)
    logits = ops.linear(x, weights["router"])
    experts = [(tensor, axes) for tensor, axes in _operands(cfg, weights)]
    shared = [
        (weights["shared_gate_up"], (None, "shared_ffn", None)),
        (weights["shared_down"], (None, "shared_ffn")),
        (weights["shared_gate"], (None, None)),
    ]

    def local(x: torch.Tensor, logits: torch.Tensor, router: torch.Tensor, *held: torch.Tensor) -> torch.Tensor:
        gate_up, down, gate = held[-3:]
        routed = _routed(cfg, x, logits, router, held[:-3])
        beside = ops.linear(ops.swiglu_linear(x, gate_up), down)
        out: torch.Tensor = routed + torch.sigmoid(ops.linear(x, gate)) * beside
        return out

    tokens = ("expert_tokens", None)
    operands = [(x, tokens), (logits, tokens), (weights["router"], (None, None)), *experts, *shared]
    out = shard_map(local, operands, Sum("expert_ffn") if num_shards("expert_ffn") > 1 else tokens)
    return constrain(out, "tokens", None), logits


def _operands(cfg: MoeSizes, weights: Tree) -> list[tuple[torch.Tensor, tuple[str | None, ...]]]:
    """The experts' tensors in the order of the expert products' operands, each with its logical axes."""
    if cfg.variant.experts == "plain":
        return [(weights["gate_up"], ("experts", None, "expert_ffn", None)), (weights["down"], ("experts", None, "expert_ffn"))]
    return [(tensor, ("experts", *(None,) * (tensor.dim() - 1))) for name in ("gate_up", "down") for tensor in weights[name].values()]


def _routed(cfg: MoeSizes, x: torch.Tensor, logits: torch.Tensor, router: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The experts' share of a device's tokens [T, M]; with split experts, this device's addend of it."""
    devices, choices = num_shards("experts"), cfg.num_experts_per_tok
    if devices == 1:
        share, ids = ops.moe_route(logits, choices, True)
        return _own_experts(cfg, x, share, ids, experts)
    if x.shape[0] <= cfg.variant.most_dispatched:
        share, ids = ops.moe_route(logits, choices, True)
        group, here = group_of("experts"), axis_index("experts")
        quantised = cfg.variant.experts != "grouped"
        sent, scale, counts, assist, received = ops.moe_dispatch(x, ids, here, cfg.num_experts, group, devices, quantised)
        out = _grouped(cfg, x.dtype, sent, scale, counts, experts)
        combined: torch.Tensor = ops.moe_combine(out, ids, share, assist, received, here, cfg.num_experts, group, devices)
        return combined
    everyone = all_gather(x, "experts")
    # Routing all tokens again costs less than a second exchange.
    share, ids = ops.moe_route(ops.linear(everyone, router), choices, True)
    first = axis_index("experts") * (cfg.num_experts // devices)
    ids = torch.remainder(ids - first, cfg.num_experts)
    return reduce_scatter(_own_experts(cfg, everyone, share, ids, experts), "experts")


def _own_experts(cfg: MoeSizes, x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted sum of what this device's experts, ids 0 and up, make of the tokens that chose them."""
    if cfg.variant.experts == "plain":
        fused: torch.Tensor = ops.moe_experts(x, share, ids, *experts)
        return fused
    held = cfg.num_experts // num_shards("experts")
    sorted_, scale, counts, index = ops.moe_sort(x, ids, held, cfg.num_experts, cfg.variant.experts != "grouped")
    out: torch.Tensor = ops.moe_unsort(_grouped(cfg, x.dtype, sorted_, scale, counts, experts), share, index)
    return out


def _grouped(
    cfg: MoeSizes, dtype: torch.dtype, x: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, experts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The experts' products over rows grouped by expert, in the format that the experts are held in."""
    if cfg.variant.experts == "grouped":
        plain: torch.Tensor = ops.grouped_experts(x, counts, *experts)
        return plain
    product = ops.grouped_experts_w8a8 if cfg.variant.experts == "w8a8" else ops.grouped_experts_w4a8
    quantised: torch.Tensor = product(x, scale, counts, *experts, dtype)
    return quantised
