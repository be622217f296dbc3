"""CPU kernels of the NPU's operators that choose each token's experts.

Semantics: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu).
"""

from __future__ import annotations

from typing import Any

import torch

from ....graphs.errors import LoweringError
from .kernels_common import FLOATS, refuse_options, require, require_shape, undefined


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
