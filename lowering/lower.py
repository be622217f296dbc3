"""Turns a partitioned graph into the graph that one backend runs: primitives replaced by its lowerings, state written in place."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from ..graphs import compile_count
from ..graphs.errors import LoweringError
from ..graphs.invariants import results_of
from ..graphs.ir.alias import owner
from ..graphs.ir.flatten import bodies, flatten
from ..graphs.ir.outline import outline
from ..graphs.ir.record import record
from ..graphs.ir.trace import name_placeholders
from ..graphs.primitive import Primitive, of_target
from ..graphs.stage import Stage
from ..graphs.types import Bucket, Function, Mesh, Signature
from .calls import calls_of
from .donation import Donated, donations
from .platform import CPU, Platform

if TYPE_CHECKING:
    # A serving process loads this file with its backends and must not load the partitioner.
    from ..graphs.spmd.partition import PartitionedProgram


@dataclass(frozen=True)
class LoweredProgram(Stage):
    """What a backend compiles: `graph(*operands) -> outputs`; state operands are written in place.

    Placeholders follow `signature.operands`, results `signature.outputs`.
    The digest of its text is part of the executable's key.
    """

    bucket: Bucket | Function
    backend: str
    graph: GraphModule
    signature: Signature
    platform: Platform = CPU
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def title(self) -> str:
        return f"{self.bucket.name} lowered for {self.backend}"


def lower_eager(partitioned: PartitionedProgram) -> LoweredProgram:
    """Keeps primitives whole and lets those that update a pool write it in place."""
    graph = flatten(partitioned.graph)
    donate(graph, partitioned.signature)
    return LoweredProgram(partitioned.program.bucket, "eager", graph, partitioned.signature)


def lower_bodies(partitioned: PartitionedProgram, backend: str) -> LoweredProgram:
    """Lowers every body once for `backend`: calls of bodies that write their pools in place.

    The nodes between calls become bodies, too, and values that one body hands to another are contiguous. Where a pool cannot be written
    by the bodies (donation.py), the graph is that of `lower_inline`.
    """
    graph, signature = outline(partitioned.graph), partitioned.signature
    try:
        donated = donations(graph, signature)
    except LoweringError:
        return lower_inline(partitioned, backend)
    compile_count.record("trace")
    lowered = {name: _lower_body(body, donated.bodies[name], backend) for name, body in bodies(graph).items()}
    calls = calls_of(graph, signature, donated, lowered)
    name_placeholders(calls, signature)
    return LoweredProgram(partitioned.program.bucket, backend, calls, signature)


def _lower_body(body: GraphModule, donated: Donated, backend: str) -> GraphModule:
    """The body in operators of `backend`; new values of pools are written into their operands and are no results."""
    operands = [node for node in body.graph.nodes if node.op == "placeholder"]
    results, new_values = results_of(body), set(donated.values())
    writers = set(_claims(body, [operands[i] for i in donated], [results[i] for i in donated.values()]))
    inliner = _Inliner(body, backend, writers)

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        return [value if i in new_values else value.contiguous() for i, value in enumerate(inliner.run(*values))]

    like = [torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta") for node in operands]
    graph = record(run, like, FakeTensorMode(), "cpu")
    _donate(graph, donated)
    return graph


def lower_inline(partitioned: PartitionedProgram, backend: str) -> LoweredProgram:
    """Replaces primitives by their lowering for `backend`, down to aten, and copies each pool's new value into the pool at the end.

    A compiler that supports donated operands turns `copy_(pool, index_put(pool, ...))` into an update in place.
    """
    signature, flat = partitioned.signature, flatten(partitioned.graph)
    compile_count.record("trace")
    inliner = _Inliner(flat, backend, set(_claims(flat, *_pools(flat, signature))))
    operands = [torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype, device="meta") for leaf in signature.operands]
    graph = record(inliner.run, operands, FakeTensorMode(), "cpu")
    donate(graph, signature)
    name_placeholders(graph, signature)
    return LoweredProgram(partitioned.program.bucket, backend, graph, signature)


class _Inliner(Interpreter):
    """Runs a graph with a backend's lowerings in place of primitives.

    Args:
        writers: nodes that may write their pools in place; other donating nodes run the reference, which is functional.
    """

    def __init__(self, graph: GraphModule, backend: str, writers: Collection[Node]) -> None:
        super().__init__(graph)
        self.backend, self._writers = backend, writers

    def run_node(self, n: Node) -> Any:
        primitive = of_target(n.target)
        if primitive is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if primitive.donates and n not in self._writers:
            return primitive.rule("reference")(*args, **kwargs)
        return primitive.lower_for(self.backend)(*args, **kwargs)


def donate(graph: GraphModule, signature: Signature) -> None:
    """Makes a functional graph write its state operands in place, and return outputs only.

    Where a pool is replaced by a chain of donating primitives, each after the last reader of the value that it replaces, their in-place
    variants write it. Any other new state is copied into its operand at the end, after every reader of the old value. An output that
    shares memory with a pool is cloned, or the next step would change it while it is being read.
    """
    at, result = len(signature.params), len(signature.outputs)
    _donate(graph, {at + i: result + i for i in range(len(signature.state))})


def _donate(graph: GraphModule, donated: Donated) -> None:
    nodes, results = graph.graph, results_of(graph)
    placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
    pools, replaced = [placeholders[i] for i in donated], [results[i] for i in donated.values()]
    (output,) = (n for n in nodes.nodes if n.op == "output")
    for writer, pairs in _claims(graph, pools, replaced).items():
        _write_in_place(graph, writer, pairs)
    # A value that an in-place variant writes has been replaced by the pool itself.
    results = results_of(graph)
    outputs = [node for i, node in enumerate(results) if i not in donated.values()]
    new_state = [results[i] for i in donated.values()]
    copies = [(pool, new) for pool, new in zip(pools, new_state, strict=True) if new is not pool]
    written = {pool for pool, _ in copies}
    with nodes.inserting_before(output):
        returned = [_cloned(graph, node) if owner(node) in pools else node for node in outputs]
        copies = [(pool, _cloned(graph, new) if owner(new) in written else new) for pool, new in copies]
        for pool, new in copies:
            copy = nodes.call_function(torch.ops.aten.copy_.default, (pool, new))
            copy.meta["val"] = pool.meta["val"]
    output.args = (tuple(returned),)
    nodes.lint()
    graph.recompile()


def _pools(graph: GraphModule, signature: Signature) -> tuple[list[Node], list[Node]]:
    """The state operands of a graph, and the values that it returns as their new state."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    pools = placeholders[len(signature.params) : len(signature.params) + len(signature.state)]
    return pools, results_of(graph)[len(signature.outputs) :]


