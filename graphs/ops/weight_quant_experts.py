"""Experts with int4 weights, over rows grouped by expert that stay what they are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive, nbytes
from ..quantise import unpack_w4
from .grouped_experts import each_group, every_group, experts_cost
from .quant_experts import GROUPS
from .weight_quant_linear import takes_groups


class ExpertsW4A16(NamedTuple):
    """Operands of `grouped_experts_w4a16`."""

    rows: Tensor  # [R, M], the first counts[0] of expert 0, then counts[1] of expert 1, ...
    counts: Tensor  # [E] int64, at most R in sum
    gate_up: Tensor  # [E, M, 2F/8] int32, gate then up, as `graphs.quantise.pack_w4` gives it
    gate_up_scale: Tensor  # [E, groups of M, 2F] f32
    down: Tensor  # [E, F, M/8] int32
    down_scale: Tensor  # [E, groups of F, M] f32


grouped_experts_w4a16 = Primitive("grouped_experts_w4a16", ExpertsW4A16, factors="_ _, _, _ _ _, _ _ _, _ _ _, _ _ _ -> _ _", like="rows")


def _floats(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [K, N] of one expert, each times the scale of its group, in that dtype; scales are in it before."""
    groups = unpack_w4(weight).to(dtype).unflatten(0, (scale.shape[0], -1))
    floats: Tensor = (groups * scale.to(dtype)[:, None]).flatten(0, 1)
    return floats


def _run(runner: Callable[..., Tensor], args: ExpertsW4A16) -> Tensor:
    rows, counts, gate_up, gate_up_scale, down, down_scale = args

    def expert(e: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ _floats(gate_up[e], gate_up_scale[e], rows.dtype)).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ _floats(down[e], down_scale[e], rows.dtype)

    return runner(expert, counts, rows.shape[1], rows.dtype, rows)


@grouped_experts_w4a16.reference
def grouped_experts_w4a16_reference(args: ExpertsW4A16) -> Tensor:
    """As `grouped_experts` of `weight * scale`, which is made a number of the rows' dtype before the products.

    Returns:
        [R, M], dtype of rows; from the sum of counts on unspecified, here zero.
    """
    return _run(each_group, args)


def grouped_experts_w4a16_static(args: ExpertsW4A16) -> Tensor:
    """Every expert on every row."""
    return _run(every_group, args)


_panels = Native(
    "npuc_grouped_int4",
    grouped_experts_w4a16.schema,
    grouped_experts_w4a16.rule("abstract"),
    Packed((2, 4), "int4", lambda *args: grouped_experts_w4a16_static(ExpertsW4A16(*args))),
).op


@grouped_experts_w4a16.lowering("inductor")
def grouped_experts_w4a16_on_cpu(args: ExpertsW4A16) -> Any:
    """Each expert on its own rows, by the products of `weight_quant_linear`; those without rows are not read
    (lowering/cpp/experts_int4.cpp)."""
    rows, _, gate_up, gate_up_scale, down, down_scale = args
    if rows.dtype in (torch.bfloat16, torch.float32) and takes_groups(gate_up, gate_up_scale) and takes_groups(down, down_scale):
        return _panels(*args)
    return grouped_experts_w4a16_static(args)


@grouped_experts_w4a16.lowering("npu")
def grouped_experts_w4a16_ge(args: ExpertsW4A16) -> Tensor:
    """Two grouped products around one activation."""
    hidden = torch.ops.npu.npu_swiglu(_product(args.rows, args.counts, args.gate_up, args.gate_up_scale))
    return _product(hidden, args.counts, args.down, args.down_scale)


def _product(rows: Tensor, counts: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The kernel takes scales in the dtype of the rows, [E, N] where a channel has one, and offsets beside them: here zeros, which are
    a constant, so that all layers share them."""
    each = scale.to(rows.dtype)
    each = each.flatten(0, 1) if scale.shape[1] == 1 else each
    zeros = torch.zeros(each.shape, dtype=rows.dtype, device=rows.device)
    out: Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight], antiquant_scale=[each], antiquant_offset=[zeros], group_list=counts, **GROUPS
    )[0]
    return out


@grouped_experts_w4a16.cost
def _cost(args: ExpertsW4A16) -> Cost:
    rows, counts, *weights = args
    return experts_cost(rows, nbytes(rows), weights, counts)
