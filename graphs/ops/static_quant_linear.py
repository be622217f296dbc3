"""Product with one int8 weight matrix, of activations that are rounded by one scale and offset."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native_ops import Native, Packed
from ..primitive import Cost, Primitive, nbytes
from .quant_linear import product


class StaticQuantLinear(NamedTuple):
    """Operands of `static_quant_linear`."""

    x: Tensor  # [T, K]
    weight: Tensor  # [K, N] int8
    scale: Tensor  # [N] f32, the weight's times the activations'
    bias: Tensor  # [N] int32, in units of `scale`: minus the offset times the sums of the weight's columns, and the layer's bias
    input_scale: Tensor  # [1] f32
    input_offset: Tensor  # [1] f32, an integer in [-128, 127]


static_quant_linear = Primitive("static_quant_linear", StaticQuantLinear, factors="t _, _ n, n, n, _, _ -> t n", like="x")


@static_quant_linear.reference
def static_quant_linear_reference(args: StaticQuantLinear) -> Tensor:
    """`(round(x / input_scale + input_offset) @ weight + bias) * scale` (ir/w8a8_static.py of Ascend/msmodelslim, 3de0a3c).

    The reciprocal of the scale is in x's dtype, as kernels take it (methods/w8a8_static.py of vllm-project/vllm-ascend, 182b75e).

    Returns:
        [T, N], dtype of x.
    """
    x, weight, scale, bias, input_scale, input_offset = args
    rows = torch.round(x.float() * input_scale.reciprocal().to(x.dtype).float() + input_offset).clamp(-128, 127).to(torch.int8)
    return ((product(rows, weight) + bias) * scale).to(x.dtype)


_panels = Native(
    "npuc_static_quant_linear",
    static_quant_linear.schema,
    static_quant_linear.rule("abstract"),
    Packed((1,), "int8", static_quant_linear.rule("reference")),
).op


@static_quant_linear.lowering("inductor")
def static_quant_linear_on_cpu(args: StaticQuantLinear) -> Any:
    """The same numbers by integer arithmetic, with weights that were packed when they were loaded (lowering/cpp/linear_int8.cpp)."""
    floats = {args.scale.dtype, args.input_scale.dtype, args.input_offset.dtype}
    if args.x.dtype in (torch.bfloat16, torch.float32) and floats == {torch.float32} and args.bias.dtype == torch.int32:
        return _panels(*args)
    return static_quant_linear_reference(args)


@static_quant_linear.lowering("npu")
def _npu(args: StaticQuantLinear) -> Tensor:
    """One rounding kernel and one matrix product; the reciprocal is of a weight, and taken when it is loaded.

    The rounding kernel takes int8 and qint8 for the same; for qint8 torchair would declare a result that no product takes.
    """
    x, weight, scale, bias, input_scale, input_offset = args
    npu = torch.ops.npu
    rows = npu.npu_quantize(x, input_scale.reciprocal().to(x.dtype), input_offset.to(x.dtype), torch.int8, -1, False)
    out: Tensor = npu.npu_quant_matmul(rows, weight, scale, bias=bias, output_dtype=x.dtype)
    return out


@static_quant_linear.cost
def _cost(args: StaticQuantLinear) -> Cost:
    x, weight, *_ = args
    return Cost(2 * x.shape[0] * weight.numel(), nbytes(*args), x.shape[0] * weight.shape[1] * x.dtype.itemsize)
