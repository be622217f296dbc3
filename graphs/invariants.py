"""Invariants of legal graphs, checked after every stage and pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import GraphModule, Node

from .errors import InvariantError
from .ir.flatten import bodies
from .primitive import NAMESPACE, TABLE
from .types import Signature

Invariant = Callable[[GraphModule, Signature], Iterator[str]]

NAMESPACES = ("aten", NAMESPACE, "_c10d_functional")
# torch tags this as dynamic because its index may be a boolean mask; with an integer index its result is static.
INDEXING = (torch.ops.aten.index.Tensor,)


def operands_follow_signature(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Placeholders are the signature's operands: same number, order, shape and dtype."""
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
    if len(nodes) != len(signature.operands):
        yield f"{len(nodes)} placeholders, the signature has {len(signature.operands)} operands"
    for node, leaf in zip(nodes, signature.operands, strict=False):
        if (aval := _aval(node)) != (*leaf.aval.shape, leaf.aval.dtype):
            yield f"placeholder {leaf.name} is {aval}, the signature says {leaf.aval}"


def results_follow_signature(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Results follow the signature: same number, shape and dtype."""
    results = results_of(graph)
    if len(results) != len(signature.results):
        yield f"{len(results)} results, the signature has {len(signature.results)}"
    for node, leaf in zip(results, signature.results, strict=False):
        if (aval := _aval(node) if isinstance(node, Node) else node) != (*leaf.aval.shape, leaf.aval.dtype):
            yield f"result {leaf.name} is {aval}, the signature says {leaf.aval}"


def nothing_from_the_air(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Everything a graph reads is an operand: no captured tensor, no module except the bodies of blocks."""
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_method") or (node.op == "call_module" and not _is_body(graph, node)):
            yield f"{node.name} is a {node.op} of {node.target!r}; everything a graph reads must be an operand"


def operators_are_known(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Nodes are aten operators, primitives of the table, functional collectives, or the unpacking of one of these."""
    for node in _calls(graph):
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name.split("::")[1]
            if target.namespace not in NAMESPACES or (target.namespace == NAMESPACE and name not in TABLE):
                yield f"{node.name} calls {target}; legal namespaces are {NAMESPACES}"
        elif getattr(target, "__name__", "") != "getitem":
            yield f"{node.name} calls {target!r}, which is not a registered operator"


def shapes_are_static(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Every value has integer sizes, known now."""
    for node in _calls(graph):
        for value in _values(node):
            if not all(isinstance(size, int) for size in value.shape):
                yield f"{node.name} has shape {tuple(value.shape)}; sizes must be integers at build time"


def nothing_depends_on_the_host(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """No operator reads a value back to the host or draws its own random numbers."""
    for node in _calls(graph):
        tags = getattr(node.target, "tags", ())
        reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if reads and node.target not in INDEXING:
            yield f"{node.name} calls {node.target}, which reads a value back to the host"
        if torch.Tag.nondeterministic_seeded in tags:
            yield f"{node.name} calls {node.target}, which draws random numbers; they are inputs"


def state_is_replaced(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """Every state leaf has its own result."""
    stored = results_of(graph)[len(signature.outputs) :]
    if len(set(stored)) != len(stored):
        yield "two state leaves end as the same value; each needs a result of its own"


def nothing_is_mutated(graph: GraphModule, signature: Signature) -> Iterator[str]:
    """The graph is functional: no operator writes an operand."""
    for node in _calls(graph):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield f"{node.name} calls {node.target}, which writes its operand"


INVARIANTS: tuple[Invariant, ...] = (
    operands_follow_signature,
    results_follow_signature,
    nothing_from_the_air,
    operators_are_known,
    shapes_are_static,
    nothing_depends_on_the_host,
    nothing_is_mutated,
    state_is_replaced,
)
"""What a partitioned graph must satisfy."""

OF_BODIES = INVARIANTS[2:7]
"""Those that every body satisfies too; the others are about the signature, which a body does not have."""


def check(graph: GraphModule, signature: Signature, after: str) -> None:
    """Checks every invariant.

    Args:
        after: the stage or pass that the graph comes from; named in the error.

    Raises:
        InvariantError: listing every breach.
    """
    broken = [f"{rule.__name__}: {what}" for rule in INVARIANTS for what in rule(graph, signature)]
    for name, body in bodies(graph).items():
        # A called module that is not a body is reported by `nothing_from_the_air` already.
        rules = OF_BODIES if hasattr(body, "graph") else ()
        broken += [f"{rule.__name__}: in {name}: {what}" for rule in rules for what in rule(body, signature)]
    if broken:
        raise InvariantError(f"after {after} the graph is not legal:\n  " + "\n  ".join(broken))


def results_of(graph: GraphModule) -> list[Node]:
    """Nodes a graph returns, in order."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    return list(output.args[0])


def _is_body(graph: GraphModule, node: Node) -> bool:
    return isinstance(getattr(graph, str(node.target), None), GraphModule)


def _calls(graph: GraphModule) -> Iterator[Node]:
    return (n for n in graph.graph.nodes if n.op == "call_function")


def _values(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]


def _aval(node: Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return (*value.shape, value.dtype)
