"""torchair converters for experts' operators: types, attributes and an order that torchair's own converters do not write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graphs import ordering
from .toolchain.harness import Torchair

Convert = Callable[..., Any]
_MARK = "_npucompile"
_AFTER = "_npucompile_after"
"""Attribute of a tensor: the control edge that the operator which communicates it gets."""


def register(ta: Torchair) -> None:
    """Makes torchair convert the operators of this file with its converters; a second call changes nothing."""
    npu = torch.ops.npu
    op: Any
    for op, converter in (
        (npu.npu_moe_gating_top_k_softmax_v2.default, _gating),
        (npu.npu_grouped_matmul_swiglu_quant_v2.default, _swiglu_quant),
        (npu.npu_grouped_matmul.default, _grouped_matmul),
        (npu.npu_moe_distribute_dispatch_v2.default, _dispatch),
        (getattr(torch.ops, ordering.NAMESPACE).after.default, _after),
    ):
        # torchair loads an operator's own converter when it is first asked for, and would replace one that is registered earlier.
        earlier = ta.find_converter(op)
        if not getattr(earlier, _MARK, False):
            ta.register_converter(op)(converter(ta, earlier))
            setattr(op._ge_converter, _MARK, True)


def _gating(ta: Torchair, earlier: Any) -> Convert:
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


def _swiglu_quant(ta: Torchair, earlier: Any) -> Convert:
    """torchair's own one gives the operator int32 words; its definition has int4."""

    def convert(x: Any, weight: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return earlier(x, [_as_int4(ta, each) for each in weight], *args, **kwargs)

    return convert


def _as_int4(ta: Torchair, weight: Any) -> Any:
    """Eight int4 of an int32 word, as GroupedMatmul's converter in torchair writes it for CANN 8.5 and later."""
    types = ta.torchair.ge._ge_graph.DataType
    return ta.ge.Bitcast(weight, type=types.DT_INT4, keep_dim=True) if weight.dtype == types.DT_INT32 else weight


def _grouped_matmul(ta: Torchair, earlier: Any) -> Convert:
    """torchair writes an absent bias as empty int32 for all int8 weights; beside f32 scales and a bfloat16 result the definition has
    bfloat16 (the last column of grouped_matmul_def.cpp of hicann/ops-transformer, 8.5.0.alpha001)."""
    types = ta.torchair.ge._ge_graph.DataType

    def convert(x: Any, weight: Any, *, bias: Any = None, scale: Any = None, output_dtype: Any = None, **kwargs: Any) -> Any:
        if not bias and scale and weight[0].dtype == types.DT_INT8 and scale[0].dtype == types.DT_FLOAT:
            bias = [ta.ge.Fill([0], ta.ge.Cast(0.0, dst_type=types.DT_BF16))]
        return earlier(x, weight, bias=bias, scale=scale, output_dtype=output_dtype, **kwargs)

    return convert


def _after(ta: Torchair, earlier: Any) -> Convert:
    """No operator: the tensor, which remembers what must come first."""

    def convert(x: Any, first: Any, meta_outputs: Any = None) -> Any:
        ordered = copy.copy(x)
        setattr(ordered, _AFTER, first.controller)
        return ordered

    return convert


def _dispatch(ta: Torchair, earlier: Any) -> Convert:
    """GE orders operators by data alone, so what the tensor remembers becomes an edge."""

    def convert(x: Any, *args: Any, **kwargs: Any) -> Any:
        results = earlier(x, *args, **kwargs)
        if (edge := getattr(x, _AFTER, None)) is not None:
            results[0].node.input.append(edge)
        return results

    return convert
