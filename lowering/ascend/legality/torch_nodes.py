"""A torch operator of a captured graph as the legality rules see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Node as FxNode

from ....graphs.errors import LoweringError
from ....graphs.types import DTYPE_NAMES
from ..operators.table import HOST_LISTS
from ..operators.tensor_type import ND, NZ, TensorType
from .node import Key, Node
from .table import FORM, Fact
from .torch_operators import TorchOperator, arguments

_INT4_IN_INT32 = 8


def key_of(node: FxNode, nz: AbstractSet[FxNode]) -> Key:
    """What the legality of an operator depends on: equal for the copies of an operator in the layers of a model.

    Args:
        nz: nodes whose values are stored in NZ.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, FxNode):
            return value in nz, _key_of_value(value.meta["val"])
        if isinstance(value, list | tuple):
            return ("list", *map(plain, value))
        return type(value), str(value)

    kwargs = tuple((name, plain(node.kwargs[name])) for name in sorted(node.kwargs))
    return str(node.target), plain(node.args), kwargs, _key_of_value(node.meta["val"])


def _key_of_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.is_contiguous()
    return tuple(map(_key_of_value, value)) if isinstance(value, list | tuple) else value


def node_of(node: FxNode, name: str, operator: TorchOperator | None, rows: tuple[Fact, ...], nz: AbstractSet[FxNode]) -> Node:
    """The view of a node of `acl_graph.file.graph_of`.

    Args:
        name: what messages call it.
        operator: its row; None where there is none, which makes it an operator that the table does not know.
        rows: facts of what runs it.
        nz: nodes whose values are stored in NZ.

    Raises:
        LoweringError: a tensor has a dtype that no NPU operator takes.
    """
    target = str(node.target)
    if operator is None:
        return Node(name, target, {}, frozenset(), {}, {})
    form = next((row for row in reversed(rows) if row.what == FORM), None)
    declared = arguments(target, operator.schema)
    given = {argument.name: argument.default for argument in declared if argument.default is not None}
    given |= {argument.name: value for argument, value in zip(declared, node.args, strict=False)} | dict(node.kwargs)
    inputs: dict[str, TensorType] = {}
    constants, strided = set(), set()
    for argument, name_of_input in operator.inputs.items():
        value, listed = given.get(argument), form is not None and form.inputs.get(name_of_input) == "dynamic"
        for slot, element in slots(name_of_input, value, listed):
            inputs[slot] = type_of(element, packed=argument in operator.packed, nz=element in nz)
            if argument in HOST_LISTS.get(target, ()) or not isinstance(element, FxNode):
                constants.add(slot)
            elif not element.meta["val"].is_contiguous():
                strided.add(slot)
    return Node(
        name=name,
        type=operator.runs,
        inputs=inputs,
        constants=frozenset(constants),
        outputs=_outputs(node, operator, form),
        attributes={
            known: _attribute(given[argument]) for argument, known in operator.attributes.items() if given.get(argument) is not None
        },
        called=target,
        unnamed=frozenset(_unnamed(operator, given, {argument.name: argument.default for argument in declared})),
        strided=frozenset(strided),
    )


def slots(name: str, value: Any, listed: bool) -> Iterator[tuple[str, Any]]:
    """Inputs that an argument gives, by their names in the table; numbers in place of a tensor are no inputs."""
    tensors = value if isinstance(value, list | tuple) and any(isinstance(element, FxNode) for element in value) else [value]
    for number, element in enumerate(tensors):
        if isinstance(element, FxNode | list | tuple):
            yield (f"{name}{number}" if listed else name), element


def type_of(value: Any, *, packed: bool = False, nz: bool = False) -> TensorType:
    """Type of a node's value, or of a list of integers, which the host hands over."""
    if isinstance(value, list | tuple):
        return TensorType("i64", (len(value),))
    tensor = value.meta["val"] if isinstance(value, FxNode) else value
    if tensor.dtype not in DTYPE_NAMES:
        raise LoweringError(f"{value} is {tensor.dtype}[{tuple(tensor.shape)}]; legal are {', '.join(DTYPE_NAMES.values())}")
    dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
    if packed and dtype == "i32":
        dtype, shape = "i4", (*shape[:-1], shape[-1] * _INT4_IN_INT32)
    return TensorType(dtype, shape, NZ if nz else ND)


def _outputs(node: FxNode, operator: TorchOperator, form: Fact | None) -> dict[str, TensorType]:
    value = node.meta["val"]
    results = value if isinstance(value, list | tuple) else [value]
    kinds: Mapping[str, str] = form.outputs if form else {}
    named = [f"{name}0" if kinds.get(name) == "dynamic" else name for name in operator.outputs]
    return {name: type_of(result) for name, result in zip(named, results, strict=False) if isinstance(result, torch.Tensor)}


def _attribute(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _unnamed(operator: TorchOperator, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    named = operator.inputs.keys() | operator.attributes.keys() | operator.free
    for argument, value in given.items():
        if argument not in named and value is not None and value != defaults.get(argument):
            yield argument
