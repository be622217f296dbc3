"""Operators that choose each token's experts, sort tokens by expert, and sum what experts return.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import trials, work
from . import value_rules as values
from .call import Call, Results, form
from .checks import FLOATS, quantise_rows, refuse_options, require, require_shape, undefined
from .node import Node
from .record import SUMS, NpuOperator, TokenList, TorchForm


def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor, *, k: int = 1, finished: torch.Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> y [T, X] like x, int32 expert ids [T, X], f32 softmax; renorm 1 takes the softmax of the k largest alone.

    Of equal logits the lower expert wins. The last result is empty unless output_softmax is set, which renorm 1 ignores.
    Restrictions: moe_gating_top_k_softmax_v2_tiling_base.cpp of hicann/ops-transformer, 8.5.0.alpha001.
    """
    op = "npu_moe_gating_top_k_softmax_v2"
    refuse_options(op, {"finished": finished})
    logits = require(op, "x", x, FLOATS, (2,)).float()
    if renorm not in (0, 1) or not 0 < k <= min(1024, x.shape[1]):
        raise LoweringError(f"{op}: renorm {renorm}, k {k} of {x.shape[1]} experts; legal are 0 or 1, and 1 to 1024 of them")
    ids = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    softmax = logits.softmax(-1)
    y = logits.gather(1, ids).softmax(-1) if renorm else softmax.gather(1, ids)
    return y.to(x.dtype), ids.int(), softmax if output_softmax and not renorm else torch.empty(0)


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> y [T, X] like x, int32 expert ids [T, X], f32 scores [T, E]; of equal scores the lower expert wins.

    Experts are chosen by their scores plus bias [E]; y is of the scores alone, and sums to routed_scaling_factor where they are sigmoids.
    Restrictions: moe_gating_top_k_tiling.cpp of hicann/ops-transformer, 8.5.0.alpha001.

    Args:
        k_group: groups of adjacent experts, of `group_count`, that a token can choose from.
        group_select_mode: a group is as good as 0 its best expert, 1 the sum of its two best.
        norm_type: scores are 0 the softmax, 1 sigmoids.
        out_flag: return the scores; else the last result is undefined.
    """
    op = "npu_moe_gating_top_k"
    refuse_options(op, options)
    logits = require(op, "x", x, FLOATS, (2,)).float()
    _check_gating(op, logits.shape[1], k, k_group, group_count, group_select_mode, renorm, norm_type)
    scores = logits.sigmoid() if norm_type else logits.softmax(-1)
    chosen = scores
    if bias is not None:
        require_shape(op, "bias", require(op, "bias", bias, (x.dtype,), (1,)), (logits.shape[1],))
        chosen = scores + bias.float()
    if k_group < group_count:
        groups = chosen.unflatten(1, (group_count, -1))
        best = groups.sort(-1, descending=True).values[..., : group_select_mode + 1].sum(-1)
        left_out = best.argsort(dim=-1, descending=True, stable=True)[:, k_group:]
        chosen = groups.scatter(1, left_out[..., None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    ids = chosen.argsort(dim=-1, descending=True, stable=True)[:, :k]
    y = scores.gather(1, ids)
    y = y / (y.sum(-1, keepdim=True) + eps) if norm_type else y
    return (y * routed_scaling_factor).to(x.dtype), ids.int(), scores if out_flag else undefined(*scores.shape, dtype=torch.float32)


def _check_gating(
    op: str, experts: int, k: int, k_group: int, group_count: int, group_select_mode: int, renorm: int, norm_type: int
) -> None:
    if norm_type not in (0, 1) or group_select_mode not in (0, 1) or renorm != 0:
        raise LoweringError(
            f"{op}: norm_type {norm_type}, group_select_mode {group_select_mode}, renorm {renorm}; legal are 0 or 1, 0 or 1, and 0"
        )
    each = experts // group_count if group_count > 0 else 0
    legal = experts <= 2048 and 0 < k_group <= group_count and each * group_count == experts and each > group_select_mode
    if k_group < group_count:
        # A group is padded to whole blocks of 32 experts.
        legal = legal and group_count * (-(-each // 32) * 32) <= 2048
    if not legal or not 0 < k <= k_group * each:
        raise LoweringError(
            f"{op}: k {k} of {k_group} of {group_count} groups of {experts} experts; legal are up to 2048 experts in groups of equal size, "
            "two at least where two count, which hold as many as are chosen"
        )


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x [T, M] sorted by expert, those of experts outside active_expert_range left out.

    Args:
        x: [T, M].
        expert_idx: int32 [T, X].
        scale: quant_mode -1: f32 [T], carried along; quant_mode 1: f32 [1 or experts, M], multiplied in first.
        quant_mode: -1 copies, 1 quantises each row to int8.
        expert_tokens_num_type: 0 running sums, 1 counts.
        row_idx_type: 0: result row of each (token, choice), -1 for one left out; 1: (token, choice) of each result row.

    Returns:
        rows [T*X, M], int32 row index [T*X], int64 tokens of each active expert, f32 scales [T*X]; rows beyond the active ones are
        undefined.
    """
    op = "npu_moe_init_routing_v2"
    refuse_options(op, options, expert_capacity=-1)
    N = require(op, "expert_idx", expert_idx, (torch.int32,), (2,)).numel()
    require(op, "x", x, FLOATS, (2,))
    legal = (active_num <= 0 or active_num == N, quant_mode in (-1, 1), expert_tokens_num_type in (0, 1), row_idx_type in (0, 1))
    if not all(legal):
        raise LoweringError(
            f"{op}: active_num {active_num}, quant_mode {quant_mode}, expert_tokens_num_type {expert_tokens_num_type}, row_idx_type "
            f"{row_idx_type}; legal is {N}, -1 or 1, 0 or 1, 0 or 1"
        )
    first, last = active_expert_range or (0, expert_num)
    flat = expert_idx.flatten().long()
    order = torch.where((flat >= first) & (flat < last), flat, expert_num + last).argsort(stable=True)
    sizes = torch.bincount(flat[(flat >= first) & (flat < last)] - first, minlength=last - first)
    order = order[: int(sizes.sum())]
    token = order // expert_idx.shape[1]
    rows, scales = _routed(op, x[token], token, flat[order] - first, scale, quant_mode, last - first)
    expanded, carried = undefined(N, x.shape[1], dtype=rows.dtype), undefined(N, dtype=torch.float32)
    expanded[: len(order)], carried[: len(order)] = rows, scales
    index = torch.full((N,), -1, dtype=torch.int32)
    if row_idx_type == 0:
        index[order] = torch.arange(len(order), dtype=torch.int32)
    else:
        index[: len(order)] = order.int()
    if not expert_tokens_num_flag:
        sizes = undefined(dtype=torch.int64)
    return expanded, index, sizes.cumsum(0) if expert_tokens_num_flag and expert_tokens_num_type == 0 else sizes, carried


