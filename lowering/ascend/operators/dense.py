"""Quantising, activations, rotations and dense matrix products.

Semantics of the kernels: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu). Everything is computed in
float32 or wider and rounded once, to the dtype of the activations.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ....graphs.quantise import unpack_w4
from . import type_rules, work
from .call import Call, Function, Results, form, same_dtype
from .checks import (
    FLOATS,
    dtype_of,
    float_scale,
    int_matmul,
    quantise_rows,
    refuse_options,
    require,
    require_shape,
    signed,
)
from .product_rules import int4_groups, transposed_product
from .record import NpuOperator, TorchForm
from .trials import Trial


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """[..., 2F] -> [..., F]: silu of the first half times the second."""
    gate, up = require("npu_swiglu", "input", x, FLOATS).float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def npu_rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", **options: Any) -> torch.Tensor:
    """x [B, Q, H, D] (or another order of four) with cos r1, sin r2 of the same rank, broadcast -> x * cos + (-x2, x1) * sin."""
    op = "npu_rotary_mul"
    refuse_options(op, options | {"rotary_mode": rotary_mode}, rotary_mode="half")
    for name, angle in (("r1", r1), ("r2", r2)):
        require(op, name, angle, FLOATS, (x.dim(),))
        require_shape(op, name, angle, [a if a == 1 else b for a, b in zip(angle.shape, x.shape, strict=True)])
    wide = require(op, "input", x, FLOATS, (4,)).float()
    first, second = wide.chunk(2, -1)
    return (wide * r1.float() + torch.cat((-second, first), -1) * r2.float()).to(x.dtype)


def mm(x: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """x [T, K] and mat2 [K, N] -> [T, N]: `npu_linear` with the weight transposed."""
    return npu_linear(x, mat2.t())


def bmm(x: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """x [B, T, K] by mat2 [B, K, N] -> [B, T, N], summed in float32: torch sums 16-bit types in an order that depends on strides."""
    require("bmm", "mat2", mat2, (require("bmm", "self", x, FLOATS, (3,)).dtype,), (3,))
    require_shape("bmm", "mat2", mat2, (x.shape[0], x.shape[2], mat2.shape[2]))
    return (x.float() @ mat2.float()).to(x.dtype)


def npu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] by weight [N, K] -> [T, N], summed in float32."""
    require("npu_linear", "weight", weight, (require("npu_linear", "input", x, FLOATS, (2,)).dtype,), (2,))
    require_shape("npu_linear", "weight", weight, (weight.shape[0], x.shape[1]))
    y = x.float() @ weight.float().t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def npu_dynamic_quant(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> int8 [..., K] and f32 [...]: t = max|x| / 127 a row, round to nearest even; a zero row has t = 0."""
    refuse_options("npu_dynamic_quant", options, dst_type=1, quant_mode="pertoken")
    return quantise_rows(require("npu_dynamic_quant", "input", x, FLOATS).float())


def npu_quantize(
    x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, dtype: torch.dtype | int, axis: int = 1, div_mode: bool = True
) -> torch.Tensor:
    """x [..., K] -> int8: `round(x * scales + zero_points)`, half to even; scales and zero points [1] or [K], of x's dtype (AscendQuantV2).

    Raises:
        LoweringError: also for division by scales, which another operator does.
    """
    op = "npu_quantize"
    if axis not in (-1, x.dim() - 1):
        raise LoweringError(f"{op}: axis={axis} of {x.dim()} dimensions has no CPU kernel; legal is the last")
    refuse_options(op, {"dtype": dtype_of(op, dtype)}, dtype=torch.int8)
    if div_mode:
        raise LoweringError(f"{op}: div_mode=True has no CPU kernel; legal is False")
    wide = require(op, "input", x, FLOATS).float()
    for name, each in (("scales", scales), ("zero_points", zero_points)):
        if each is not None and require(op, name, each, (x.dtype,), (1,)).shape != (1,):
            require_shape(op, name, each, x.shape[-1:])
    wide = wide * scales.float()
    return torch.round(wide if zero_points is None else wide + zero_points.float()).clamp(-128, 127).to(torch.int8)


def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    **options: Any,
) -> torch.Tensor:
    """x [M, K] by int4 [K, N], eight in an int32 [K, N/8], times scales [groups, N] or [N] of x's dtype -> [M, N] of x's dtype.

    The weight is made a number of x's dtype before the product.
    """
    op = "npu_weight_quant_batchmatmul"
    given = {"antiquant_offset": antiquant_offset, "quant_scale": quant_scale, "quant_offset": quant_offset, "bias": bias}
    refuse_options(op, options | given)
    require(op, "x", x, FLOATS, (2,))
    values = unpack_w4(require(op, "weight", weight, (torch.int32,), (2,)))
    require_shape(op, "weight", values, (x.shape[1], values.shape[1]))
    K, size = x.shape[1], antiquant_group_size or x.shape[1]
    scale = require(op, "antiquant_scale", antiquant_scale, (x.dtype,), (1, 2)).reshape(-1, values.shape[1])
    require_shape(op, "antiquant_scale", scale, (-(-K // size), values.shape[1]))
    floats = values.to(x.dtype) * scale.repeat_interleave(size, 0)[:K]
    return (x.float() @ floats.float()).to(x.dtype)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """int8 [M, K] by int8 [K, N], scale [N] or [1], pertoken_scale f32 [M] -> [M, N] of output_dtype.

    A bias int32 [N] is added before the scales; one of floats behind them, where there is a pertoken_scale.

    Raises:
        LoweringError: also without output_dtype: the operator would then give int8.
    """
    op = "npu_quant_matmul"
    refuse_options(op, options)
    require(op, "x1", x1, (torch.int8,), (2,))
    require(op, "x2", x2, (torch.int8,), (2,))
    require_shape(op, "x2", x2, (x1.shape[1], x2.shape[1]))
    if scale.shape != (1,):
        require_shape(op, "scale", scale, x2.shape[1:])
    total = int_matmul(x1, x2)
    if bias is not None:
        require(op, "bias", bias, (torch.int32, *(FLOATS if pertoken_scale is not None else ())), (1,))
        require_shape(op, "bias", bias, x2.shape[1:])
    added = 0.0 if bias is None else bias.double()
    behind = bias is not None and bias.is_floating_point()
    y = (total if behind else total + added) * float_scale(scale).double()
    if pertoken_scale is not None:
        require_shape(op, "pertoken_scale", require(op, "pertoken_scale", pertoken_scale, (torch.float32,)), x1.shape[:1])
        y = y * pertoken_scale.double()[:, None]
    return (y + added if behind else y).to(dtype_of(op, output_dtype))


_INT8 = 2
"""Number of int8 in GE's attributes."""


def _mat_mul(first: str, second: str, dims: int | None) -> Function:
    """`x1` by `x2`, summed in float32; the attributes `first` and `second` say which of them is transposed."""

    def run(call: Call) -> Results:
        call.ignore("offset_x", "enable_hf32")
        x1, x2, bias = call.tensor("x1"), call.tensor("x2"), call.optional("bias")
        same_dtype(call, x1=x1, x2=x2)
        if not x1.is_floating_point() or (dims and (x1.dim(), x2.dim()) != (dims, dims)):
            raise LoweringError(
                f"{call.op} takes {tuple(x1.shape)} {x1.dtype} by {tuple(x2.shape)}; legal are {dims or 'any'} dimensions, floats"
            )
        a = x1.mT if call.attr(first, False) else x1
        b = x2.mT if call.attr(second, False) else x2
        y = a.float() @ b.float()
        return (y if bias is None else y + bias.float()).to(x1.dtype)

    return run


def _convert_bmm(ta: Any, earlier: Any) -> Any:
    """A product reads a transposed operand as it is, by an attribute; torchair transposes it first.

    The Transpose that nobody reads then is left out of the body (convert.py).
    """
    graph, promote = ta.torchair.ge._ge_graph, ta.torchair._ge_concrete_graph.utils.dtype_promote

    def convert(x: Any, other: Any, meta_outputs: Any = None) -> Any:
        ops = graph.get_default_ge_graph().op
        first, second = (_transposed(operand, ops) for operand in (x, other))
        x, other = promote(x, other, target_dtype=meta_outputs.dtype)
        product = ta.ge.BatchMatMul(x, other, adj_x1=first is not None, adj_x2=second is not None)
        for position, source in enumerate((first, second)):
            if source is not None:
                product.node.input[position] = source
        return product

    return convert


def _transposed(x: Any, ops: Any) -> str | None:
    """The tensor whose last two of three dimensions x is with swapped; None where x is no such thing."""
    if x.node.type != "Transpose":
        return None
    order = next(op for op in reversed(ops) if op.name == x.node.input[1].rpartition(":")[0])
    values = order.attr["_readable_value"].s.decode().strip("[]").split(",")
    return x.node.input[0] if order.type == "Const" and [int(value) for value in values] == [0, 2, 1] else None


def _static_quant(call: Call) -> Results:
    call.expect(dst_type=_INT8, axis=-1, round_mode="round", sqrt_mode=False)
    return npu_quantize(call.tensor("x"), call.tensor("scale"), call.optional("offset"), torch.int8, -1, False)


def _quant_matmul(call: Call) -> Results:
    call.expect(group_size=0)
    x1, x2 = call.tensor("x1"), call.tensor("x2")
    return npu_quant_matmul(
        x1.mT if call.attr("transpose_x1", False) else x1,
        x2.mT if call.attr("transpose_x2", False) else x2,
        signed(call.tensor("scale")),
        pertoken_scale=call.optional("pertoken_scale"),
        bias=call.optional("bias"),
        output_dtype=call.dtype("dtype"),
    )


def _weight_quant_matmul(call: Call) -> Results:
    call.expect(transpose_x=False, transpose_weight=False, inner_precise=0, dtype=-1)
    if unknown := [slot for slot in ("antiquant_offset", "quant_scale", "quant_offset", "bias") if call.optional(slot) is not None]:
        raise LoweringError(f"{call.op}: {', '.join(unknown)} are given and have no CPU kernel; legal is to leave them out")
    scale, size = call.tensor("antiquant_scale"), call.attr("antiquant_group_size", 0)
    return npu_weight_quant_batchmatmul(call.tensor("x"), call.tensor("weight"), scale, antiquant_group_size=size)


OPERATORS = (
    NpuOperator(
        ("SwiGlu",),
        torch=(TorchForm("npu.npu_swiglu.default", npu_swiglu),),
        run=form(npu_swiglu, "x", attributes={"dim": -1}),
        widens=True,
        time=work.KernelTime(4e-6, 1.8),
        work=functools.partial(work.generic, passes=6.0),
        trial=Trial(wrong="int8"),
    ),
    NpuOperator(
        ("RotaryMul",),
        torch=(TorchForm("npu.npu_rotary_mul.default", npu_rotary_mul),),
        run=form(npu_rotary_mul, "x r1 r2"),
        widens=True,
        trial=Trial(wrong="partial-rotary"),
    ),
    NpuOperator(
        ("DynamicQuant",),
        torch=(TorchForm("npu.npu_dynamic_quant.default", npu_dynamic_quant),),
        run=form(npu_dynamic_quant, "x", legal={"dst_type": _INT8}),
        widens=True,
        time=work.KernelTime(5e-6, 2.2),
        work=functools.partial(work.generic, passes=6.0),
        trial=Trial(11, "int8"),
    ),
    NpuOperator(
        ("AscendQuantV2",),
        torch=(TorchForm("npu.npu_quantize.default", npu_quantize),),
        run=_static_quant,
        widens=True,
        time=work.KernelTime(8e-6, 1.6),
        work=functools.partial(work.generic, passes=4.0),
    ),
    NpuOperator(
        ("QuantBatchMatmulV3",),
        torch=(TorchForm("npu.npu_quant_matmul.default", npu_quant_matmul, weights=((1, "x2"),)),),
        run=_quant_matmul,
        widens=True,
        time=work.KernelTime(1.2e-5, 1.15),
        work=work.product,
        weight="x2",
        trial=Trial(10, "int8"),
    ),
    NpuOperator(
        ("WeightQuantBatchMatmulV2",),
        torch=(TorchForm("npu.npu_weight_quant_batchmatmul.default", npu_weight_quant_batchmatmul),),
        run=_weight_quant_matmul,
        widens=True,
        work=work.product,
        rules=(int4_groups,),
    ),
    NpuOperator(
        ("MatMul", "MatMulV2", "MatMulV3"),
        acl=("aclnnMatmulWeightNz", "aclnnMm"),
        torch=(
            TorchForm("aten.mm.default", mm, weights=((1, "mat2"),), takes_transposed=True),
            TorchForm("npu.npu_linear.default", npu_linear),
        ),
        run=_mat_mul("transpose_x1", "transpose_x2", 2),
        types=type_rules.product,
        time=work.KernelTime(7e-6),
        work=work.product,
        weight="x2",
    ),
    NpuOperator(
        ("BatchMatMul", "BatchMatMulV2"),
        torch=(TorchForm("aten.bmm.default", bmm),),
        converters={"aten.bmm.default": _convert_bmm},
        run=_mat_mul("adj_x1", "adj_x2", None),
        types=functools.partial(type_rules.product, first="adj_x1", second="adj_x2"),
        time=work.KernelTime(7e-6),
        work=functools.partial(work.product, transposed="adj_x1"),
        trial=Trial(layer="delta-rule-prefill"),
    ),
    NpuOperator(acl=("aclnnBatchMatMul",), work=work.product),
    # No lowering emits it; a report of a device is about it.
    NpuOperator(("TransposeBatchMatMul",), work=work.product, time=work.KernelTime(7e-6), rules=(transposed_product,)),
)