def _claims(graph: GraphModule, pools: list[Node], new_state: list[Node]) -> dict[Node, list[tuple[Node, Node]]]:
    """The nodes that may write in place, in order: each with the pools that it writes and their new values.

    An in-place variant writes every pool that its primitive donates. If one of them must not be written, the node cannot be replaced,
    and none of its pools is written in place, neither by this node nor by the others of the chain.
    """
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    chains = {pool: _writers(pool, new, order) for pool, new in zip(pools, new_state, strict=True)}
    while True:
        claims: dict[Node, list[tuple[Node, Node]]] = {}
        for pool, chain in chains.items():
            for writer, new in chain:
                claims.setdefault(writer, []).append((pool, new))
        partial = [writer for writer, pairs in claims.items() if len(pairs) != len(_primitive(writer).donates)]
        if not partial:
            return dict(sorted(claims.items(), key=lambda claim: order[claim[0]]))
        chains = {pool: chain for pool, chain in chains.items() if not any(writer in partial for writer, _ in chain)}


def _writers(pool: Node, new: Node, order: dict[Node, int]) -> list[tuple[Node, Node]]:
    """The donating primitives that turn `pool` into `new`, first to last, each with its new value; none unless all may write in place."""
    chain: list[tuple[Node, Node]] = []
    while new is not pool:
        write = _replacing(new)
        if write is None or not _last_reader(write[1], write[0], order):
            return []
        chain.insert(0, (write[0], new))
        new = write[1]
    return chain


def _replacing(new: Node) -> tuple[Node, Node] | None:
    """The donating primitive whose result a value is, and the value that it replaces; None where it is no such result."""
    if new.target is not operator.getitem:
        return None
    writer, index = new.args
    assert isinstance(writer, Node)
    primitive = of_target(writer.target)
    if primitive is None or not primitive.has("inplace"):
        return None
    old = next((writer.args[operand] for operand, result in primitive.donates if result == index), None)
    return (writer, old) if isinstance(old, Node) else None


def _primitive(node: Node) -> Primitive[Any]:
    primitive = of_target(node.target)
    assert primitive is not None
    return primitive


def _last_reader(value: Node, writer: Node, order: dict[Node, int]) -> bool:
    """Whether `writer` takes a value once, and every other reader comes before it and is no view of the value."""
    others = [user for user in value.users if user is not writer]
    return list(writer.args).count(value) == 1 and all(order[user] < order[writer] and owner(user) is user for user in others)


def _write_in_place(graph: GraphModule, writer: Node, pairs: list[tuple[Node, Node]]) -> None:
    primitive = _primitive(writer)
    results = primitive.kept_results
    pools = {new.args[1]: pool for pool, new in pairs}
    with graph.graph.inserting_before(writer):
        variant = graph.graph.call_function(primitive.inplace_op, writer.args)
    values = [writer.meta["val"][i] for i in results]
    variant.meta["val"] = values[0] if len(results) == 1 else tuple(values)
    for reader in list(writer.users):
        index = int(str(reader.args[1]))
        if index not in pools and len(results) > 1:
            reader.args = (variant, results.index(index))
            continue
        reader.replace_all_uses_with(pools.get(index, variant))
        graph.graph.erase_node(reader)
    graph.graph.erase_node(writer)


def _cloned(graph: GraphModule, node: Node) -> Node:
    copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy
