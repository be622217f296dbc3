"""CPU kernels of the NPU's expert operators: sorting of tokens by expert and grouped products.

Semantics: the operator documentation and tests of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu, test/test_custom_ops).
"""

from __future__ import annotations

from typing import Any

import torch

from ....graphs.errors import LoweringError
from .kernels_common import (
    FLOATS,
    dtype_of,
    float_scale,
    group_bounds,
    int_matmul,
    quantise_rows,
    refuse_options,
    require,
    require_shape,
    undefined,
    unpack_int4,
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


def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    scale: list[torch.Tensor] | None = None,
    antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: int | torch.dtype | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """One product per expert over its rows: x [M, K] by weight [E, K, N] -> [M, N]; rows beyond the groups are undefined.

    bf16 (x and weight of one dtype, bias [E, N]); w8a8 (int8 both, scale [E, N], per_token_scale f32 [M], int32 bias; or neither scale
    and int32 results); w4a8 (weight int32 [E, K, N/8], scale int64 or uint64 [E, N] or [E, groups, N], bias f32 [E, N], which is
    8 * sum over K of weight * scale). The last form destroys its x, as the device does: x is undefined afterwards. w4a16 (weight as for
    w4a8; antiquant_scale and antiquant_offset of x's dtype, [E, N] or [E, groups, N]): `(weight + offset) * scale` is rounded to x's dtype.
    """
    op = "npu_grouped_matmul"
    refuse_options(op, options)
    operands = [None if tensors is None else _single(op, tensors) for tensors in (x, weight, bias, scale, per_token_scale)]
    if split_item not in (2, 3) or group_type != 0:
        raise LoweringError(f"{op}: split_item {split_item}, group_type {group_type}; legal is 2 or 3, and 0")
    rows = require(op, "x", operands[0], (*FLOATS, torch.int8), (2,))
    w = require(op, "weight", operands[1], (*FLOATS, torch.int8, torch.int32), (3,))
    bounds = group_bounds(op, group_list, group_list_type or 0, w.shape[0], rows.shape[0])
    if rows.dtype != torch.int8 and w.dtype == torch.int32:
        refuse_options(op, {"bias": bias, "scale": scale, "per_token_scale": per_token_scale})
        y = _unrounded_groups(op, rows, w, antiquant_scale, antiquant_offset, bounds)
        return [y.to(rows.dtype if output_dtype is None else dtype_of(op, output_dtype))]
    refuse_options(op, {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset})
    if rows.dtype == torch.int8 and output_dtype in (torch.int32, 3):
        refuse_options(op, {"bias": bias, "scale": scale, "per_token_scale": per_token_scale})
        return [_integer_groups(op, rows, require(op, "weight", w, (torch.int8,)), bounds)]
    if rows.dtype == torch.int8:
        y = _quantised_groups(op, rows, w, operands[3], operands[4], operands[2], bounds)
        if w.dtype == torch.int32:
            rows.fill_(-128)
        return [y.to(dtype_of(op, output_dtype))]
    require(op, "weight", w, (rows.dtype,))
    refuse_options(op, {"scale": scale, "per_token_scale": per_token_scale})
    y = undefined(rows.shape[0], w.shape[2], dtype=torch.float32)
    for e, (low, high) in enumerate(bounds):
        y[low:high] = rows[low:high].float() @ w[e].float() + (0.0 if operands[2] is None else operands[2][e].float())
    return [y.to(rows.dtype if output_dtype is None else dtype_of(op, output_dtype))]


def _single(op: str, tensors: list[torch.Tensor]) -> torch.Tensor | None:
    if len(tensors) > 1:
        raise LoweringError(f"{op}: {len(tensors)} tensors in a list; legal is one, stacked over experts")
    return tensors[0] if tensors else None


def _integer_groups(op: str, x: torch.Tensor, weight: torch.Tensor, bounds: list[tuple[int, int]]) -> torch.Tensor:
    """int8 x [M, K] by int8 [E, K, N] -> int32 [M, N]."""
    require_shape(op, "weight", weight, (weight.shape[0], x.shape[1], weight.shape[2]))
    y = undefined(x.shape[0], weight.shape[2], dtype=torch.int32)
    for e, (low, high) in enumerate(bounds):
        y[low:high] = int_matmul(x[low:high], weight[e]).to(torch.int32)
    return y


def _unrounded_groups(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: list[torch.Tensor] | None,
    offset: list[torch.Tensor] | None,
    bounds: list[tuple[int, int]],
) -> torch.Tensor:
    """x [M, K] of floats by packed int4 [E, K, N/8] -> f32 [M, N]."""
    w = unpack_int4(weight)
    E, K, N = w.shape
    require_shape(op, "weight", w, (E, x.shape[1], N))
    scales = require(op, "antiquant_scale", _single(op, scale or []), (x.dtype,), (2, 3))
    offsets = require(op, "antiquant_offset", _single(op, offset or []), (x.dtype,), (2, 3))
    require_shape(op, "antiquant_offset", offsets, scales.shape)
    scales, offsets = (each[:, None] if each.dim() == 2 else each for each in (scales, offsets))
    if scales.shape != (E, scales.shape[1], N) or not scales.shape[1] or K % scales.shape[1]:
        raise LoweringError(f"{op}: antiquant_scale is {tuple(scales.shape)}; legal is [{E}, groups, {N}] with groups that divide {K}")
    y = undefined(x.shape[0], N, dtype=torch.float32)
    for e, (low, high) in enumerate(bounds):
        groups = w[e].to(x.dtype).unflatten(0, (scales.shape[1], -1))
        y[low:high] = x[low:high].float() @ ((groups + offsets[e, :, None]) * scales[e, :, None]).flatten(0, 1).float()
    return y


def _quantised_groups(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    per_token: torch.Tensor | None,
    bias: torch.Tensor | None,
    bounds: list[tuple[int, int]],
) -> torch.Tensor:
    """int8 x [M, K] by int8 [E, K, N] or packed int4 [E, K, N/8] -> f64 [M, N]."""
    packed = weight.dtype == torch.int32
    w = unpack_int4(weight) if packed else require(op, "weight", weight, (torch.int8,))
    E, N = w.shape[0], w.shape[2]
    require_shape(op, "weight", w, (E, x.shape[1], N))
    legal = (torch.int64, torch.uint64) if packed else (torch.float32, torch.bfloat16)
    wide = float_scale(require(op, "scale", scale, legal, (2, 3) if packed else (2,))).double()
    wide = wide[:, None] if wide.dim() == 2 else wide
    require_shape(op, "scale", wide, (E, wide.shape[1], N))
    rows = require(op, "per_token_scale", per_token, (torch.float32,), (1,)).double()
    require_shape(op, "per_token_scale", rows, x.shape[:1])
    if packed or bias is not None:
        require_shape(op, "bias", require(op, "bias", bias, (torch.float32 if packed else torch.int32,)), (E, N))
    y = undefined(x.shape[0], N, dtype=torch.float64)
    for e, (low, high) in enumerate(bounds):
        added = None if bias is None else bias[e].double()
        part = _packed_product(x[low:high], w[e], wide[e], added) if packed else _product(x[low:high], w[e], wide[e, 0], added)
        y[low:high] = part * rows[low:high, None]
    return y


def _product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    total = int_matmul(x, w)
    return (total if bias is None else total + bias) * scale


def _packed_product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, assist: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] = 16 * high + low + 8 with both in -8..7, so x @ w is two int4 products and 8 * sum(w), which the assist holds.

    scale is [groups, N], each of K / groups inputs.
    """
    high = x.double().div(16).floor()
    low = x.double() - 16 * high - 8
    split, parts = w.double().unflatten(0, (scale.shape[0], -1)), x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for i, weight in enumerate(split):
        at = slice(i * weight.shape[0], (i + 1) * weight.shape[0])
        parts = parts + (16 * (high[:, at] @ weight) + low[:, at] @ weight) * scale[i]
    return parts if assist is None else parts + assist


def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_scale: list[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    weight_assist_matrix: list[torch.Tensor] | None = None,
    dequant_mode: int | None = 0,
    group_list_type: int | None = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped product, swiglu and int8 rows in one, with no rounding in between: int8 [M, F] and f32 [M].

    x int8 [M, K]; weight int8 [E, K, 2F] or packed int4 int32 [E, K, 2F/8] with its assist f32 [E, 2F]; weight_scale [E, 2F]
    (packed: also [E, groups, 2F]); x_scale f32 [M]. silu is on the first half. Rows beyond the groups are undefined; so is
    all of x after a packed product.
    """
    op = "npu_grouped_matmul_swiglu_quant_v2"
    refuse_options(op, options, dequant_dtype=6, quant_dtype=1)
    scales = (torch.float32, torch.int64, torch.uint64)
    w, scale = _single(op, weight), require(op, "weight_scale", _single(op, weight_scale), scales, (2, 3))
    if dequant_mode != int(scale.dim() == 3 and scale.shape[1] > 1):
        raise LoweringError(f"{op}: dequant_mode {dequant_mode}, weight_scale {tuple(scale.shape)}; legal is 1 for input groups, else 0")
    assist = None if weight_assist_matrix is None else _single(op, weight_assist_matrix)
    require(op, "x", x, (torch.int8,), (2,))
    stacked = require(op, "weight", w, (torch.int8, torch.int32), (3,))
    bounds = group_bounds(op, group_list, group_list_type or 0, stacked.shape[0], x.shape[0])
    gate, up = _quantised_groups(op, x, stacked, scale, x_scale, assist, bounds).float().chunk(2, -1)
    if stacked.dtype == torch.int32:
        x.fill_(-128)
    return quantise_rows(torch.nn.functional.silu(gate) * up)


