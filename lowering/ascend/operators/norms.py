"""Norms of rows.

Semantics of the kernels: the operator documentation of Ascend/op-plugin (docs/zh/custom_APIs/torch_npu). Everything is computed in
float32 and rounded once, to the dtype of the activations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from . import work
from .call import Call, Results, form
from .checks import FLOATS, refuse_options, require, require_shape, to_int8, undefined
from .record import NpuOperator, TorchForm


def _normed(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    over = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(over, keepdim=True) + epsilon)
    return wide * rstd * gamma.float(), rstd


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., M] and gamma [M] -> y like x, and rstd f32 [..., 1]."""
    require_shape("npu_rms_norm", "gamma", gamma, x.shape[x.dim() - gamma.dim() :])
    y, rstd = _normed(require("npu_rms_norm", "input", x, FLOATS), gamma, epsilon)
    return y.to(x.dtype), rstd


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x1, x2 [..., M] -> y of the sum, rstd f32 [..., 1], and the sum rounded to their dtype."""
    total = _sum("npu_add_rms_norm", x1, x2)
    y, rstd = npu_rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _sum(op: str, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    require(op, "x2", x2, (require(op, "x1", x1, FLOATS).dtype,))
    require_shape(op, "x2", x2, x1.shape)
    return x1 + x2


def npu_add_rms_norm_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x1, x2 [..., M] -> int8 y1 [..., M], y2 by the second scales (undefined without them), and the sum.

    The norm is quantised from float32; scales and zero points have the shape of gamma (norm/add_rms_norm_quant of hicann/ops-nn).
    """
    op = "npu_add_rms_norm_quant"
    if axis != -1:
        raise LoweringError(f"{op}: axis={axis} has no CPU kernel; legal is -1")
    refuse_options(op, {"dst_type": dst_type})
    total = _sum(op, x1, x2)
    require_shape(op, "gamma", gamma, x1.shape[x1.dim() - gamma.dim() :])
    wide, _ = _normed(total, gamma, epsilon)
    wide = wide if beta is None else wide + beta.float()

    def quantised(scales: torch.Tensor | None, zero_points: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            return undefined(*x1.shape, dtype=torch.int8)
        require_shape(op, "scales", scales, gamma.shape)
        scaled = wide / scales.float() if div_mode else wide * scales.float()
        return to_int8(scaled if zero_points is None else scaled + zero_points.float())

    return quantised(scales1, zero_points1), quantised(scales2, zero_points2), total


def native_layer_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D] with weight and bias [D] of its dtype -> y like x, and means and reciprocal deviations f32 [..., 1]."""
    op = "native_layer_norm"
    require_shape(op, "normalized_shape", torch.empty(tuple(normalized_shape)), x.shape[-1:])
    for name, each in (("weight", weight), ("bias", bias)):
        require_shape(op, name, require(op, name, each, (x.dtype,)), x.shape[-1:])
    wide = require(op, "input", x, FLOATS).float()
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.float() + bias.float()  # type: ignore[union-attr]
    return y.to(x.dtype), mean, rstd


def _convert_layer_norm(ta: Any, earlier: Any) -> Any:
    """LayerNormV3, as aclnnLayerNorm has it; torchair takes LayerNormV4.

    Since CANN 9.0 that one has a kernel for rows of 1,024 and 4,096 of bfloat16 alone, and for some shorter than 64 (hicann/ops-nn@e5c3fa9
    norm/layer_norm_v4/op_host: IsCapable of layer_norm_v4_single_read_tiling.cpp and layer_norm_v4_transpose_tiling.cpp).
    """

    def convert(x: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float, meta_outputs: Any = None) -> Any:
        axis = x.rank - 1
        return ta.ge.LayerNormV3(x, weight, bias, begin_norm_axis=axis, begin_params_axis=axis, epsilon=eps)

    return convert


def _layer_norm(call: Call) -> Results:
    x = call.tensor("x")
    call.expect(begin_norm_axis=x.dim() - 1, begin_params_axis=x.dim() - 1)
    return native_layer_norm(x, x.shape[-1:], call.tensor("gamma"), call.tensor("beta"), call.attr("epsilon"))


OPERATORS = (
    NpuOperator(
        ("RmsNorm",),
        torch=(TorchForm("npu.npu_rms_norm.default", npu_rms_norm),),
        run=form(npu_rms_norm, "x gamma", attributes={"epsilon": 1e-6}),
        widens=True,
        time=work.KernelTime(3.5e-6, 2.4),
        work=functools.partial(work.generic, passes=6.0),
    ),
    NpuOperator(
        ("AddRmsNorm",),
        torch=(TorchForm("npu.npu_add_rms_norm.default", npu_add_rms_norm),),
        run=form(npu_add_rms_norm, "x1 x2 gamma", attributes={"epsilon": 1e-6}),
        widens=True,
        time=work.KernelTime(4e-6, 1.5),
        work=functools.partial(work.generic, passes=6.0),
    ),
    # torchair has no converter for it: captured graphs alone may have it.
    NpuOperator(
        acl=("AddRmsNormQuant",),
        torch=(TorchForm("npu.npu_add_rms_norm_quant.default", npu_add_rms_norm_quant),),
        work=functools.partial(work.generic, passes=6.0),
    ),
    NpuOperator(
        ("LayerNormV3",),
        torch=(TorchForm("aten.native_layer_norm.default", native_layer_norm),),
        converters={"aten.native_layer_norm.default": _convert_layer_norm},
        run=_layer_norm,
        widens=True,
        time=work.KernelTime(1e-5, 4.1),
        work=functools.partial(work.generic, passes=8.0),
    ),
)
