"""The feed-forward blocks, dense and mixture of experts: parameters and functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ..graphs import ops
from ..graphs.quantise import rounded_in_blocks
from ..graphs.spmd.layout import constrain, num_shards
from ..graphs.spmd.region import Sum, all_gather, axis_index, group_of, reduce_scatter, shard_map
from ..graphs.types import Aval, Tree
from . import expert_placement, quant, sequence_parallel
from .params import Param, Parts, Source
from .quant.experts import grouped, operands_of_one, rounds_rows
from .quant.formats import INT8, W4A8_DYNAMIC
from .quant.product import format_of, operands, regrouped
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
    return (
        Param(Aval((2, width, M), dtype, (None, axis, None)), gate_up, role="column"),
        Param(Aval((M, width), dtype, (None, axis)), down, role="row"),
    )


class FeedForwardSizes(DenseSizes, MoeSizes, Protocol):
    """Fields of a model's configuration that either block reads; without experts every layer is dense."""


def params(
    cfg: FeedForwardSizes, dtype: torch.dtype, prefix: str, *, dense: bool, shared: str = "shared_expert", gated: bool = True
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
    M, E, F = cfg.hidden_size, cfg.num_experts, cfg.moe_intermediate_size
    names, wide, narrow = (prefix + "gate_up_proj", prefix + "down_proj"), (E, 2 * F, M), (E, M, F)
    halves = ("experts", Parts("expert_ffn", (F, F)), None)
    fused = Source(
        names[:1],
        (wide,),
        lambda w: w.view(w.shape[0], 2, -1, w.shape[-1]),
        lambda x: (x.reshape(x.shape[0], -1, x.shape[-1]),),
        (halves,),
        "experts",
    )
    axes = ("experts", None, "expert_ffn")
    down = Source(names[1:], (narrow,), axes=(axes,), block_axis="experts")
    return {
        "gate_up": Param(Aval((E, 2, F, M), dtype, ("experts", None, "expert_ffn", None)), fused, role="experts"),
        "down": Param(Aval(narrow, dtype, axes), down, role="experts_down"),
    }


def dense(weights: Tree, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """`down @ (silu(gate @ x) * (up @ x))`.

    Args:
        x: [T, M], laid out as the residual stream (sequence_parallel.py).
        tokens: rows of the stream that are tokens; the rest pads it to an even split.

    Returns:
        the block's output before the residual add, shaped and laid out like x.
    """
    hidden = quant.swiglu(sequence_parallel.whole(x, tokens), weights["gate_up"], "ffn")
    return sequence_parallel.project(hidden, weights["down"], "ffn")


_ROUTER = {
    **{"router": (None, None), "router_bias": (None,)},
    **{expert_placement.TABLE: ("experts", None), expert_placement.TABLES: (None, None)},
}
_SHARED = {"shared_gate_up": (None, "shared_ffn", None), "shared_down": (None, "shared_ffn"), "shared_gate": (None, None)}
_EXPERTS = {"gate_up": ("experts", None, "expert_ffn", None), "down": ("experts", None, "expert_ffn")}
"""Logical axes of the weights of a mixture of experts; `router_bias` and those of a shared expert are optional."""


def apply(cfg: MoeSizes, weights: Tree, x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block that the weights are of, a mixture of experts or dense, as `moe` and `dense`; of the former also the router logits, and the
    experts [T, X] of each token if `Variant.tells_experts`."""
    if "router" not in weights:
        return dense(weights, x, tokens), []
    out, logits = moe(cfg, weights, x)
    return out, [logits, _chosen(cfg, weights, logits)] if cfg.variant.tells_experts else [logits]


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
    """
    x = constrain(x, "expert_tokens", None)
    logits = _router_logits(x, weights["router"])
    names = [name for name in (*_ROUTER, *_SHARED, *_EXPERTS) if name in weights]
    matrices = [weights[name] for name in names]
    listed = [operand for name in names for operand in _listed(name, weights[name])]

    def local(x: torch.Tensor, logits: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        own = dict(zip(names, regrouped(matrices, tensors), strict=True))
        experts = Experts(own["gate_up"], own["down"])
        if num_shards("experts") > 1 and cfg.variant.fuses(x.shape[0]) and format_of(experts.gate_up) == W4A8_DYNAMIC:
            return _with_shared(own, x, _fused(cfg, x, logits, own, experts))
        return _with_routed(cfg, x, logits, own, experts, _shared(own, x))

    tokens = ("expert_tokens", None)
    out = shard_map(local, [(x, tokens), (logits, tokens), *listed], Sum("expert_ffn") if num_shards("expert_ffn") > 1 else tokens)
    return constrain(out, "tokens", None), logits


def _router_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[T, E], in the dtype of the router."""
    logits: torch.Tensor = ops.linear(x.to(router.dtype), router)
    return logits


def _chosen(cfg: MoeSizes, weights: Tree, logits: torch.Tensor) -> torch.Tensor:
    """The experts [T, X] of each token; what chose them is there already, and is merged with this."""
    bias = [(weights["router_bias"], (None,))] if "router_bias" in weights else []
    tokens = ("expert_tokens", None)
    return shard_map(lambda logits, *bias: route(cfg.routing, logits, *bias)[1], [(logits, tokens), *bias], tokens)


def _listed(name: str, weight: Tree) -> list[tuple[torch.Tensor, tuple[str | None, ...]]]:
    """The tensors of a weight with their logical axes."""
    axes = {**_ROUTER, **_SHARED, **_EXPERTS}[name]
    return operands(weight, axes, lead=1 if name in _EXPERTS else 0, row=name in ("down", "shared_down"))


def _shared(weights: Mapping[str, Tree], x: torch.Tensor) -> torch.Tensor | None:
    """Output of the shared expert, if there is one: [T, M], gated by a sigmoid where it has a gate."""
    if "shared_down" not in weights:
        return None
    gate = torch.sigmoid(ops.linear(x, weights["shared_gate"])) if "shared_gate" in weights else None
    out = quant.local_row_parallel(quant.local_swiglu(x, weights["shared_gate_up"]), weights["shared_down"])
    return out if gate is None else gate * out


class Experts(NamedTuple):
    """The experts of one device, in the format that they are stored in: gate_up [E, 2, F, M] and down [E, M, F]."""

    gate_up: Tree
    down: Tree


def _with_routed(
    cfg: MoeSizes,
    x: torch.Tensor,
    logits: torch.Tensor,
    router: Mapping[str, Tree],
    experts: Experts,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """The routed experts' output for a device's tokens, plus the shared expert's [T, M]; where experts are split, a partial sum of it."""
    devices, count = num_shards("experts"), expert_placement.count(cfg)
    if devices == 1:
        share, ids = _routed(cfg, logits, router)
        return _plus(_own_experts(cfg, x, share, ids, experts), shared)
    most = cfg.variant.most_dispatched
    if most and (x.shape[0] <= most or cfg.variant.dispatches_in_parts):
        share, ids = _routed(cfg, logits, router)
        # An empty tensor stands for no shared expert.
        added = x[:0] if shared is None else shared
        if x.shape[0] <= most:
            return _dispatched(cfg, devices, experts, [(x, share, ids, added)])[0]
        parts = [tensor.split(most) for tensor in (x, share, ids)]
        sums = [added] * len(parts[0]) if shared is None else shared.split(most)
        return torch.cat(_dispatched(cfg, devices, experts, [*zip(*parts, sums, strict=True)]))
    all_tokens = all_gather(x, "experts")
    # Computing the router logits of all tokens costs less than gathering them.
    share, ids = _routed(cfg, _router_logits(all_tokens, router["router"]), router, of_all=True)
    first = axis_index("experts") * (count // devices)
    ids = torch.remainder(ids - first, count)
    return _plus(reduce_scatter(_own_experts(cfg, all_tokens, share, ids, experts), "experts"), shared)


def _routed(cfg: MoeSizes, logits: torch.Tensor, router: Mapping[str, Tree], *, of_all: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [T, X] and the physical experts [T, X] of tokens, of this device or of all."""
    share, ids = route(cfg.routing, logits, router.get("router_bias"))
    if (table := router.get(expert_placement.TABLES if of_all else expert_placement.TABLE)) is None:
        return share, ids
    return share, expert_placement.physical(table, ids)


def _plus(routed: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    return routed if shared is None else routed + shared


def _with_shared(weights: Mapping[str, Tree], x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
    """Adds the output of the shared expert, which the fused kernel, unlike a combine, does not take."""
    if "shared_gate" not in weights:
        return _plus(routed, _shared(weights, x))
    # One operator scales and adds.
    gate = torch.sigmoid(ops.linear(x, weights["shared_gate"]))
    return torch.addcmul(routed, gate, quant.local_row_parallel(quant.local_swiglu(x, weights["shared_gate_up"]), weights["shared_down"]))


def _fused(cfg: MoeSizes, x: torch.Tensor, logits: torch.Tensor, router: Mapping[str, Tree], experts: Experts) -> torch.Tensor:
    """The routed experts' output for a device's tokens, there and back in one operation for each part that is dispatched."""
    share, ids = _routed(cfg, logits, router)
    where = axis_index("experts"), expert_placement.count(cfg), group_of("experts"), num_shards("experts")
    outs: list[torch.Tensor] = []
    for part, weights, chosen in zip(*(tensor.split(cfg.variant.most_dispatched) for tensor in (x, share, ids)), strict=True):
        outs.append(ops.fused_experts_w4a8(part, chosen, weights, outs[-1] if outs else part, *operands_of_one(*experts), *where))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _dispatched(cfg: MoeSizes, devices: int, experts: Experts, parts: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """The routed experts' output of each part, which other devices compute, plus its `shared`.

    Exchanges come one after the other, each with the rows of the one before. While `Variant.in_flight` parts are on their way, experts
    compute one and links carry another.

    Args:
        parts: rows [t, M], shares and ids [t, X], and what is added [t, M].
    """
    where = axis_index("experts"), expert_placement.count(cfg), group_of("experts"), devices
    outs: list[torch.Tensor] = []
    sent: list[tuple[torch.Tensor, ...]] = []
    last: torch.Tensor | None = None
    for number in range(len(parts) + cfg.variant.in_flight - 1):
        if number < len(parts):
            x, _, ids, _ = parts[number]
            sent.append(ops.moe_dispatch(x, ids, x if last is None else last, *where, rounds_rows(experts.gate_up)))
            last = sent[-1][0]
        if number >= cfg.variant.in_flight - 1:
            (_, share, ids, shared), (rows, scale, counts, *records) = parts[len(outs)], sent[len(outs)]
            out = grouped(rows, scale, counts, *experts, parts[0][0].dtype)
            earlier = out if last is None or last is rows else last
            last = ops.moe_combine(out, ids, share, *records, shared, *where, earlier, _sends_int8(cfg, experts))
            outs.append(last)
    return outs


def _own_experts(cfg: MoeSizes, x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Weighted sum of the outputs of this device's experts; `ids` are relative to its first one, and other devices' are beyond its last."""
    if isinstance(experts.gate_up, torch.Tensor):
        fused: torch.Tensor = ops.moe_experts(x, share, ids, *experts)
        return fused
    count = expert_placement.count(cfg)
    by_expert, scale, counts, index = ops.moe_sort(x, ids, count // num_shards("experts"), count, rounds_rows(experts.gate_up))
    rows = grouped(by_expert, scale, counts, *experts, x.dtype)
    out: torch.Tensor = ops.moe_unsort(rounded_in_blocks(rows) if _sends_int8(cfg, experts) else rows, share, index)
    return out


def _sends_int8(cfg: MoeSizes, experts: Experts) -> bool:
    """Whether rows that experts got as int8 are sent back so; one device that stands for all ranks rounds the same rows."""
    return cfg.variant.formats.sent_back == INT8 and rounds_rows(experts.gate_up)
