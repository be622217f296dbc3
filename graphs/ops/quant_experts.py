"""Experts with int8 or int4 weights, over int8 rows grouped by expert."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive
from ..quantise import bits_scale, quantise_rows, unpack_w4
from .grouped_experts import each_group, every_group, experts_cost
from .quant_linear import grouped_product, product


class ExpertsW8A8(NamedTuple):
    """Operands of `grouped_experts_w8a8`."""

    rows: Tensor  # [R, M] int8, the first counts[0] of expert 0, then counts[1] of expert 1, ...
    row_scale: Tensor  # [R] f32
    counts: Tensor  # [E] int64, at most R in sum
    gate_up: Tensor  # [E, M, 2F] int8, gate then up
    gate_up_scale: Tensor  # [E, 2F] f32
    down: Tensor  # [E, F, M] int8
    down_scale: Tensor  # [E, M] f32
    dtype: torch.dtype  # of the result; bfloat16 on Ascend


class ExpertsW4A8(NamedTuple):
    """Operands of `grouped_experts_w4a8`, with weights and scales as `graphs.quantise.quantise_w4` gives them."""

    rows: Tensor  # [R, M] int8, the first counts[0] of expert 0, then counts[1] of expert 1, ...
    row_scale: Tensor  # [R] f32
    counts: Tensor  # [E] int64, at most R in sum
    gate_up: Tensor  # [E, M, 2F/8] int32, gate then up
    gate_up_scale: Tensor  # [E, groups of M, 2F] int64
    gate_up_assist: Tensor  # [E, 2F] f32; follows from weight and scale, and only kernels read it
    down: Tensor  # [E, F, M/8] int32
    down_scale: Tensor  # [E, groups of F, M] int64
    down_assist: Tensor  # [E, M] f32; as above
    dtype: torch.dtype  # of the result; bfloat16 on Ascend


grouped_experts_w8a8 = Primitive("grouped_experts_w8a8", ExpertsW8A8, factors="_ _, _, _, _ _ _, _ _, _ _ _, _ _ -> _ _")

grouped_experts_w4a8 = Primitive("grouped_experts_w4a8", ExpertsW4A8, factors="_ _, _, _, _ _ _, _ _ _, _ _, _ _ _, _ _ _, _ _ -> _ _")

GROUPS = {"split_item": 2, "group_type": 0, "group_list_type": 1}
"""Options of a grouped product: one result, groups of rows, a count for each."""

# Types and formats of the kernels below: grouped_matmul_def.cpp of hicann/ops-transformer (8.5.0.alpha001), dequant_swiglu_quant_def.cpp
# of hicann/ops-nn (e5c3fa9), grouped_matmul_swiglu_quant_v2_def.cpp of vllm-project/vllm-ascend (182b75e). CANN 8.5 has the first two.
FUSED = ("cann>=9.0",)
"""Where the product, the activation and the rounding are one kernel."""


def _run(runner: Callable[..., Tensor], args: ExpertsW8A8) -> Tensor:
    """The experts by `each_group` or `every_group`; weights may also be packed int4."""
    rows, row_scale, counts, gate_up, gate_up_scale, down, down_scale, dtype = args

    def expert(e: int, rows: Tensor, row_scale: Tensor) -> Tensor:
        gate, up = (_scaled(rows, gate_up[e], gate_up_scale[e]) * row_scale[:, None]).chunk(2, -1)
        hidden, hidden_scale = quantise_rows(torch.nn.functional.silu(gate) * up)
        return (_scaled(hidden, down[e], down_scale[e]) * hidden_scale[:, None]).to(dtype)

    return runner(expert, counts, rows.shape[1], dtype, rows, row_scale)


def _scaled(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`rows @ (weight * scale)`, scale [N] or [groups of K, N]; weights may be packed int4."""
    weight = unpack_w4(weight) if weight.dtype == torch.int32 else weight
    return grouped_product(rows, weight, scale) if scale.dim() == 2 else product(rows, weight) * scale


def _abstract(args: ExpertsW8A8 | ExpertsW4A8) -> Tensor:
    return torch.empty(args.rows.shape, dtype=args.dtype, device=args.rows.device)


def _cost(args: ExpertsW8A8 | ExpertsW4A8) -> Cost:
    rows, row_scale, counts, *weights, dtype = args
    return experts_cost(rows, rows.numel() * dtype.itemsize, weights, row_scale, counts)


grouped_experts_w8a8.abstract(_abstract)
grouped_experts_w8a8.cost(_cost)
grouped_experts_w4a8.abstract(_abstract)
grouped_experts_w4a8.cost(_cost)


@grouped_experts_w8a8.reference
def grouped_experts_w8a8_reference(args: ExpertsW8A8) -> Tensor:
    """`(silu(gate) * up)` of each row in f32, rounded to int8 by rows again, then down; products of integers are exact.

    Returns:
        [R, M]; from the sum of counts on unspecified, here zero.
    """
    return _run(each_group, args)


def grouped_experts_w8a8_static(args: ExpertsW8A8) -> Tensor:
    """Every expert on every row."""
    return _run(every_group, args)


def _w8a8(operands: tuple[Any, ...]) -> ExpertsW8A8:
    """The operands of the kernel, whose last one says whether the result is bfloat16 or float32."""
    return ExpertsW8A8._make((*operands[:-1], torch.bfloat16 if operands[-1] else torch.float32))


