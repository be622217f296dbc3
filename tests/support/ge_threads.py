"""GE graphs of the operators that public reports of devices were about, and what the table says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from support.ge_calls import message

from npucompile.lowering.ascend.ge_file import GeFile, messages
from npucompile.lowering.ascend.ge_operators import operators
from npucompile.lowering.ascend.ge_types import graph_types
from npucompile.lowering.ascend.legality.check import Checker
from npucompile.lowering.ascend.legality.graph_rules import GRAPH_RULES
from npucompile.lowering.ascend.legality.matching import types_of
from npucompile.lowering.ascend.legality.nodes import of_ge
from npucompile.lowering.ascend.legality.table import FORM, RULE, table
from npucompile.lowering.ascend.legality.threads import Thread
from npucompile.lowering.ascend.operators.attention_rules import SINK
from npucompile.lowering.ascend.operators.legality_rules import rule_of
from npucompile.lowering.platform import CANN_RELEASES, Platform

OPERATOR = "reported"
CHIP, CANN = "ascend910_93", "8.5"
"""What reports are checked for; those that tell a release which a build is for, for that one."""
OPTIONS = {SINK: "1"}


def graph_of(thread: Thread) -> tuple[Any, frozenset[str]]:
    """A graph of the reported operator behind one `Data` operator for each input, and the tensors that are stored in NZ."""
    graph = messages().GraphDef()
    nz = set()
    for index, (slot, written) in enumerate(thread.given.inputs.items()):
        declared, _, layout = written.partition(" ")
        graph.op.append(_operator("Data", f"{slot}_source", {}, [declared], {"index": index}))
        nz.update([f"{slot}_source:0"] if layout == "NZ" else [])
    op = _operator(thread.operator, OPERATOR, dict.fromkeys(thread.given.inputs, True), [""], thread.given.attributes)
    for slot, source in thread.given.sources.items():
        results = [*[""] * source.output, thread.given.inputs[slot]]
        graph.op.append(_operator(source.operator, f"{slot}_producer", {}, results, source.attributes))
        cast = _operator("Cast", f"{slot}_cast", {"x": True}, results[-1:], {})
        cast.input[0] = f"{slot}_producer:{source.output}"
        graph.op.append(cast)
        op.input[list(thread.given.inputs).index(slot)] = f"{slot}_cast:0"
    graph.op.extend([*(_operator(kind, f"beside_{kind}", {}, [""], {}) for kind in thread.given.beside), op])
    return graph, frozenset(nz)


def refused_by(thread: Thread) -> dict[str, str]:
    """Messages of what refuses the reported operator, by the name that `Thread.refused_by` uses."""
    graph, nz = graph_of(thread)
    platform = Platform(CHIP, next((release for release in CANN_RELEASES if (thread.cann or "").startswith(release)), CANN))
    nodes = of_ge(operators(graph.op), graph_types(operators(graph.op), nz), range(len(graph.op)))
    checker, node = Checker(table(), platform, OPTIONS), nodes[-1]
    checker.add(node)
    told = {violation.message for violation in checker.checked.violations}
    rows = table().facts(node.type, platform.chip, platform.cann)
    assert any(row.what == FORM for row in rows), f"the table knows nothing of {node.type}"
    refused = [("types", message) for message, _ in types_of(node, rows)]
    refused += [(row.rule, rule_of(node, row.rule)(node, OPTIONS, **row.parameters)) for row in rows if row.what == RULE]
    of_graph = [(rule.__name__, message) for rule in GRAPH_RULES for broken, message in rule(nodes) if broken.name == OPERATOR]
    return {name: message for name, message in refused if message in told} | dict(of_graph)


def file_of(thread: Thread) -> GeFile:
    """The graph of a report as a GE file."""
    model = messages().ModelDef()
    model.graph.append(graph_of(thread)[0])
    inputs = len(thread.given.inputs)
    return GeFile(graph=model.SerializeToString(), options={}, donations=(), bound=(), inputs=inputs, outputs=0, patches=())


def mended(thread: Thread, **changes: Mapping[str, Any]) -> Thread:
    """The report with other inputs, attributes or sources."""
    return replace(thread, given=replace(thread.given, **changes))


def _operator(kind: str, name: str, inputs: Mapping[str, bool], results: list[str], attributes: Mapping[str, Any]) -> Any:
    op = message(kind, inputs, results, (), attributes)
    op.name = name
    return op
