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
    x: torch.Tensor, *, k: int = 1, renorm: int | None = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> y [T, X] like x, int32 expert ids [T, X], and nothing; renorm 1 takes the softmax of the k largest alone.

    Of equal logits the lower expert wins.
    Restrictions: moe_gating_top_k_softmax_v2_tiling_base.cpp of hicann/ops-transformer, 8.5.0.alpha001.
    """
    op = "npu_moe_gating_top_k_softmax_v2"
    refuse_options(op, options)
    logits = require(op, "x", x, FLOATS, (2,)).float()
    if renorm not in (0, 1) or not 0 < k <= min(1024, x.shape[1]):
        raise LoweringError(f"{op}: renorm {renorm}, k {k} of {x.shape[1]} experts; legal are 0 or 1, and 1 to 1024 of them")
    ids = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
    y = logits.gather(1, ids).softmax(-1) if renorm else logits.softmax(-1).gather(1, ids)
    return y.to(x.dtype), ids.int(), torch.empty(0)


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> y [T, X] like x, int32 expert ids [T, X], undefined f32 [T, E]; of equal scores the lower expert wins.

    Scores are sigmoids. Experts are chosen by scores plus bias [E]; y is of the scores alone, and sums to routed_scaling_factor.
    Restrictions: moe_gating_top_k_tiling.cpp of hicann/ops-transformer, 8.5.0.alpha001.

    Args:
        k_group: groups of adjacent experts, of `group_count`, that a token can choose from: those with the largest sums of two.
        group_select_mode, norm_type: 1, two experts and sigmoids.
    """
    op = "npu_moe_gating_top_k"
    refuse_options(op, options)
    logits = require(op, "x", x, FLOATS, (2,)).float()
    if (group_select_mode, norm_type) != (1, 1):
        raise LoweringError(f"{op}: group_select_mode {group_select_mode}, norm_type {norm_type}; legal are 1 and 1")
    _check_groups(op, logits.shape[1], k, k_group, group_count)
    scores = logits.sigmoid()
    chosen = scores
    if bias is not None:
        require_shape(op, "bias", require(op, "bias", bias, (x.dtype,), (1,)), (logits.shape[1],))
        chosen = scores + bias.float()
    if k_group < group_count:
        groups = chosen.unflatten(1, (group_count, -1))
        left_out = groups.topk(2).values.sum(-1).argsort(dim=-1, descending=True, stable=True)[:, k_group:]
        chosen = groups.scatter(1, left_out[..., None].expand(-1, -1, groups.shape[2]), -torch.inf).flatten(1)
    ids = chosen.argsort(dim=-1, descending=True, stable=True)[:, :k]
    y = scores.gather(1, ids)
    y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), ids.int(), undefined(*scores.shape, dtype=torch.float32)


