"""Weights of the next products are fetched into the cache while links carry messages, and HBM is idle.

Chosen by the cost model; off unless a build asks for it, since nobody has measured it here: vllm-ascend took its own out (pull request
11949), cann-recipes has it (docs/cann/en/prefetch_principles.md, 0cc6cd0).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...graphs.types import Mesh
from ..artifact import graph_io
from ..platform import Platform
from .acl_graph import second_stream
from .acl_graph.file import AclFile, graph_of
from .convert import name_ports
from .cost.estimate import timed_launches
from .cost.parameters import parameters
from .cost.timing import Topology, duration
from .ge_file import FETCH, GeFile, parse, serialised
from .launches import body_of
from .operators.node import Node
from .operators.record import NpuOperator
from .operators.table import BY_TYPE
from .overlap import EARLIER_TOKENS

FETCHES = (FETCH, second_stream.FETCH)
"""Types of the operators that fetch: they give nothing, and a graph computes the same without them."""
LEAST_BYTES = 2**20
"""Fewer are not worth a launch."""


class Fetch(NamedTuple):
    """Some bytes of a weight.

    Attributes:
        beside: the collective beside which they are fetched.
        operand: number of the operand that has them.
        max_size: how many, from the first on.
    """

    beside: Node
    operand: int
    max_size: int


def fetches(graph: GeFile | AclFile, mesh: Mesh, platform: Platform) -> list[Fetch]:
    """What is fetched beside collectives: weights of the products up to the next one, in the order in which they are read.

    As much as HBM gives while links carry messages without rows: so it is the same for all batch sizes, and no product waits for it.
    A dispatch has the shared expert beside it. Left out are weights larger than the cache, but for those of experts, which are read one
    behind the other; products of other streams; and steps that send tokens in parts, whose exchanges have kernels beside them.

    Raises:
        LoweringError: as `estimate`.
    """
    speeds = parameters(platform.chip)
    timed = timed_launches(graph, speeds, mesh, EARLIER_TOKENS, platform)
    bodies = itertools.groupby(timed.started, key=lambda node: body_of(node.name))
    if any(sum(_record(node).collective == "moe_dispatch" for node in nodes) > 1 for _, nodes in bodies):
        return []
    topology, rate = Topology.of(mesh, speeds.npus_per_node), speeds.hbm_bytes_per_s * speeds.memory_fraction
    operands = {f"{node.name}:0": node.operand for node in timed.nodes if node.operand >= 0}
    found, beside, room, read = list[Fetch](), None, 0.0, True
    for node, stages in zip(timed.started, timed.works, strict=True):
        if all(work.group for work in stages) and _record(node).collective != "moe_dispatch":
            # Collectives without a product between them are one time in which HBM is idle.
            beside, room, read = (node, 0.0, False) if read else (beside, room, False)
            room += rate * sum(duration(replace(work, sent_bytes=0.0), speeds, topology).total_s for work in stages)
            left = speeds.cache_bytes
        elif beside is not None and not node.stream and any(work.bf16_ops or work.int8_ops for work in stages):
            read = True
            for tensor in node.reads:
                size, operand = timed.facts.types[tensor].nbytes, timed.facts.resident.get(tensor)
                fits = size <= speeds.cache_bytes or _record(node).takes_tokens is not None
                if operand is None or tensor in timed.facts.pools or not fits:
                    continue
                if (taken := int(min(size, room, left))) >= LEAST_BYTES:
                    room, left = room - taken, left - taken
                    found.append(Fetch(beside, operands[operand], taken))
    return found


def _record(node: Node) -> NpuOperator:
    return BY_TYPE.get(node.type) or NpuOperator()


def in_ge(ge_file: GeFile, mesh: Mesh, platform: Platform) -> GeFile:
    """The graph with an operator for each fetch, as torchair writes it for `npu_prefetch`; arguments and errors as of `fetches`."""
    if not platform.prefetch or not (found := fetches(ge_file, mesh, platform)):
        return ge_file
    model = parse(ge_file.graph)
    by_name = {op.name: op for op in model.graph[0].op}
    data = {ge_file.data[op.attr["index"].i]: op for op in model.graph[0].op if op.type == "Data"}
    before, added = dict[str, list[Any]](), list[str]()
    for number, fetch in enumerate(found):
        weight, beside = data[fetch.operand], by_name[fetch.beside.name]
        name = f"{body_of(beside.name)}/{FETCH}_{number}"
        op = type(weight)(name=name, type=FETCH, input=[f"{weight.name}:0", f"{beside.input[0].rpartition(':')[0]}:-1"])
        op.input_desc.add().CopyFrom(weight.output_desc[0])
        op.input_desc[0].name = "src"
        op.attr["max_size"].i, op.attr["type"].i = fetch.max_size, 6
        name_ports(op)
        before.setdefault(beside.name, []).append(op)
        added.append(name)
    ordered = [op for own in model.graph[0].op for op in (*before.get(own.name, ()), own)]
    copies = [type(op).FromString(op.SerializeToString()) for op in ordered]
    del model.graph[0].op[:]
    model.graph[0].op.extend(copies)
    (end,) = (op for op in model.graph[0].op if op.type == "NetOutput")
    end.input.extend(f"{name}:-1" for name in added)
    return replace(ge_file, graph=serialised(model))


def in_captured(acl_file: AclFile, mesh: Mesh, platform: Platform) -> AclFile:
    """The file with a node for each fetch on the second stream, before the collective that it runs beside. As `in_ge`."""
    if not platform.prefetch or not (found := fetches(acl_file, mesh, platform)):
        return acl_file
    graph = graph_io.decode(acl_file.graph)
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    # Operators that are read by name alone give their nodes other names.
    number = {node.name: i for i, node in enumerate(graph_of(acl_file).graph.nodes)}
    bodies, before = list(acl_file.bodies), [number[fetch.beside.name.rpartition("/")[2]] for fetch in found]
    for fetch, at in zip(found, before, strict=True):
        with graph.graph.inserting_before(nodes[at]):
            arguments = nodes[fetch.operand], nodes[at].all_input_nodes[0], fetch.max_size
            graph.graph.call_function(torch.ops.npu.npu_prefetch.default, arguments).meta["val"] = None
    for at in reversed(before):
        bodies.insert(at - acl_file.operands, bodies[at - acl_file.operands])

    def moved(border: int) -> int:
        return border + sum(at < border for at in before)

    own = [(at + i, at + i + 1) for i, at in enumerate(before)]
    return replace(
        acl_file,
        graph=graph_io.encode(graph),
        cuts=tuple(map(moved, acl_file.cuts)),
        calls=tuple((body, len(list(run))) for body, run in itertools.groupby(bodies)),
        beside=tuple(sorted([*((moved(first), moved(stop)) for first, stop in acl_file.beside), *own])),
    )