_panels = Native(
    "npuc_grouped_int8",
    "(Tensor rows, Tensor row_scale, Tensor counts, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, int half)"
    " -> Tensor",
    lambda *operands: _abstract(_w8a8(operands)),
    Packed((3, 5), "int8", lambda *operands: grouped_experts_w8a8_static(_w8a8(operands))),
).op


@grouped_experts_w8a8.lowering("inductor")
def grouped_experts_w8a8_on_cpu(args: ExpertsW8A8) -> Any:
    """Each expert on its own rows, by exact products; those without rows are not read (lowering/cpp/experts_int8.cpp)."""
    scales = {args.row_scale.dtype, args.gate_up_scale.dtype, args.down_scale.dtype}
    if args.dtype in (torch.bfloat16, torch.float32) and scales == {torch.float32}:
        return _panels(*args[:-1], int(args.dtype == torch.bfloat16))
    return grouped_experts_w8a8_static(args)


@grouped_experts_w8a8.lowering("npu")
def grouped_experts_w8a8_ge(args: ExpertsW8A8) -> Tensor:
    """Three kernels: product to int32, scales with activation and rounding, and product."""
    rows, row_scale, counts, gate_up, gate_up_scale, *_ = args
    npu = torch.ops.npu
    total = npu.npu_grouped_matmul([rows], [gate_up], group_list=counts, output_dtype=torch.int32, **GROUPS)[0]
    hidden, hidden_scale = npu.npu_dequant_swiglu_quant(
        total,
        weight_scale=gate_up_scale,
        activation_scale=row_scale.unsqueeze(1),
        group_index=counts,
        activate_left=True,
        quant_mode=1,
    )
    return _down_w8a8(args, hidden, hidden_scale)


@grouped_experts_w8a8.lowering("npu", needs=FUSED)
def grouped_experts_w8a8_fused(args: ExpertsW8A8) -> Tensor:
    """Two kernels: product with activation and rounding, which takes its weight in NZ alone, and product."""
    rows, row_scale, counts, gate_up, gate_up_scale, *_ = args
    fused = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2
    return _down_w8a8(args, *fused(rows, [gate_up], [gate_up_scale], row_scale, counts, group_list_type=1))


def _down_w8a8(args: ExpertsW8A8, hidden: Tensor, hidden_scale: Tensor) -> Tensor:
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [hidden], [args.down], scale=[args.down_scale], per_token_scale=[hidden_scale], group_list=args.counts,
        output_dtype=args.dtype, **GROUPS,
    )[0]  # fmt: skip
    return out


def _with_float_scales(args: ExpertsW4A8) -> ExpertsW8A8:
    gate_up_scale, down_scale = bits_scale(args.gate_up_scale), bits_scale(args.down_scale)
    return ExpertsW8A8(args.rows, args.row_scale, args.counts, args.gate_up, gate_up_scale, args.down, down_scale, args.dtype)


@grouped_experts_w4a8.reference
def grouped_experts_w4a8_reference(args: ExpertsW4A8) -> Tensor:
    """As `grouped_experts_w8a8`, with int4 weights.

    Returns:
        [R, M]; from the sum of counts on unspecified, here zero.
    """
    return _run(each_group, _with_float_scales(args))


@grouped_experts_w4a8.lowering("inductor")
def grouped_experts_w4a8_static(args: ExpertsW4A8) -> Tensor:
    """Every expert on every row."""
    return _run(every_group, _with_float_scales(args))


@grouped_experts_w4a8.lowering("npu")
def grouped_experts_w4a8_ge(args: ExpertsW4A8) -> Tensor:
    """Three kernels: product, activation with rounding, and product."""
    # The int4 kernels take the int8 rows apart in place: nothing else may read what moe_sort or moe_dispatch gave.
    wide = _product_w4a8(args, args.rows, args.row_scale, args.gate_up, args.gate_up_scale, args.gate_up_assist)
    hidden, hidden_scale = torch.ops.npu.npu_dequant_swiglu_quant(wide, group_index=args.counts, activate_left=True, quant_mode=1)
    return _product_w4a8(args, hidden, hidden_scale, args.down, args.down_scale, args.down_assist)


@grouped_experts_w4a8.lowering("npu", needs=FUSED)
def grouped_experts_w4a8_fused(args: ExpertsW4A8) -> Tensor:
    """Two kernels; the first wants one scale a channel without the group axis, the second wants the axis."""
    if args.gate_up_scale.shape[1] > 1:
        return grouped_experts_w4a8_ge(args)
    hidden, hidden_scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        args.rows,
        [args.gate_up],
        [args.gate_up_scale.flatten(1).view(torch.uint64)],
        args.row_scale,
        args.counts,
        weight_assist_matrix=[args.gate_up_assist],
        group_list_type=1,
    )
    return _product_w4a8(args, hidden, hidden_scale, args.down, args.down_scale, args.down_assist)


def _product_w4a8(args: ExpertsW4A8, rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, assist: Tensor) -> Tensor:
    # uint64 is the kernels' own dtype of scales. For int64, torchair adds a cast that would run in every step.
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], bias=[assist], scale=[scale.view(torch.uint64)], per_token_scale=[row_scale], group_list=args.counts,
        output_dtype=args.dtype, **GROUPS,
    )[0]  # fmt: skip
    return out
