"""Turns a partitioned graph into the graph one backend runs: primitives replaced by its lowerings, state donated."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..graphs import events
from ..graphs.alias import owner
from ..graphs.flatten import flatten
from ..graphs.primitive import of_target
from ..graphs.text import as_text
from ..graphs.trace import name_placeholders
from ..graphs.types import Bucket, Signature
from ..graphs.verify import results_of

if TYPE_CHECKING:
    # A serving process loads this file with its backends; it has no use for the partitioner.
    from ..graphs.partition import Partitioned


@dataclass(frozen=True)
class Lowered:
    """What a backend compiles: `graph(*operands) -> outputs`; state operands are written in place.

    Placeholders follow `signature.operands`, results `signature.outputs`.
    """

    bucket: Bucket
    backend: str
    graph: GraphModule
    signature: Signature

    def as_text(self) -> str:
        """Stable text; the digest of it keys the compiled graph."""
        return as_text(self.graph, f"{self.bucket.name} lowered for {self.backend}")


def lower_eager(partitioned: Partitioned) -> Lowered:
    """Keeps primitives whole and lets those that update a pool write it in place."""
    graph = flatten(partitioned.graph)
    donate(graph, partitioned.signature)
    return Lowered(partitioned.program.bucket, "eager", graph, partitioned.signature)


def lower_inline(partitioned: Partitioned, backend: str) -> Lowered:
    """Replaces primitives by their lowering for `backend`, down to aten, and ends with one copy per donated pool.

    A compiler that knows donated operands turns `copy_(pool, index_put(pool, ...))` into an update in place.
    """
    signature = partitioned.signature
    events.record("trace")
    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in signature.operands]
        graph = make_fx(_Inliner(flatten(partitioned.graph), backend).run)(*fakes)
    graph.graph.eliminate_dead_code()
    donate(graph, signature)
    name_placeholders(graph, signature)
    return Lowered(partitioned.program.bucket, backend, graph, signature)


class _Inliner(Interpreter):
    """Runs a graph with a backend's lowerings in place of primitives."""

    def __init__(self, graph: GraphModule, backend: str) -> None:
        super().__init__(graph)
        self.backend = backend

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        primitive = of_target(target)
        if primitive is not None and not primitive.is_kept(self.backend):
            return primitive.lower_for(self.backend)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def donate(graph: GraphModule, signature: Signature) -> None:
    """Makes a functional graph write its state operands in place, and return outputs only.

    A pool that one donating primitive reads and nothing else does is written by the primitive's in-place twin; any other new
    state is copied into its operand at the end, after every reader of the old value. No output shares memory with a pool: the
    next step would change it under its reader.
    """
    nodes = graph.graph
    placeholders = [n for n in nodes.nodes if n.op == "placeholder"]
    pools = placeholders[len(signature.params) : len(signature.params) + len(signature.state)]
    (output,) = (n for n in nodes.nodes if n.op == "output")
    claims: dict[Node, list[tuple[Node, Node]]] = {}
    for pool, new in zip(pools, results_of(graph)[len(signature.outputs) :], strict=True):
        writer = _sole_writer(pool, new)
        if writer is not None:
            claims.setdefault(writer, []).append((pool, new))
    for writer, pairs in claims.items():
        primitive = of_target(writer.target)
        if primitive is not None and len(pairs) == len(primitive.donates):
            _write_in_place(graph, writer, pairs)
    # Whatever a twin wrote is by now the pool itself.
    results = results_of(graph)
    outputs, stored = results[: len(signature.outputs)], results[len(signature.outputs) :]
    copies = [(pool, new) for pool, new in zip(pools, stored, strict=True) if new is not pool]
    written = {pool for pool, _ in copies}
    with nodes.inserting_before(output):
        kept = [_apart(graph, node) if owner(node) in pools else node for node in outputs]
        copies = [(pool, _apart(graph, new) if owner(new) in written else new) for pool, new in copies]
        for pool, new in copies:
            copy = nodes.call_function(torch.ops.aten.copy_.default, (pool, new))
            copy.meta["val"] = pool.meta["val"]
    output.args = (tuple(kept),)
    nodes.lint()
    graph.recompile()


def _sole_writer(pool: Node, new: Node) -> Node | None:
    """The donating primitive that turns `pool` into `new`, if it is the only reader of `pool`."""
    if new.target is not operator.getitem or len(pool.users) != 1:
        return None
    writer, index = new.args
    if not isinstance(writer, Node) or writer not in pool.users or list(writer.args).count(pool) != 1:
        return None
    primitive = of_target(writer.target)
    if primitive is None or not primitive.has("inplace"):
        return None
    wanted = [(operand, result) for operand, result in primitive.donates if result == index]
    return writer if wanted and writer.args[wanted[0][0]] is pool else None


def _write_in_place(graph: GraphModule, writer: Node, pairs: list[tuple[Node, Node]]) -> None:
    primitive = of_target(writer.target)
    assert primitive is not None
    kept = primitive.kept_results
    pools = {new.args[1]: pool for pool, new in pairs}
    with graph.graph.inserting_before(writer):
        twin = graph.graph.call_function(primitive.inplace_op, writer.args)
    values = [writer.meta["val"][i] for i in kept]
    twin.meta["val"] = values[0] if len(kept) == 1 else tuple(values)
    for reader in list(writer.users):
        index = int(str(reader.args[1]))
        if index not in pools and len(kept) > 1:
            reader.args = (twin, kept.index(index))
            continue
        reader.replace_all_uses_with(pools.get(index, twin))
        graph.graph.erase_node(reader)
    graph.graph.erase_node(writer)


def _apart(graph: GraphModule, node: Node) -> Node:
    copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy

