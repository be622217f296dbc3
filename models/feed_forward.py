"""The feed-forward blocks, dense and mixture of experts: parameters and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ..graphs import ops
from ..graphs.errors import ModelError
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import Sum, all_gather, axis_index, group_of, reduce_scatter, shard_map
from ..graphs.types import Aval, Tree
from . import quant, sequence_parallel
from .params import Param, Parts, Source
from .routing import SIGMOID, Routing, route
from .variant import Variant


class DenseSizes(Protocol):
    """Fields of a model's configuration that a dense block reads."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class MoeSizes(Protocol):
    """Fields of a model's configuration that a mixture of experts reads; a shared expert of width 0 is none."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def routing(self) -> Routing: ...
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


class Sizes(DenseSizes, MoeSizes, Protocol):
    """Fields of a model's configuration that either block reads; without experts every layer is dense."""


def params(
    cfg: Sizes, dtype: torch.dtype, prefix: str, *, dense: bool, shared: str = "shared_expert", gated: bool = True
) -> dict[str, Tree]:
    """Parameters of a layer's block, a dense one in a model without experts; `prefix` begins their names in a checkpoint.

    Args:
        shared, gated: of `moe_params`.
    """
    if dense or not cfg.num_experts:
        return dense_params(cfg, dtype, prefix)
    return moe_params(cfg, dtype, prefix, shared=shared, gated=gated)


def dense_params(cfg: DenseSizes, dtype: torch.dtype, prefix: str) -> dict[str, Param]:
    """Parameters of a dense feed-forward; `prefix` begins their names in a checkpoint."""
    gate_up, down = swiglu_params(cfg.hidden_size, cfg.intermediate_size, dtype, prefix)
    return {"gate_up": gate_up, "down": down}


def moe_params(cfg: MoeSizes, dtype: torch.dtype, prefix: str, *, shared: str = "shared_expert", gated: bool = True) -> dict[str, Tree]:
    """Parameters of a mixture of experts; `prefix` begins their names in a checkpoint.

    Keys: `router`, where its scores are sigmoids `router_bias`, `gate_up` and `down` of the experts, and where there is a shared expert
    `shared_gate_up`, `shared_down` and, where it has a gate, `shared_gate`.

    Args:
        shared: name of the shared expert in a checkpoint.
        gated: whether it has a gate.
    """
    return {
        **_router_params(cfg, dtype, prefix + "gate."),
        **_expert_params(cfg, dtype, prefix + "experts."),
        **(_shared_params(cfg, dtype, prefix + shared, gated) if cfg.shared_expert_intermediate_size else {}),
    }


def _router_params(cfg: MoeSizes, dtype: torch.dtype, prefix: str) -> dict[str, Tree]:
    """A router of sigmoids has logits in f32, as in the published models: a bias corrects them by less than bfloat16 resolves."""
    M, E, corrected = cfg.hidden_size, cfg.num_experts, cfg.routing.kind == SIGMOID
    router = Param(Aval((E, M), torch.float32 if corrected else dtype), Source((prefix + "weight",), ((E, M),)))
    bias = Param(Aval((E,), torch.float32), Source((prefix + "e_score_correction_bias",), ((E,),)), "zeros")
    return {"router": router, "router_bias": bias} if corrected else {"router": router}


def _shared_params(cfg: MoeSizes, dtype: torch.dtype, name: str, gated: bool) -> dict[str, Tree]:
    M = cfg.hidden_size
    gate_up, down = swiglu_params(M, cfg.shared_expert_intermediate_size, dtype, name + ".", "shared_ffn")
    gate = Param(Aval((1, M), dtype), Source((name + "_gate.weight",), ((1, M),)))
    return {"shared_gate_up": gate_up, "shared_down": down, **({"shared_gate": gate} if gated else {})}


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


_ROUTER = {"router": (None, None), "router_bias": (None,)}
_SHARED = {"shared_gate_up": (None, "shared_ffn", None), "shared_down": (None, "shared_ffn"), "shared_gate": (None, None)}
"""Logical axes of the tensors of a mixture of experts other than its experts; `router_bias` and those of a shared expert are optional."""


