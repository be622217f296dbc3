"""Turns int8 rows grouped by expert into the outputs of experts with int8 or int4 weights."""

import torch

from ..primitive import Cost, Primitive
from ..quantise import bits_scale, quantise_rows, unpack_w4
from .grouped_experts import Expert, each_group, every_group, experts_cost
from .quant_linear import product

grouped_experts_w8a8 = Primitive(
    "grouped_experts_w8a8",
    "(Tensor rows, Tensor row_scale, Tensor counts, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "ScalarType dtype) -> Tensor",
    factors="_ _, _, _, _ _ _, _ _, _ _ _, _ _ -> _ _",
)

grouped_experts_w4a8 = Primitive(
    "grouped_experts_w4a8",
    "(Tensor rows, Tensor row_scale, Tensor counts, Tensor gate_up, Tensor gate_up_scale, Tensor gate_up_assist, Tensor down, "
    "Tensor down_scale, Tensor down_assist, ScalarType dtype) -> Tensor",
    factors="_ _, _, _, _ _ _, _ _ _, _ _, _ _ _, _ _ _, _ _ -> _ _",
)

GROUPS = {"split_item": 2, "group_type": 0, "group_list_type": 1}
"""How a grouped product is called: one result, groups of rows, a count for each."""


def _expert(gate_up: torch.Tensor, gate_up_scale: torch.Tensor, down: torch.Tensor, down_scale: torch.Tensor, dtype: torch.dtype) -> Expert:
    """Experts of weights [E, M, 2F] and [E, F, M], int8 or packed int4, with scales [E, 2F] and [E, M] f32."""

    def weight(packed: torch.Tensor) -> torch.Tensor:
        return unpack_w4(packed) if packed.dtype == torch.int32 else packed

    def expert(e: int, rows: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
        gate, up = (product(rows, weight(gate_up[e])) * gate_up_scale[e] * row_scale[:, None]).chunk(2, -1)
        hidden, hidden_scale = quantise_rows(torch.nn.functional.silu(gate) * up)
        return (product(hidden, weight(down[e])) * down_scale[e] * hidden_scale[:, None]).to(dtype)

    return expert


@grouped_experts_w8a8.abstract
def _w8a8_abstract(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=dtype, device=rows.device)


@grouped_experts_w8a8.reference
def grouped_experts_w8a8_reference(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(silu(gate) * up)` of each row in f32, rounded to int8 by rows again, then down; products of integers are exact.

    Args:
        rows: [R, M] int8, the first counts[0] of expert 0, then counts[1] of expert 1, ...
        row_scale: [R] f32.
        counts: [E] int64, at most R together.
        gate_up: [E, M, 2F] int8, gate then up.
        gate_up_scale: [E, 2F] f32.
        down: [E, F, M] int8.
        down_scale: [E, M] f32.
        dtype: of the result; bfloat16 on Ascend.

    Returns:
        [R, M]; from the sum of counts on unspecified, here zero.
    """
    expert = _expert(gate_up, gate_up_scale, down, down_scale, dtype)
    return each_group(expert, counts, rows.shape[1], dtype, rows, row_scale)


@grouped_experts_w8a8.lowering("inductor")
def grouped_experts_w8a8_static(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Every expert on every row."""
    expert = _expert(gate_up, gate_up_scale, down, down_scale, dtype)
    return every_group(expert, counts, rows.shape[1], dtype, rows, row_scale)


@grouped_experts_w8a8.lowering("ge")
def grouped_experts_w8a8_ge(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Two kernels: grouped product with activation and rounding, and grouped product."""
    npu = torch.ops.npu
    hidden, hidden_scale = npu.npu_grouped_matmul_swiglu_quant_v2(rows, [gate_up], [gate_up_scale], row_scale, counts, group_list_type=1)
    out: torch.Tensor = npu.npu_grouped_matmul(
        [hidden], [down], scale=[down_scale], per_token_scale=[hidden_scale], group_list=counts, output_dtype=dtype, **GROUPS
    )[0]
    return out


@grouped_experts_w8a8.cost
def _w8a8_cost(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    dtype: torch.dtype,
) -> Cost:
    return experts_cost(rows, rows.numel() * dtype.itemsize, [gate_up, gate_up_scale, down, down_scale], row_scale, counts)


@grouped_experts_w4a8.abstract
def _w4a8_abstract(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_assist: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_assist: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty(rows.shape, dtype=dtype, device=rows.device)


@grouped_experts_w4a8.reference
def grouped_experts_w4a8_reference(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_assist: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_assist: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `grouped_experts_w8a8`, with weights and scales as `graphs.quantise.quantise_w4` gives them.

    Args:
        rows: [R, M] int8, the first counts[0] of expert 0, then counts[1] of expert 1, ...
        row_scale: [R] f32.
        counts: [E] int64, at most R together.
        gate_up: [E, M, 2F/8] int32, gate then up.
        gate_up_scale: [E, 1, 2F] int64.
        gate_up_assist: [E, 2F] f32; follows from weight and scale, and only kernels read it.
        down: [E, F, M/8] int32.
        down_scale: [E, 1, M] int64.
        down_assist: [E, M] f32; as above.
        dtype: of the result; bfloat16 on Ascend.

    Returns:
        [R, M]; from the sum of counts on unspecified, here zero.
    """
    expert = _expert(gate_up, bits_scale(gate_up_scale), down, bits_scale(down_scale), dtype)
    return each_group(expert, counts, rows.shape[1], dtype, rows, row_scale)


@grouped_experts_w4a8.lowering("inductor")
def grouped_experts_w4a8_static(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_assist: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_assist: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Every expert on every row."""
    expert = _expert(gate_up, bits_scale(gate_up_scale), down, bits_scale(down_scale), dtype)
    return every_group(expert, counts, rows.shape[1], dtype, rows, row_scale)


@grouped_experts_w4a8.lowering("ge")
def grouped_experts_w4a8_ge(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_assist: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_assist: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Two kernels; the first wants one scale a channel without the group axis, the second wants the axis."""
    npu = torch.ops.npu
    # The int4 kernels take the int8 rows apart in place: nothing else may read what moe_sort or moe_dispatch gave.
    hidden, hidden_scale = npu.npu_grouped_matmul_swiglu_quant_v2(
        rows,
        [gate_up],
        [gate_up_scale.flatten(1)],
        row_scale,
        counts,
        weight_assist_matrix=[gate_up_assist],
        group_list_type=1,
    )
    out: torch.Tensor = npu.npu_grouped_matmul(
        [hidden],
        [down],
        bias=[down_assist],
        scale=[down_scale],
        per_token_scale=[hidden_scale],
        group_list=counts,
        output_dtype=dtype,
        **GROUPS,
    )[0]
    return out


@grouped_experts_w4a8.cost
def _w4a8_cost(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_assist: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_assist: torch.Tensor,
    dtype: torch.dtype,
) -> Cost:
    weights = [gate_up, gate_up_scale, gate_up_assist, down, down_scale, down_assist]
    return experts_cost(rows, rows.numel() * dtype.itemsize, weights, row_scale, counts)
