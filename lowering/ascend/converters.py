"""Gives torchair the converters of the operators' records, and one for copies."""

from __future__ import annotations

from typing import Any

import torch

from . import packages
from .operators.table import CONVERTERS, IN_PLACE, VIEWS
from .toolchain.harness import Torchair

_MARK = "_npucompile"


def register(ta: Torchair) -> None:
    """Makes torchair convert with the converters of the records; a second call changes nothing."""
    packages.declare()
    for name, converter in {**CONVERTERS, "aten.clone.default": _clone}.items():
        namespace, op_name, overload = name.split(".")
        op: Any = getattr(getattr(getattr(torch.ops, namespace), op_name), overload)
        # torchair loads its converters of `npu` when they are first asked for, and would replace one that is registered earlier. For
        # others its look-up function caches for ever that an op had no converter, so the attribute is read directly.
        earlier = ta.find_converter(op) if namespace == "npu" else getattr(op, "_ge_converter", None)
        if not getattr(earlier, _MARK, False):
            ta.register_converter(op)(converter(ta, earlier))
            setattr(op._ge_converter, _MARK, True)


def _clone(ta: Torchair, earlier: Any) -> Any:
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
