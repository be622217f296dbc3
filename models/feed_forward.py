"""The feed-forward blocks, dense and mixture of experts: parameters and functions."""

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
from .params import Param, Parts, Source
from .variant import Variant


class DenseSizes(Protocol):
    """Fields of a model's configuration that a dense block reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class MoeSizes(Protocol):
    """Fields of a model's configuration that a mixture of experts reads."""

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


def swiglu_params(M: int, width: int, dtype: torch.dtype, prefix: str, axis: str = "ffn") -> tuple[Param, Param]:
    """gate_up [2, F, M] and down [M, F] of one SwiGLU; F is `width`, and `axis` its logical axis."""
    gate_up = Source(
        (prefix + "gate_proj.weight", prefix + "up_proj.weight"),
        ((width, M),) * 2,
        lambda g, u: torch.stack([g, u]),
        lambda x: tuple(x.unbind()),
        ((axis, None),) * 2,
    )
    down = Source((prefix + "down_proj.weight",), ((M, width),))
    return Param(Aval((2, width, M), dtype, (None, axis, None)), gate_up), Param(Aval((M, width), dtype, (None, axis)), down)


def dense_params(cfg: DenseSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of a dense feed-forward; `prefix` begins their names in a checkpoint."""
    gate_up, down = swiglu_params(cfg.hidden_size, cfg.intermediate_size, dtype, prefix)
    return {"gate_up": gate_up, "down": down}


def moe_params(cfg: MoeSizes, dtype: torch.dtype, prefix: str) -> dict[str, Tree]:
    """Parameters of a mixture of experts with a gated shared expert; `prefix` begins their names in a checkpoint.

    Keys: `router`, `experts` (the operands of the expert products, in order), `shared_gate_up`, `shared_down`, `shared_gate`.
    """
    M, E = cfg.hidden_size, cfg.num_experts
    shared_gate_up, shared_down = swiglu_params(M, cfg.shared_expert_intermediate_size, dtype, prefix + "shared_expert.", "shared_ffn")
    return {
        "router": Param(Aval((E, M), dtype), Source((prefix + "gate.weight",), ((E, M),))),
        **_expert_params(cfg, dtype, prefix + "experts."),
        "shared_gate_up": shared_gate_up,
        "shared_down": shared_down,
        "shared_gate": Param(Aval((1, M), dtype), Source((prefix + "shared_expert_gate.weight",), ((1, M),))),
    }


def _expert_params(cfg: MoeSizes, dtype: torch.dtype, prefix: str) -> dict[str, Tree]:
    M, E, F, form = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size, cfg.variant.experts
    names, wide, narrow = (prefix + "gate_up_proj", prefix + "down_proj"), (E, 2 * F, M), (E, M, F)
    if form == "plain":
        halves = ("experts", Parts("expert_ffn", (F, F)), None)
        fused = Source(names[:1], (wide,), lambda w: w.view(w.shape[0], 2, -1, M), lambda x: (x.reshape(wide),), (halves,))
        return {
            "gate_up": Param(Aval((E, 2, F, M), dtype, ("experts", None, "expert_ffn", None)), fused),
            "down": Param(Aval(narrow, dtype, ("experts", None, "expert_ffn")), Source(names[1:], (narrow,))),
        }
    axes = ("experts", None, None)
    transposed = [
        Param(Aval((E, K, N), dtype, axes), Source((name,), ((E, N, K),), _transpose, lambda x: (_transpose(x),), (axes,), "experts"))
        for name, K, N in ((names[0], M, 2 * F), (names[1], F, M))
    ]
    return {"gate_up": quant.grouped(transposed[0], form), "down": quant.grouped(transposed[1], form)}


def _transpose(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def dense(weights: Tree, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """`down @ (silu(gate @ x) * (up @ x))`.

    Args:
        x: [T, M], laid out as the residual stream (sequence_parallel.py).
        tokens: rows of the stream that are tokens; the rest pads it to an even split.

    Returns:
        the block's output before the residual add, shaped and laid out like x.
    """
    return sequence_parallel.project(ops.swiglu_linear(sequence_parallel.whole(x, tokens), weights["gate_up"]), weights["down"])


def moe(cfg: MoeSizes, weights: Tree, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The X best experts of each token, weighted by renormalised router probabilities, and a sigmoid-gated shared expert.

    With expert parallelism (`experts` is split) a device dispatches its tokens (`expert_tokens`) to the experts' devices and combines
    what comes back, at once or in parts; or it gathers all tokens and reduce-scatters the result (`Variant`).
    Where instead each expert is split (`expert_ffn`), every device has all tokens and a part of every product, and one reduction sums
    the parts.

    Args:
        x: [T, M], laid out as the residual stream (sequence_parallel.py).

    Returns:
        the block's output before the residual add, shaped and laid out like x; and the router logits [T, E] of this device's tokens.

    Raises:
        ModelError: the layout splits each expert, and the format that experts are stored in cannot be split.
    """
    if (parts := num_shards("expert_ffn")) > 1 and cfg.variant.experts != "plain":
        raise ModelError(f"experts are stored as {cfg.variant.experts!r}, each whole; the layout splits each in {parts}: legal is 'plain'")
    x = constrain(x, "expert_tokens", None)
    logits = ops.linear(x, weights["router"])
    shared = [
        (weights["shared_gate_up"], (None, "shared_ffn", None)),
        (weights["shared_down"], (None, "shared_ffn")),
        (weights["shared_gate"], (None, None)),
    ]

    def local(x: torch.Tensor, logits: torch.Tensor, router: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
        gate_up, down, gate = matrices[-3:]
        opened, shared_out = torch.sigmoid(ops.linear(x, gate)), ops.linear(ops.swiglu_linear(x, gate_up), down)
        if num_shards("experts") > 1 and cfg.variant.fuses(x.shape[0]):
            # One operator scales and adds what the fused kernel, unlike a combine, does not take.
            return torch.addcmul(_fused(cfg, x, logits, matrices[:-3]), opened, shared_out)
        return _with_routed(cfg, x, logits, router, matrices[:-3], opened * shared_out)

    tokens = ("expert_tokens", None)
    operands = [(x, tokens), (logits, tokens), (weights["router"], (None, None)), *_operands(cfg, weights), *shared]
    out = shard_map(local, operands, Sum("expert_ffn") if num_shards("expert_ffn") > 1 else tokens)
    return constrain(out, "tokens", None), logits


def _operands(cfg: MoeSizes, weights: Tree) -> list[tuple[torch.Tensor, tuple[str | None, ...]]]:
    """The experts' tensors in the order of the expert products' operands, each with its logical axes."""
    if cfg.variant.experts == "plain":
        return [(weights["gate_up"], ("experts", None, "expert_ffn", None)), (weights["down"], ("experts", None, "expert_ffn"))]
    return [(tensor, ("experts", *(None,) * (tensor.dim() - 1))) for name in ("gate_up", "down") for tensor in weights[name].values()]


def _with_routed(
    cfg: MoeSizes, x: torch.Tensor, logits: torch.Tensor, router: torch.Tensor, experts: Sequence[torch.Tensor], shared: torch.Tensor
) -> torch.Tensor:
    """The shared expert's output [T, M] plus the routed experts' for a device's tokens; where experts are split, a partial sum of it."""
    devices, choices = num_shards("experts"), cfg.num_experts_per_tok
    if devices == 1:
        share, ids = ops.moe_route(logits, choices, True)
        return _own_experts(cfg, x, share, ids, experts) + shared
    most = cfg.variant.most_dispatched
    if most and (x.shape[0] <= most or cfg.variant.dispatches_in_parts):
        share, ids = ops.moe_route(logits, choices, True)
        if x.shape[0] <= most:
            return _dispatched(cfg, devices, experts, x, share, ids, shared, x)
        outs: list[torch.Tensor] = []
        for part, weights, chosen, added in zip(*(tensor.split(most) for tensor in (x, share, ids, shared)), strict=True):
            outs.append(_dispatched(cfg, devices, experts, part, weights, chosen, added, outs[-1] if outs else part))
        return torch.cat(outs)
    all_tokens = all_gather(x, "experts")
    # Computing the router logits of all tokens costs less than gathering them.
    share, ids = ops.moe_route(ops.linear(all_tokens, router), choices, True)
    first = axis_index("experts") * (cfg.num_experts // devices)
    ids = torch.remainder(ids - first, cfg.num_experts)
    return reduce_scatter(_own_experts(cfg, all_tokens, share, ids, experts), "experts") + shared


def _fused(cfg: MoeSizes, x: torch.Tensor, logits: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The routed experts' output for a device's tokens, there and back in one operation for each part that is dispatched."""
    share, ids = ops.moe_route(logits, cfg.num_experts_per_tok, True)
    where = axis_index("experts"), cfg.num_experts, group_of("experts"), num_shards("experts")
    outs: list[torch.Tensor] = []
    for part, weights, chosen in zip(*(tensor.split(cfg.variant.most_dispatched) for tensor in (x, share, ids)), strict=True):
        outs.append(ops.fused_experts_w4a8(part, chosen, weights, outs[-1] if outs else part, *experts, *where))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _dispatched(
    cfg: MoeSizes,
    devices: int,
    experts: Sequence[torch.Tensor],
    x: torch.Tensor,
    share: torch.Tensor,
    ids: torch.Tensor,
    shared: torch.Tensor,
    earlier: torch.Tensor,
) -> torch.Tensor:
    """The shared expert's output plus the routed experts', which other devices compute; after the exchange with that result."""
    group, here, quantised = group_of("experts"), axis_index("experts"), cfg.variant.experts != "grouped"
    sent, scale, counts, assist, received = ops.moe_dispatch(x, ids, earlier, here, cfg.num_experts, group, devices, quantised)
    out = _grouped(cfg, x.dtype, sent, scale, counts, experts)
    combined: torch.Tensor = ops.moe_combine(out, ids, share, assist, received, shared, here, cfg.num_experts, group, devices)
    return combined


def _own_experts(cfg: MoeSizes, x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor, experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted sum of the outputs of this device's experts; `ids` are relative to its first one, and other devices' are beyond its last."""
    if cfg.variant.experts == "plain":
        fused: torch.Tensor = ops.moe_experts(x, share, ids, *experts)
        return fused
    local_experts = cfg.num_experts // num_shards("experts")
    by_expert, scale, counts, index = ops.moe_sort(x, ids, local_experts, cfg.num_experts, cfg.variant.experts != "grouped")
    out: torch.Tensor = ops.moe_unsort(_grouped(cfg, x.dtype, by_expert, scale, counts, experts), share, index)
    return out


def _grouped(
    cfg: MoeSizes, dtype: torch.dtype, x: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, experts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The experts' products over rows grouped by expert, in the format that the experts are stored in."""
    if cfg.variant.experts == "grouped":
        plain: torch.Tensor = ops.grouped_experts(x, counts, *experts)
        return plain
    product = ops.grouped_experts_w8a8 if cfg.variant.experts == "w8a8" else ops.grouped_experts_w4a8
    quantised: torch.Tensor = product(x, scale, counts, *experts, dtype)
    return quantised