def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """swiglu of the groups' rows [M, 2F] and rounding by rows: int8 [M, F] and f32 [M]; rows beyond the groups are undefined.

    x float as it is; int32 times weight_scale f32 [E, 2F] of its group and activation_scale f32 [M, 1]. silu is on the first half.
    """
    op = "npu_dequant_swiglu_quant"
    refuse_options(op, options, clamp_limit=7.0, glu_alpha=1.702, glu_bias=1.0, dst_type=1, activate_dim=-1)
    if not activate_left or quant_mode != 1:
        raise LoweringError(f"{op}: activate_left {activate_left}, quant_mode {quant_mode}; legal is True, and 1 (by rows)")
    counts = require(op, "group_index", group_index, (torch.int64,), (1,))
    bounds = group_bounds(op, counts, 1, counts.shape[0], require(op, "x", x, (*FLOATS, torch.int32), (2,)).shape[0])
    wide = x.float() if x.dtype != torch.int32 else _dequantised(op, x, weight_scale, activation_scale, bounds)
    if x.dtype != torch.int32:
        refuse_options(op, {"weight_scale": weight_scale, "activation_scale": activation_scale})
    gate, up = wide.chunk(2, -1)
    rows, scale = quantise_rows(torch.nn.functional.silu(gate) * up)
    rows[bounds[-1][1] :], scale[bounds[-1][1] :] = -128, float("nan")
    return rows, scale


def _dequantised(
    op: str, x: torch.Tensor, weight_scale: torch.Tensor | None, row_scale: torch.Tensor | None, bounds: list[tuple[int, int]]
) -> torch.Tensor:
    scale = require(op, "weight_scale", weight_scale, (torch.float32,), (2,))
    require_shape(op, "weight_scale", scale, (len(bounds), x.shape[1]))
    rows = require(op, "activation_scale", row_scale, (torch.float32,), (2,))
    require_shape(op, "activation_scale", rows, (x.shape[0], 1))
    wide = undefined(*x.shape, dtype=torch.float32)
    for e, (low, high) in enumerate(bounds):
        wide[low:high] = (x[low:high].double() * scale[e].double() * rows[low:high].double()).float()
    return wide


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