def _check_groups(op: str, experts: int, k: int, k_group: int, group_count: int) -> None:
    each = experts // group_count if group_count > 0 else 0
    legal = experts <= 2048 and 0 < k_group <= group_count and each * group_count == experts and each > 1
    if k_group < group_count:
        # A group is padded to whole blocks of 32 experts.
        legal = legal and group_count * (-(-each // 32) * 32) <= 2048
    if not legal or not 0 < k <= k_group * each:
        raise LoweringError(
            f"{op}: k {k} of {k_group} of {group_count} groups of {experts} experts; legal are up to 2048 experts in groups of equal size, "
            "two at least, which hold as many as are chosen"
        )


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x [T, M] sorted by expert, those of experts outside active_expert_range left out.

    Args:
        x: [T, M].
        expert_idx: int32 [T, X].
        quant_mode: -1 copies, 1 quantises each row to int8.

    Returns:
        rows [T*X, M], int32 [T*X] result row of each (token, choice), -1 for one left out, int64 tokens of each active expert, f32 scales
        [T*X]; rows beyond the active ones are undefined, and so are scales without quantisation.
    """
    op = "npu_moe_init_routing_v2"
    refuse_options(op, options, expert_capacity=-1)
    N = require(op, "expert_idx", expert_idx, (torch.int32,), (2,)).numel()
    require(op, "x", x, FLOATS, (2,))
    counted = (expert_tokens_num_type, expert_tokens_num_flag) == (1, True)
    if not (active_num <= 0 or active_num == N) or quant_mode not in (-1, 1) or not counted:
        raise LoweringError(
            f"{op}: active_num {active_num}, quant_mode {quant_mode}, expert_tokens_num_type {expert_tokens_num_type}, "
            f"expert_tokens_num_flag {expert_tokens_num_flag}; legal is {N}, -1 or 1, 1 (counts), and True"
        )
    first, last = active_expert_range or (0, expert_num)
    flat = expert_idx.flatten().long()
    active = (flat >= first) & (flat < last)
    sizes = torch.bincount(flat[active] - first, minlength=last - first)
    order = torch.where(active, flat, expert_num + last).argsort(stable=True)[: int(sizes.sum())]
    rows, scales = x[order // expert_idx.shape[1]], undefined(len(order), dtype=torch.float32)
    if quant_mode == 1:
        rows, scales = quantise_rows(rows.float())
    expanded, carried = undefined(N, x.shape[1], dtype=rows.dtype), undefined(N, dtype=torch.float32)
    expanded[: len(order)], carried[: len(order)] = rows, scales
    index = torch.full((N,), -1, dtype=torch.int32)
    index[order] = torch.arange(len(order), dtype=torch.int32)
    return expanded, index, sizes, carried


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
    """out[t] = sum over x of scales[t, x] * rows[map[t * X + x]], summed in float32.

    Args:
        expanded_permuted_rows: [E, C, M], read as [E*C, M].
        scales: [T, X] in the rows' dtype or f32.
        expanded_src_to_dst_row: int32 [T*X]; -1 stands for a row of zeros.
        drop_pad_mode: 3; others read the map in another order, or have no -1.
    """
    op = "npu_moe_finalize_routing"
    refuse_options(op, {"skip1": skip1, "skip2": skip2, "bias": bias, "export_for_source_row": export_for_source_row})
    if drop_pad_mode != 3:
        raise LoweringError(f"{op}: drop_pad_mode is {drop_pad_mode}; legal is 3")
    rows = require(op, "expanded_permuted_rows", expanded_permuted_rows, FLOATS, (3,)).flatten(0, 1)
    index = require(op, "expanded_src_to_dst_row", expanded_src_to_dst_row, (torch.int32,), (1,)).long()
    weights = require(op, "scales", scales, (rows.dtype, torch.float32), (2,))
    if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < rows.shape[0]:
        raise LoweringError(f"{op}: row indices from {int(index.min())} to {int(index.max())}; legal is -1 to {rows.shape[0] - 1}")
    choices = index.view(-1, weights.shape[1])
    require_shape(op, "scales", weights, choices.shape)
    parts = torch.where(choices[..., None] < 0, 0.0, rows[choices].float())
    return (parts * weights.float()[..., None]).sum(1).to(rows.dtype)


def _convert_gating(ta: Any, earlier: Any) -> Any:
    """torchair's own one emits MoeGatingTopKSoftmax, which has no `renorm`, and its MoeGatingTopKSoftmaxV2 cannot be called.

    Names as in moe_gating_top_k_softmax_v2_def.cpp of hicann/ops-transformer, 8.5.0.alpha001.
    """
    ir = ta.torchair._ge_concrete_graph.compat_ir
    attr, kind = ta.torchair.ge.attr, "MoeGatingTopKSoftmaxV2"
    floats = "DT_FLOAT, DT_FLOAT16, DT_BF16"
    definition = (
        ir.IrDef(kind)
        .input("x", floats)
        .optional_input("finished", "DT_BOOL")
        .required_attr("k", attr.Int)
        .attr("renorm", attr.Int(0))
        .attr("output_softmax_result_flag", attr.Bool(False))
        .output("y", floats)
        .output("expert_idx", "DT_INT32")
        .output("softmax_result", "DT_FLOAT")
    )

    def convert(
        x: Any, *, k: int = 1, finished: Any = None, renorm: int = 0, output_softmax: bool = False, meta_outputs: Any = None
    ) -> Any:
        return ir.ge_op(
            op_type=kind,
            inputs={"x": x, "finished": finished},
            attrs={"k": attr.Int(k), "renorm": attr.Int(renorm), "output_softmax_result_flag": attr.Bool(output_softmax)},
            outputs=["y", "expert_idx", "softmax_result"],
            ir=definition,
        )

    return convert


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
        time=work.KernelTime(5e-6, 28.0),
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
        converters={"npu.npu_moe_gating_top_k_softmax_v2.default": _convert_gating},
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
