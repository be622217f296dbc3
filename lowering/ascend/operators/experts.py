"""Grouped products of experts and their activations.

Semantics: the operator documentation and tests of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu, test/test_custom_ops).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import work
from .call import Call, Int4, Results
from .checks import (
    FLOATS,
    dtype_of,
    float_scale,
    group_bounds,
    int_matmul,
    quantise_rows,
    refuse_options,
    require,
    require_shape,
    signed,
    undefined,
    unpack_int4,
)
from .node import Node
from .product_rules import as_many_tensors, groups_of_weights, int4_beside_floats, one_number_an_expert
from .record import COUNTS, SUMS, NpuOperator, TokenList, TorchForm
from .trials import Trial, group_corners, groups


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

    bf16 (x and weight of one dtype); w8a8 (int8 both, scale [E, N], per_token_scale f32 [M]; or neither and int32 results); w4a8 (weight
    int32 [E, K, N/8], scale int64 or uint64 [E, N] or [E, groups, N], bias f32 [E, N], which is 8 * sum over K of weight * scale), which
    destroys its x, as the device does: x is undefined afterwards; w4a16 (weight as for w4a8; antiquant_scale and antiquant_offset of x's
    dtype, [E, N] or [E, groups, N]): `(weight + offset) * scale` is rounded to x's dtype.
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
    refuse_options(op, {"bias": bias, "scale": scale, "per_token_scale": per_token_scale})
    y = undefined(rows.shape[0], w.shape[2], dtype=torch.float32)
    for e, (low, high) in enumerate(bounds):
        y[low:high] = rows[low:high].float() @ w[e].float()
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
    assist = require(op, "bias", bias, (torch.float32,)).double() if packed else None
    if assist is None:
        refuse_options(op, {"bias": bias})
    else:
        require_shape(op, "bias", assist, (E, N))
    y = undefined(x.shape[0], N, dtype=torch.float64)
    for e, (low, high) in enumerate(bounds):
        few = x[low:high]
        part = int_matmul(few, w[e]) * wide[e, 0] if assist is None else _packed_product(few, w[e], wide[e], assist[e])
        y[low:high] = part * rows[low:high, None]
    return y


def _packed_product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, assist: torch.Tensor) -> torch.Tensor:
    """x [M, K] = 16 * high + low + 8 with both in -8..7, so x @ w is two int4 products and 8 * sum(w), which the assist holds.

    scale is [groups, N], each of K / groups inputs.
    """
    high = x.double().div(16).floor()
    low = x.double() - 16 * high - 8
    split, parts = w.double().unflatten(0, (scale.shape[0], -1)), x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for i, weight in enumerate(split):
        at = slice(i * weight.shape[0], (i + 1) * weight.shape[0])
        parts = parts + (16 * (high[:, at] @ weight) + low[:, at] @ weight) * scale[i]
    return parts + assist


def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_scale: list[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    weight_assist_matrix: list[torch.Tensor] | None = None,
    group_list_type: int | None = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped product, swiglu and int8 rows in one, with no rounding in between: int8 [M, F] and f32 [M].

    x int8 [M, K]; weight int8 [E, K, 2F] or packed int4 int32 [E, K, 2F/8] with its assist f32 [E, 2F]; weight_scale [E, 2F];
    x_scale f32 [M]. silu is on the first half. Rows beyond the groups are undefined; so is all of x after a packed product.
    """
    op = "npu_grouped_matmul_swiglu_quant_v2"
    refuse_options(op, options, dequant_dtype=6, quant_dtype=1)
    scales = (torch.float32, torch.int64, torch.uint64)
    w, scale = _single(op, weight), require(op, "weight_scale", _single(op, weight_scale), scales, (2,))
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


_INT8 = 2
"""Number of int8 in GE's attributes."""
# Attribute `dtype` of a grouped product numbers dtypes in a way of its own.
_PRODUCT_DTYPES: Mapping[int, torch.dtype | None] = {-1: None, 0: torch.float16, 1: torch.bfloat16, 2: torch.int32}


def _weight(call: Call) -> torch.Tensor:
    """Stacked weights; int4 as the int32 words that hold it, which operators take as int4 alone."""
    value = call.value("weight0")
    if isinstance(value, Int4):
        return value.packed
    if (weight := call.tensor("weight0")).dtype == torch.int32:
        raise LoweringError(f"{call.op}: weight0 is {tuple(weight.shape)} int32; legal is its Bitcast to int4")
    return weight


