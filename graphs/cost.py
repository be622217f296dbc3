"""Cost of a graph: arithmetic, bytes moved, and the memory it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from .invariants import results_of
from .ir.alias import is_view, owner, shares
from .ir.flatten import bodies
from .primitive import Cost, nbytes, of_inplace, of_target
from .types import Signature

_PAGES = "page_table"
"""Operand of primitives that read cached tokens: [B, pages of a request]."""


@dataclass(frozen=True)
class Memory:
    """Bytes one device needs to run a graph.

    Attributes:
        params_bytes: parameters.
        state_bytes: donated pools, counted once: a result is written to its operand.
        inputs_bytes: inputs of a step.
        live_bytes: of every node the sum of live intermediate values, results included; a view has no bytes of its own and keeps its base
            alive.
    """

    params_bytes: int
    state_bytes: int
    inputs_bytes: int
    live_bytes: tuple[int, ...] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The largest of them."""
        return max(self.live_bytes, default=0)

    @property
    def total_bytes(self) -> int:
        return self.params_bytes + self.state_bytes + self.inputs_bytes + self.peak_bytes

    def as_dict(self) -> dict[str, int]:
        """The numbers by their names."""
        return {name: getattr(self, name) for name in ("params_bytes", "state_bytes", "inputs_bytes", "peak_bytes")}


def cost(graph: GraphModule) -> Cost:
    """Sum over all nodes: primitives by their own rule, matrix products by torch's formulas, others one operation per result element."""
    return _sum(graph, node_cost)


def cached_flops(graph: GraphModule) -> int:
    """The part of `cost(graph).flops` that is for cached tokens: as many as page tables hold, where the requests of a step have fewer."""
    return _sum(graph, _cached_cost).flops


def _sum(graph: GraphModule, of: Callable[[Node], Cost]) -> Cost:
    inner = {name: _sum(body, of) for name, body in bodies(graph).items()}
    total = Cost()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            total = total + of(node)
        elif node.op == "call_module":
            total = total + inner[str(node.target)]
    return total


def node_cost(node: Node) -> Cost:
    """Cost of one node; views and unpacking are free, an in-place variant costs what its primitive does."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_view(target):
        return Cost()
    args = [_value(a) for a in node.args]
    primitive = of_target(target) or of_inplace(target)
    if primitive is not None:
        result: Cost = primitive.rule("cost")(*args)
        return result
    outputs = [v for v in _flat(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    formula = flop_registry.get(target.overloadpacket)
    flops = int(formula(*args, out_val=node.meta["val"])) if formula else sum(v.numel() for v in outputs)
    return Cost(flops, nbytes(*[a for a in _flat(args) if isinstance(a, torch.Tensor)]), nbytes(*outputs))


def _cached_cost(node: Node) -> Cost:
    """What of a node's operations is for the pages of its page table."""
    target = node.target
    primitive = (of_target(target) or of_inplace(target)) if isinstance(target, torch._ops.OpOverload) else None
    if primitive is None or _PAGES not in primitive.arguments:
        return Cost()
    args: list[Any] = [_value(a) for a in node.args]
    whole: Cost = primitive.rule("cost")(*args)
    at = primitive.arguments.index(_PAGES)
    args[at] = args[at][:, :0]
    none: Cost = primitive.rule("cost")(*args)
    return Cost(whole.flops - none.flops)


def memory(graph: GraphModule, signature: Signature) -> Memory:
    """Static memory of a graph run node by node, freeing every value after its last reader; see `_while_rows_travel`."""
    params, state, inputs = (sum(leaf.aval.nbytes for leaf in leaves) for leaves in (signature.params, signature.state, signature.inputs))
    donated = set(results_of(graph)[len(signature.outputs) :])
    return Memory(params, state, inputs, tuple(_live(graph, donated)))


def _live(graph: GraphModule, donated: set[Node]) -> list[int]:
    """Sums of values that live at the same time, of every node; a call needs those of its body, then holds the bytes of its results."""
    sizes = {node: _own_bytes(node, donated) for node in graph.graph.nodes if node.op == "call_function"}
    inside: dict[Node, list[int]] = {}
    for name, body in bodies(graph).items():
        calls = [node for node in graph.graph.nodes if node.op == "call_module" and node.target == name]
        pools = {int(str(n.args[1])) for n in donated if n.args and n.args[0] in calls}
        results = results_of(body)
        within = _live(body, {results[i] for i in pools})
        own = sum(nbytes(results[i].meta["val"]) for i in range(len(results)) if i not in pools)
        sizes.update(dict.fromkeys(calls, own))
        inside.update(dict.fromkeys(calls, within))
    # A value lives until the last reader of any view of it; an unread one is freed at once. The new value of a pool lies in the
    # pool itself, so reading it does not keep the other results of its node alive.
    last = {node: node for node in sizes}
    for node in graph.graph.nodes:
        last.update({owner(source): node for source in node.all_input_nodes if source not in donated})
    last |= _while_rows_travel(graph, last, sizes)
    ends: dict[Node, list[Node]] = {}
    for source, reader in last.items():
        ends.setdefault(reader, []).append(source)
    live, found = 0, list[int]()
    for node in graph.graph.nodes:
        found += [live + more for more in inside.get(node, ())]
        live += sizes.get(node, 0)
        found.append(live)
        live -= sum(sizes.get(source, 0) for source in ends.get(node, ()))
    return found


def _while_rows_travel(graph: GraphModule, last: dict[Node, Node], sizes: dict[Node, int]) -> dict[Node, Node]:
    """Until when values live that an exchange is the last to read, where a graph has several: until a kernel waits for the exchange.

    Kernels and exchanges run in order, on a stream each (lowering/ascend/streams.py, lowering/ascend/acl_graph/multi_stream.py). What an
    operator gives beside other results counts as before: they are one value here, of which the exchange reads the smallest.
    """
    exchanges = [node for node in sizes if (primitive := of_target(node.target)) is not None and primitive.travels]
    if len(exchanges) <= 2:
        return {}
    number, ends, waited = {node: i for i, node in enumerate(exchanges)}, dict[Node, Node](), dict[Node, int]()
    sent = [[source for source, reader in last.items() if reader is node and not _several(source)] for node in exchanges]
    done, before = 0, exchanges[0]
    for node in graph.graph.nodes:
        waited[node] = max((waited[source] for source in node.all_input_nodes), default=0)
        if node in number:
            waited[node] = number[node] + 1
        elif sizes.get(node):
            ends.update({source: before for sources in sent[done : waited[node]] for source in sources})
            done = max(done, waited[node])
        before = node
    return ends


def _several(node: Node) -> bool:
    return isinstance(node.meta.get("val"), list | tuple)


def _own_bytes(node: Node, donated: set[Node]) -> int:
    """Bytes a node allocates: nothing for views, unpacking, and results that replace a donated pool."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or shares(target) or node in donated:
        return 0
    values = _flat(node.meta.get("val"))
    primitive = of_target(target)
    pools = {result for _, result in primitive.donates} if primitive else set()
    return nbytes(*[v for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in pools])


def _value(arg: object) -> object:
    if isinstance(arg, Node):
        return arg.meta["val"]
    if isinstance(arg, (list, tuple)):
        return [_value(a) for a in arg]
    return arg


def _flat(value: object) -> list[object]:
    if isinstance(value, (list, tuple)):
        return [v for part in value for v in _flat(part)]
    return [value]
