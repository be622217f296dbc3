"""torchair converters for aten operators that torchair converts into more launches than the operator needs, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...graphs.errors import LoweringError
from . import packages
from .operators.table import IN_PLACE, VIEWS
from .toolchain.harness import Torchair

Convert = Callable[..., Any]
_MARK = "_npucompile"
_DT_BOOL, _DT_INT64 = 12, 9
_REDUCED = (0, 1, 2, 4, 27)
"""Numbers of the dtypes that maxima and minima are taken in."""
_HALVES = (1, 27)
"""Numbers of float16 and bfloat16 in GE."""


def register(ta: Torchair) -> None:
    """Makes torchair convert the operators of this file with its converters; a second call changes nothing."""
    packages.declare()
    aten: Any = torch.ops.aten
    for op, converter in (
        (aten.bmm.default, _bmm),
        (aten.clone.default, _clone),
        (aten.mul.Tensor, _mul),
        (aten.softplus.default, _softplus),
        (aten.amax.default, _reduction("ReduceMax")),
        (aten.amin.default, _reduction("ReduceMin")),
        (torch.ops._C_ascend.npu_recurrent_gated_delta_rule.default, _recurrent_gated_delta_rule),
    ):
        earlier = _converter_of(op)
        if not getattr(earlier, _MARK, False):
            ta.register_converter(op)(converter(ta, earlier))
            setattr(_converter_of(op), _MARK, True)


def _converter_of(op: Any) -> Any:
    # torchair's attribute, read directly: its look-up function caches for ever that an op had no converter.
    return getattr(op, "_ge_converter", None)


def _clone(ta: Torchair, earlier: Convert | None) -> Convert:
    """GE's tensors are contiguous and, but for pools, never written: a copy of one is the tensor itself.

    torchair's Identity is a launch. It stays for what lies in an operand's memory, which an operator may write before the copy is read.
    """
    graph = ta.torchair.ge._ge_graph

    def convert(x: Any, *, memory_format: Any = None, meta_outputs: Any = None) -> Any:
        return ta.ge.Identity(x) if _in_an_operand(x.tensor, graph.get_default_ge_graph().op) else x

    return convert


def _in_an_operand(tensor: str, ops: Any) -> bool:
    """Whether a tensor may lie in the memory of an operand: it is one, a view of one, or its value after an update in place."""
    name, _, port = tensor.rpartition(":")
    producer = next(op for op in reversed(ops) if op.name == name)
    if producer.type in VIEWS:
        return _in_an_operand(producer.input[0], ops)
    return producer.type == "Data" or int(port) in IN_PLACE.get(producer.type, {})


def _bmm(ta: Torchair, earlier: Convert | None) -> Convert:
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


def _mul(ta: Torchair, earlier: Convert | None) -> Convert:
    """torchair casts every product to the dtype that it has already, because its operator Mul states none."""
    promote = ta.torchair._ge_concrete_graph.utils.dtype_promote

    def convert(x: Any, other: Any, meta_outputs: Any = None) -> Any:
        if meta_outputs.dtype == _DT_BOOL:
            raise LoweringError("aten.mul of bools has no converter; legal are numbers, and `&` of bools")
        if isinstance(other, int | float) and x.dtype in _HALVES:
            # Muls takes the factor in float32, as torch does; a constant operand would round it to the dtype of x.
            return ta.ge.Muls(x, value=other)
        return ta.ge.Mul(*promote(x, other, target_dtype=meta_outputs.dtype))

    return convert


def _softplus(ta: Torchair, earlier: Convert | None) -> Convert:
    """torchair has the operator and no converter."""

    def convert(x: Any, beta: float = 1, threshold: float = 20, meta_outputs: Any = None) -> Any:
        return ta.ge.SoftplusV2(x, beta=float(beta), threshold=float(threshold))

    return convert


def _reduction(kind: str) -> Callable[[Torchair, Convert | None], Convert]:
    """torchair has the operators, and converts neither `amax` nor `amin`.

    ReduceMax and ReduceMin take float16, bfloat16, float32, int8 and uint8 (their definitions in the reduce_ops.h of CANN's operator
    prototypes); integers of other sizes are refused here, since GE would compute them on the host's CPU cores of the device.
    """

    def made(ta: Torchair, earlier: Convert | None) -> Convert:
        def convert(x: Any, dim: Any = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
            if x.dtype not in _REDUCED:
                raise LoweringError(
                    f"{kind} takes GE's dtype number {x.dtype}; legal are {_REDUCED}: float32, float16, int8, uint8, bfloat16"
                )
            dims = [dim] if isinstance(dim, int) else list(dim) or list(range(x.rank))
            return getattr(ta.ge, kind)(x, ta.ge.Const(dims, dtype=_DT_INT64), keep_dims=keepdim)

        return convert

    return made


def _recurrent_gated_delta_rule(ta: Torchair, earlier: Convert | None) -> Convert:
    """vllm-ascend's operator has the type of CANN's in GE, and stands in for it wherever the package is installed.

    Source: vllm-project/vllm-ascend@182b75e csrc/attention/recurrent_gated_delta_rule/op_host/recurrent_gated_delta_rule_def.cpp.
    """

    def convert(query: Any, key: Any, value: Any, state: Any, *, beta: Any = None, scale: float | None = None, **rest: Any) -> Any:
        rest.pop("meta_outputs", None)
        lengths, slots = rest.pop("actual_seq_lengths"), rest.pop("ssm_state_indices")
        return ta.ge.RecurrentGatedDeltaRule(query, key, value, beta, state, lengths, slots, scale=scale, **rest)[0]

    return convert