def _scale(call: Call, slot: str) -> torch.Tensor:
    """The scale of stacked weights, for the kernels; int4 has bits of f32 in uint64."""
    scale = call.tensor(slot)
    if scale.dtype == torch.int64:
        raise LoweringError(f"{call.op}: {slot} is {tuple(scale.shape)} int64; legal is uint64 beside int4 weights")
    return signed(scale)


def _grouped_matmul(call: Call) -> Results:
    call.expect(transpose_weight=False, transpose_x=False, act_type=0)
    call.ignore("tuning_config")
    if call.single("offset") is not None:
        raise LoweringError(f"{call.op} has offset, which the interpreter does not know; legal is to leave it out")
    number = call.attr("dtype", 0)
    if number not in _PRODUCT_DTYPES:
        raise LoweringError(f"{call.op}: attribute dtype is {number}; legal are {sorted(_PRODUCT_DTYPES)}")
    bias, scale, rows = call.single("bias"), _scale(call, "scale0"), call.optional("per_token_scale")
    antiquant = {slot: call.single(slot) for slot in ("antiquant_scale", "antiquant_offset")}
    (y,) = npu_grouped_matmul(
        [call.tensor("x0")],
        [_weight(call)],
        bias=None if bias is None else [bias],
        scale=[scale] if scale.numel() else None,
        per_token_scale=None if rows is None else [rows],
        **{slot: [tensor] for slot, tensor in antiquant.items() if tensor is not None},
        group_list=call.optional("group_list"),
        split_item=call.attr("split_item", 0),
        group_type=call.attr("group_type", -1),
        group_list_type=call.attr("group_list_type", 0),
        output_dtype=_PRODUCT_DTYPES[number],
    )
    return y


def _grouped_matmul_swiglu_quant(call: Call) -> Results:
    call.expect(quant_mode=0, quant_dtype=_INT8, transpose_weight=False, dequant_mode=0)
    # The CPU kernel rounds once, at the end, whatever type the device has for the product before that.
    call.ignore("dequant_dtype", "tuning_config")
    assist = call.single("weight_assist_matrix")
    return npu_grouped_matmul_swiglu_quant_v2(
        call.tensor("x"),
        [_weight(call)],
        [_scale(call, "weight_scale0")],
        call.tensor("x_scale"),
        call.tensor("group_list"),
        weight_assist_matrix=None if assist is None else [assist],
        group_list_type=call.attr("group_list_type", 0),
    )


def _dequant_swiglu_quant(call: Call) -> Results:
    call.expect(quant_mode="dynamic", dst_type=_INT8, round_mode="rint", activate_dim=-1, swiglu_mode=0)
    # These belong to another swiglu_mode.
    call.ignore("clamp_limit", "glu_alpha", "glu_bias")
    return npu_dequant_swiglu_quant(
        call.tensor("x"),
        weight_scale=call.optional("weight_scale"),
        activation_scale=call.optional("activation_scale"),
        group_index=call.optional("group_index"),
        activate_left=call.attr("activate_left", False),
        quant_mode=1,
    )


