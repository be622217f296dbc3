"""An operator of a graph as the legality rules see it: its name, the types of its inputs and outputs, and its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from ..operators.tensor_type import TensorType

PRIVATE = frozenset(
    {
        *("_input_name_key", "_input_name_value", "_output_name_key", "_output_name_value", "_inputs_all_sym", "_readable_value"),
        *("_is_unfed_optional", "_user_stream_label", "_user_stream_priority", "_super_kernel_scope", "_super_kernel_options"),
        *("_op_aicore_num", "_op_vectorcore_num", "_op_exec_never_timeout", "_enable_inner_parallel", "_fx_tensor_name"),
        "_inference_rule",  # of operators that torchair converts by `ge.custom_op`
    }
)
"""Attributes that torchair and GE know of every operator (torchair of torch_npu 2.13.0: scope/_scope_attr.py, _ge_concrete_graph)."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        name: in its graph.
        type: GE's name of the operator, "GroupedMatmul"; of a torch operator what runs it, which may be an aclnn function.
        inputs: type of each input that is there, by its name; those of a list are numbered ("weight0").
        constants: names of the inputs that are computed from constants alone: known when the graph is compiled.
        outputs: type of each output by its name; one that nobody reads and the graph does not declare is absent.
        attributes: values by name, without those that begin with "_".
        private: names of attributes that begin with "_" and are not among `PRIVATE`.
        called: the torch operator; "" in a GE graph.
        unnamed: arguments of the torch operator that the table has no name for.
        strided: names of the inputs whose elements do not lie side by side in row-major order; a GE graph has none.
    """

    name: str
    type: str
    inputs: Mapping[str, TensorType]
    constants: frozenset[str]
    outputs: Mapping[str, TensorType]
    attributes: Mapping[str, Any]
    private: frozenset[str] = field(default_factory=frozenset)
    called: str = ""
    unnamed: frozenset[str] = frozenset()
    strided: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """What a message calls it: "npu.npu_linear.default by aclnnMm" in a graph of torch operators."""
        return f"{self.called} by {self.type}" if self.called else self.type

    def describe(self) -> str:
        """Inputs with their types, as in `x=i8[4,16], weight0=i8[2,16,32] NZ`."""
        return ", ".join(f"{name}={tensor}" for name, tensor in self.inputs.items()) or "no input"


def key_of(op: Any, types: Mapping[str, TensorType], constants: AbstractSet[str]) -> Key:
    """What an operator's legality depends on: equal for the copies of an operator in the layers of a model.

    Args:
        op: an OpDef message.
        types: of all tensors, by name.
        constants: names of the operators that are computed from constants alone.
    """
    return own_key(op), *tensors_of(op, len(op.input_desc), len(op.output_desc), types, constants)


def own_key(op: Any) -> Key:
    """What an operator's legality depends on but for its tensors: its type, the names of its inputs, and its attributes."""
    attributes = tuple(sorted((name, value_of(value)) for name, value in op.attr.items() if name not in PRIVATE))
    return op.type, tuple(desc.name for desc in op.input_desc), attributes


def tensors_of(op: Any, inputs: int, outputs: int, types: Mapping[str, TensorType], constants: AbstractSet[str]) -> Key:
    """What an operator's legality depends on of its tensors: their types, and which inputs are computed from constants alone.

    Args:
        inputs, outputs: how many are described; control inputs come behind them.
    """
    given = tuple([(types.get(tensor), tensor.rpartition(":")[0] in constants) if tensor else None for tensor in op.input[:inputs]])
    return given, tuple([types.get(f"{op.name}:{port}") for port in range(outputs)])


def node_of(op: Any, types: Mapping[str, TensorType], constants: AbstractSet[str]) -> Node:
    """The view of an OpDef message; the arguments are those of `key_of`."""
    # Control inputs have no description, and absent ones have no name.
    named = [(desc.name, tensor) for tensor, desc in zip(op.input, op.input_desc, strict=False) if tensor]
    outputs = {desc.name: types.get(f"{op.name}:{port}") for port, desc in enumerate(op.output_desc)}
    return Node(
        name=op.name,
        type=op.type,
        inputs={name: types[tensor] for name, tensor in named},
        constants=frozenset(name for name, tensor in named if tensor.rpartition(":")[0] in constants),
        outputs={name: told for name, told in outputs.items() if told is not None},
        attributes={name: value_of(value) for name, value in op.attr.items() if not name.startswith("_")},
        private=frozenset(name for name in op.attr if name.startswith("_") and name not in PRIVATE),
    )


def value_of(attribute: Any) -> Any:
    """Value of an AttrDef message: a number, a truth value, a string, or a tuple of them; None for a tensor or a graph."""
    kind = attribute.WhichOneof("value")
    if kind in ("i", "f", "b", "dt"):
        return getattr(attribute, kind)
    if kind == "s":
        return attribute.s.decode(errors="replace")
    if kind == "list":
        items = attribute.list
        return tuple(items.i) or tuple(items.f) or tuple(items.b) or tuple(text.decode(errors="replace") for text in items.s)
    return None