def apply(cfg: MoeSizes, weights: Tree, x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block that the weights are of, a mixture of experts or dense, and the router logits of the former; as `moe` and `dense`."""
    if "router" not in weights:
        return dense(weights, x, tokens), []
    out, logits = moe(cfg, weights, x)
    return out, [logits]


def moe(cfg: MoeSizes, weights: Tree, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The X best experts of each token, weighted by their router's rule, and where there is one a shared expert.

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
    logits = _router_logits(x, weights["router"])
    names = [name for name in (*_ROUTER, *_SHARED) if name in weights]

    def local(x: torch.Tensor, logits: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        others, experts = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        return _with_routed(cfg, x, logits, others, experts, _shared(others, x))

    tokens = ("expert_tokens", None)
    operands = [(x, tokens), (logits, tokens), *((weights[name], (_ROUTER | _SHARED)[name]) for name in names), *_operands(cfg, weights)]
    out = shard_map(local, operands, Sum("expert_ffn") if num_shards("expert_ffn") > 1 else tokens)
    return constrain(out, "tokens", None), logits


def _router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[T, E], in the dtype of the router."""
    logits: torch.Tensor = ops.linear(x.to(router.dtype), router)
    return logits


def _shared(weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
    """Output of the shared expert, if there is one: [T, M], gated by a sigmoid where it has a gate."""
    if "shared_down" not in weights:
        return None
    out: torch.Tensor = ops.linear(ops.swiglu_linear(x, weights["shared_gate_up"]), weights["shared_down"])
    return torch.sigmoid(ops.linear(x, weights["shared_gate"])) * out if "shared_gate" in weights else out


def _operands(cfg: MoeSizes, weights: Tree) -> list[tuple[torch.Tensor, tuple[str | None, ...]]]:
    """The experts' tensors in the order of the expert products' operands, each with its logical axes."""
    if cfg.variant.experts == "plain":
        return [(weights["gate_up"], ("experts", None, "expert_ffn", None)), (weights["down"], ("experts", None, "expert_ffn"))]
    return [(tensor, ("experts", *(None,) * (tensor.dim() - 1))) for name in ("gate_up", "down") for tensor in weights[name].values()]


def _with_routed(
    cfg: MoeSizes,
    x: torch.Tensor,
    logits: torch.Tensor,
    router: Mapping[str, torch.Tensor],
    experts: Sequence[torch.Tensor],
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """The routed experts' output for a device's tokens, plus the shared expert's [T, M]; where experts are split, a partial sum of it."""
    devices, bias = num_shards("experts"), router.get("router_bias")
    if devices == 1:
        share, ids = route(cfg.routing, logits, bias)
        return _plus(_own_experts(cfg, x, share, ids, experts), shared)
    most = cfg.variant.most_dispatched
    if most and (x.shape[0] <= most or cfg.variant.dispatches_in_parts):
        share, ids = route(cfg.routing, logits, bias)
        # An empty tensor stands for no shared expert.
        added = x[:0] if shared is None else shared
        if x.shape[0] <= most:
            return _dispatched(cfg, devices, experts, x, share, ids, added, x)
        parts = [tensor.split(most) for tensor in (x, share, ids)]
        sums = [added] * len(parts[0]) if shared is None else shared.split(most)
        outs: list[torch.Tensor] = []
        for part, weights, chosen, own in zip(*parts, sums, strict=True):
            outs.append(_dispatched(cfg, devices, experts, part, weights, chosen, own, outs[-1] if outs else part))
        return torch.cat(outs)
    all_tokens = all_gather(x, "experts")
    # Computing the router logits of all tokens costs less than gathering them.
    share, ids = route(cfg.routing, _router_logits(all_tokens, router["router"]), bias)
    first = axis_index("experts") * (cfg.num_experts // devices)
    ids = torch.remainder(ids - first, cfg.num_experts)
    return _plus(reduce_scatter(_own_experts(cfg, all_tokens, share, ids, experts), "experts"), shared)


def _plus(routed: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    return routed if shared is None else routed + shared


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
    """The routed experts' output, which other devices compute, plus `shared`; after the exchange with the result `earlier`."""
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