def _routed(
    op: str, rows: torch.Tensor, token: torch.Tensor, expert: torch.Tensor, scale: torch.Tensor | None, quant_mode: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if quant_mode == -1:
        return rows, undefined(len(rows), dtype=torch.float32) if scale is None else scale[token].float()
    wide = rows.float()
    if scale is not None:
        if scale.shape not in ((1, rows.shape[1]), (experts, rows.shape[1])):
            raise LoweringError(f"{op}: scale is {tuple(scale.shape)}; legal is [1 or {experts}, {rows.shape[1]}]")
        wide = wide * scale.float().expand(experts, -1)[expert]
    return quantise_rows(wide)


def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """out[t] = skip1 + skip2 + sum over x of scales[t, x] * (rows[map[t * X + x]] + bias[expert[t, x]]), summed in float32.

    Args:
        expanded_permuted_rows: [T*X, M]; modes 1 and 3: [E, C, M], read as [E*C, M].
        scales: [T, X] in the rows' dtype or f32, or None for ones (then X is k).
        expanded_src_to_dst_row: int32 [T*X]; modes 1 and 3 also take -1, which stands for a row of zeros.
        drop_pad_mode: 2 or 3; 0 and 1 are the same with map[x * T + t].
    """
    op = "npu_moe_finalize_routing"
    padded = drop_pad_mode in (1, 3)
    rows = require(op, "expanded_permuted_rows", expanded_permuted_rows, FLOATS, (3,) if padded else (2,)).flatten(0, -2)
    index = require(op, "expanded_src_to_dst_row", expanded_src_to_dst_row, (torch.int32,), (1,)).long()
    if drop_pad_mode not in range(4):
        raise LoweringError(f"{op}: drop_pad_mode is {drop_pad_mode}; legal is 0 to 3")
    X = (k or 1) if scales is None else require(op, "scales", scales, (rows.dtype, torch.float32), (2,)).shape[1]
    lowest = -1 if padded else 0
    if index.numel() and not lowest <= int(index.min()) <= int(index.max()) < rows.shape[0]:
        raise LoweringError(f"{op}: row indices from {int(index.min())} to {int(index.max())}; legal is {lowest} to {rows.shape[0] - 1}")
    choices = index.view(-1, X) if drop_pad_mode in (2, 3) else index.view(X, -1).t()
    parts = torch.where(choices[..., None] < 0, 0.0, rows[choices].float())
    if bias is not None:
        parts = parts + bias[require(op, "export_for_source_row", export_for_source_row, (torch.int32,), (2,)).long()].float()
    if scales is not None:
        require_shape(op, "scales", scales, choices.shape)
        parts = parts * scales.float()[..., None]
    out = parts.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.float()
    return out.to(rows.dtype)


def _routed_rows(op: Node, types: Mapping[str, Any], ranks: int) -> work.Rows:
    choices, experts = types[op.input[1]].elements, op.attributes["expert_num"]
    first, last = op.attributes.get("active_expert_range") or (0, experts)
    if last - first == experts and ranks > 1:
        return work.Rows(choices, choices * ranks, experts // ranks, experts)
    return work.Rows(choices * (last - first) / experts, choices, last - first, experts)


def _finalize_routing(call: Call) -> Results:
    return npu_moe_finalize_routing(
        call.tensor("expanded_x"),
        call.optional("x1"),
        call.optional("x2"),
        call.optional("bias"),
        call.optional("scales"),
        call.tensor("expanded_row_idx"),
        call.optional("expert_idx"),
        call.attr("drop_pad_mode", 0),
        call.attr("k", 1),
    )


OPERATORS = (
    NpuOperator(
        ("MoeGatingTopK",),
        torch=(TorchForm("npu.npu_moe_gating_top_k.default", npu_moe_gating_top_k, values=values.experts),),
        run=form(
            npu_moe_gating_top_k,
            "x",
            "bias",
            attributes={
                "k": None,
                "k_group": 1,
                "group_count": 1,
                "group_select_mode": 0,
                "renorm": 0,
                "norm_type": 0,
                "out_flag": False,
                "routed_scaling_factor": 1.0,
                "eps": 1e-20,
            },
        ),
        widens=True,
    ),
    NpuOperator(
        ("MoeGatingTopKSoftmaxV2",),
        torch=(TorchForm("npu.npu_moe_gating_top_k_softmax_v2.default", npu_moe_gating_top_k_softmax_v2, values=values.experts),),
        run=form(
            npu_moe_gating_top_k_softmax_v2,
            "x",
            "finished",
            attributes={"k": None, "renorm": 0, "output_softmax_result_flag=output_softmax": False},
        ),
        widens=True,
        trial=trials.Trial(7, "gating", distinct=True),
    ),
    NpuOperator(
        ("MoeInitRoutingV3",),
        torch=(
            TorchForm(
                "npu.npu_moe_init_routing_v2.default",
                npu_moe_init_routing_v2,
                values=values.routed,
                index=values.Index("expert_idx", lambda arguments: arguments["expert_num"]),
            ),
        ),
        run=form(
            npu_moe_init_routing_v2,
            "x expert_idx",
            "scale",
            attributes={
                "active_num": -1,
                "expert_num": -1,
                "expert_tokens_num_type": 0,
                "expert_tokens_num_flag": False,
                "quant_mode": -1,
                "active_expert_range": None,
                "row_idx_type": 0,
            },
            legal={"expert_capacity": -1, "drop_pad_mode": 0},
        ),
        widens=True,
        routed=_routed_rows,
        trial=trials.Trial(8, "expert-exchange", indices={"expert_idx": trials.experts}, corners=trials.expert_corners),
        gives_tokens=TokenList(2, "expert_tokens_num_type", SUMS),
    ),
    NpuOperator(
        ("MoeFinalizeRoutingV2",),
        torch=(
            TorchForm(
                "npu.npu_moe_finalize_routing.default",
                npu_moe_finalize_routing,
                index=values.Index("expanded_src_to_dst_row", values.rows("scales", None), least=-1),
            ),
        ),
        run=_finalize_routing,
        widens=True,
        trial=trials.Trial(9, "expert-exchange", indices={"expanded_row_idx": trials.routed_rows}),
    ),
)
