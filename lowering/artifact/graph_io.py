"""The serialised form of a flat graph.

The bytes are msgpack: `[MAGIC, VERSION, [node, ...]]`, each node being `[op, target, args, kwargs, value, leaf]`. Nodes refer to each
other by index, not by FX's names, so equal graphs have equal bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from ...graphs.errors import LoweringError

MAGIC = "npucompile.graph"
VERSION = 1

_FUNCTIONS: dict[str, Callable[..., Any]] = {"operator.getitem": operator.getitem}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}

# Arguments of other types are refused, because they could not be read back exactly.
_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "format": torch.memory_format,
}
_LEGAL = "None, bool, int, float, str, node, list, tuple, dtype, device, layout, memory format"


@dataclass(frozen=True)
class NamedOperator:
    """An operator that need not be registered in this process; its text is its name."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name.split(".")[1]

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises:
        LoweringError: always; a program gives it a kernel.
        """
        raise LoweringError(f"{self.name} has no kernel in this process")


def encode(graph: GraphModule) -> bytes:
    """Serialises placeholders, operator calls and the output, with each node's shape, dtype and strides.

    Raises:
        LoweringError: naming the node and the operator or argument that the format cannot express.
    """
    index: dict[Node, int] = {}
    nodes = []
    for node in graph.graph.nodes:
        nodes.append(_encode_node(node, index))
        index[node] = len(index)
    packed: bytes = msgpack.packb([MAGIC, VERSION, nodes])
    return packed


def decode(data: bytes, find: Callable[[str], Callable[..., Any]] | None = None) -> GraphModule:
    """Deserialises a graph, with `meta["val"]` (meta tensors) of every node and `meta["leaf"]` of placeholders.

    Args:
        find: what an operator's name stands for; None takes what is registered in this process (`find_target`).

    Raises:
        LoweringError: when the bytes are not a graph of this version, or name an operator that is not registered here.
    """
    try:
        magic, version, nodes = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise LoweringError(f"{len(data)} bytes are not a serialised graph: {error}") from error
    if (magic, version) != (MAGIC, VERSION):
        raise LoweringError(f"serialised graph is {magic!r} version {version!r}; this reads {MAGIC!r} version {VERSION}")
    graph = Graph()
    decoded: list[Node] = []
    try:
        for position, entry in enumerate(nodes):
            decoded.append(_decode_node(graph, position, entry, decoded, find or find_target))
        graph.lint()
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        raise LoweringError(f"node {len(decoded)} of a serialised graph cannot be read: {error}") from error
    # Its code is written when somebody calls it; most readers walk its nodes.
    return _LazyGraphModule(torch.nn.Module(), graph)


def target_name(target: Any) -> str:
    """The name a call is stored under: `aten.add.Tensor`, `npuc.rms_norm.default`, `operator.getitem`.

    Raises:
        LoweringError: when it is neither an operator overload nor one of the listed functions.
    """
    if isinstance(target, NamedOperator):
        return target.name
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    try:
        return _FUNCTION_NAMES[target]
    except (KeyError, TypeError):
        raise LoweringError(f"a call of {target!r} cannot be serialised; legal are operator overloads and {sorted(_FUNCTIONS)}") from None


def find_target(name: str) -> Callable[..., Any]:
    """The operator of that name in this process.

    Raises:
        LoweringError: when nothing of that name is registered.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    parts = name.split(".")
    if len(parts) == 3:
        try:
            target = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
        except (AttributeError, RuntimeError):
            target = None
        if isinstance(target, torch._ops.OpOverload):
            return target
    raise LoweringError(f"no operator {name!r} is registered in this process; the graph was written by another version or needs an import")


def _encode_node(node: Node, index: Mapping[Node, int]) -> list[Any]:
    if node.op not in ("placeholder", "call_function", "output"):
        raise LoweringError(
            f"node {node.name} is a {node.op} of {node.target!r}; legal are placeholder, call_function and output: whatever a graph"
            " reads must be an operand"
        )
    target = target_name(node.target) if node.op == "call_function" else None
    try:
        args = _encode_argument(tuple(node.args) if node.op != "placeholder" else (), index)
        kwargs = [[key, _encode_argument(node.kwargs[key], index)] for key in sorted(node.kwargs)]
    except LoweringError as error:
        raise LoweringError(f"node {node.name} ({target or node.op}): {error}") from error
    return [node.op, target, args, kwargs, _encode_value(node.meta.get("val")), node.meta.get("leaf")]


def _encode_argument(value: Any, index: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return ["node", index[value]]
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise LoweringError(f"integer {value} does not fit 64 bits")
        return value
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", *[_encode_argument(v, index) for v in value]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    for tag, kind in _NAMED.items():
        if isinstance(value, kind):
            return [tag, str(value).removeprefix("torch.")]
    raise LoweringError(f"argument {value!r} of type {type(value).__name__} cannot be serialised; legal are {_LEGAL}")


def _encode_value(value: Any) -> Any:
    """`[dtype, shape]` of a tensor, and its strides where it is not contiguous; `["many", ...]` of several results."""
    if isinstance(value, torch.Tensor):
        described: list[Any] = [str(value.dtype).removeprefix("torch."), [int(size) for size in value.shape]]
        if not value.is_contiguous():
            described.append([int(step) for step in value.stride()])
        return described
    if isinstance(value, (list, tuple)):
        return ["many", *[_encode_value(v) for v in value]]
    return None


def _decode_node(graph: Graph, position: int, entry: list[Any], decoded: list[Node], find: Callable[[str], Callable[..., Any]]) -> Node:
    op, target, packed, named, value, leaf = entry
    args = _decode_argument(packed, decoded)
    if op == "placeholder":
        node = graph.placeholder(f"operand_{position}")
    elif op == "output":
        node = graph.output(args[0])
    elif op == "call_function":
        node = graph.call_function(find(target), args, {key: _decode_argument(v, decoded) for key, v in named})
    else:
        raise ValueError(f"{op!r} is no kind of node")
    node.meta["val"] = _decode_value(value)
    if leaf is not None:
        node.meta["leaf"] = leaf
    return node


def _decode_argument(value: Any, decoded: list[Node]) -> Any:
    if not isinstance(value, list):
        return value
    tag, *rest = value
    if tag == "node":
        return decoded[rest[0]]
    if tag in ("tuple", "list"):
        parts: Iterable[Any] = (_decode_argument(v, decoded) for v in rest)
        return tuple(parts) if tag == "tuple" else list(parts)
    if tag == "device":
        return torch.device(rest[0])
    constant = getattr(torch, rest[0])
    if not isinstance(constant, _NAMED[tag]):
        raise ValueError(f"{rest[0]!r} is no {tag}")
    return constant


def _decode_value(value: Any) -> Any:
    if value is None:
        return None
    if value[0] == "many":
        return tuple(_decode_value(v) for v in value[1:])
    dtype, shape, *strides = value
    if strides:
        return torch.empty_strided(shape, strides[0], dtype=getattr(torch, dtype), device="meta")
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