def _convert_swiglu_quant(ta: Any, earlier: Any) -> Any:
    """torchair's own one gives the operator int32 words; its definition has int4, and GroupedMatmul's converter writes it so."""
    types = ta.torchair.ge._ge_graph.DataType

    def as_int4(weight: Any) -> Any:
        return ta.ge.Bitcast(weight, type=types.DT_INT4, keep_dim=True) if weight.dtype == types.DT_INT32 else weight

    def convert(x: Any, weight: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return earlier(x, [as_int4(each) for each in weight], *args, **kwargs)

    return convert


def _convert_grouped_matmul(ta: Any, earlier: Any) -> Any:
    """torchair writes an absent bias as empty int32 for all int8 weights; beside f32 scales and a bfloat16 result the definition has
    bfloat16 (the last column of grouped_matmul_def.cpp of hicann/ops-transformer, 8.5.0.alpha001)."""
    types = ta.torchair.ge._ge_graph.DataType

    def convert(x: Any, weight: Any, *, bias: Any = None, scale: Any = None, output_dtype: Any = None, **kwargs: Any) -> Any:
        if not bias and scale and weight[0].dtype == types.DT_INT8 and scale[0].dtype == types.DT_FLOAT:
            bias = [ta.ge.Fill([0], ta.ge.Cast(0.0, dst_type=types.DT_BF16))]
        return earlier(x, weight, bias=bias, scale=scale, output_dtype=output_dtype, **kwargs)

    return convert


def _grouped_work(op: Node, facts: work.Facts) -> work.Work:
    """Products of the rows that are there, by the experts that have any; the busiest rank decides."""
    x, stored = facts.types[op.input[0]], facts.types[op.tensor("weight0")]
    groups = op.tensor("group_list")
    told, rows = work.busiest_rows(groups, x.shape[0], stored.shape[0], facts)
    read = work.experts_read(told, facts.expert_skew)
    columns = stored.elements * (8 if stored.dtype == "i32" else 1) / stored.shape[0] / x.shape[-1]
    sizes = work.whole_tensors(facts, op.reads) | work.whole_tensors(facts, work.results_of(op, facts))
    per_expert = {tensor for tensor in op.reads[1:] if facts.types[tensor].shape[:1] == stored.shape[:1] and tensor != groups}
    share = rows / max(x.shape[0], 1)
    for tensor in sizes:
        if tensor in per_expert:
            sizes[tensor] *= read / stored.shape[0]
        elif facts.types[tensor].shape[:1] == x.shape[:1]:
            sizes[tensor] *= share
    # Each expert's rows fill tiles of their own.
    ops = 2.0 * max(rows, read * work.MATRIX_ROWS / 2) * columns * x.shape[-1]
    moved = work.bytes_moved(facts, sizes)
    return replace(moved, int8_ops=ops) if x.dtype in ("i8", "i4") else replace(moved, bf16_ops=ops)


def _activation_work(op: Node, facts: work.Facts) -> work.Work:
    """An activation that is told its groups does the rows that are there."""
    whole, padded = work.generic(op, facts, passes=6.0), facts.types[op.input[0]].shape[0]
    groups = op.find("group_index")
    if not groups:
        return whole
    share = work.busiest_rows(groups, padded, facts.types[groups].shape[0], facts)[1] / max(padded, 1)
    scaled = {name: share * getattr(whole, name) for name in ("hbm_bytes", "cache_bytes", "vector_ops")}
    return replace(whole, **scaled)


_FLOAT = 1
"""Number of float32 in GE's messages."""


def _scaled_in_float32(op: Any) -> bool:
    """Grouped products of int8 whose scale is float32 (grouped_matmul_def.cpp of hicann/ops-transformer, 8.5.0.alpha001)."""
    return any(desc.name == "scale0" and desc.dtype == _FLOAT for desc in op.input_desc)


def _always(op: Any) -> bool:
    return True


_TRIAL = Trial(wrong="grouped-products", refused="grouped-products", indices={"group_list": groups}, corners=group_corners)
_GROUP_LIST = TokenList("group_list", "group_list_type", SUMS)

OPERATORS = (
    NpuOperator(
        ("GroupedMatmul",),
        torch=(TorchForm("npu.npu_grouped_matmul.default", npu_grouped_matmul, weights=((1, "weight"),)),),
        converters={"npu.npu_grouped_matmul.default": _convert_grouped_matmul},
        run=_grouped_matmul,
        widens=True,
        work=_grouped_work,
        weight="weight",
        only_nz=_scaled_in_float32,
        trial=replace(_TRIAL, order=4),
        takes_tokens=_GROUP_LIST,
        rules=(groups_of_weights, int4_beside_floats, as_many_tensors, one_number_an_expert),
    ),
    NpuOperator(
        # Weights in NZ alone: documentation of aclnnGroupedMatmulSwigluQuantV2 in Ascend/op-plugin.
        ("GroupedMatmulSwigluQuantV2",),
        torch=(
            TorchForm(
                "npu.npu_grouped_matmul_swiglu_quant_v2.default",
                npu_grouped_matmul_swiglu_quant_v2,
                weights=((1, "weight"),),
                only_nz=torch.int8,
            ),
        ),
        converters={"npu.npu_grouped_matmul_swiglu_quant_v2.default": _convert_swiglu_quant},
        run=_grouped_matmul_swiglu_quant,
        widens=True,
        work=_grouped_work,
        weight="weight",
        only_nz=_always,
        trial=replace(_TRIAL, order=5),
        takes_tokens=_GROUP_LIST,
        rules=(groups_of_weights, as_many_tensors, one_number_an_expert),
    ),
    NpuOperator(
        ("DequantSwigluQuant",),
        torch=(TorchForm("npu.npu_dequant_swiglu_quant.default", npu_dequant_swiglu_quant),),
        run=_dequant_swiglu_quant,
        widens=True,
        work=_activation_work,
        trial=Trial(6, "int8"),
        takes_tokens=TokenList("group_index", "", COUNTS),
    ),
)
