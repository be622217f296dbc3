"""Links converted bodies into one GE graph: each body is converted once and copied for every call."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ...graphs.errors import LoweringError
from ...graphs.types import Signature
from ..artifact import graph_io
from ..platform import CPU, Platform
from . import streams
from .convert import GeBody, Port, add_data, add_outputs, convert_body, describe, describe_output, name_ports
from .fold import FOLDED
from .ge_file import Folded, GeFile, messages, serialised
from .options import Operand, drop_later_attributes, graph_options, operand_options
from .toolchain.harness import Torchair

_LAYER = re.compile(r"\w+\.(?:(.+)\.)?layers\.(\d+)\.")
_NOT_EMPTY = "ge.exec.allTensorNotEmpty"


@dataclass
class _Builder:
    """A GE graph under construction.

    Attributes:
        model: the `ModelDef` message.
        values: port of each node of the main graph, or the ports of a call; of a state operand the port of its newest value.
        operand: placeholder -> its position.
        written: state operand -> whether a GE output must be bound to its memory to carry the new value.
        prefixes: how often each prefix of operator names has been used.
        patches: (operator, attribute, kind) of what differs between ranks.
        control: `name:-1` of operators that must run although nobody reads them.
        options, engine: compile options of the graph and of the engine.
    """

    model: Any
    values: dict[fx.Node, Any] = field(default_factory=dict)
    operand: dict[fx.Node, int] = field(default_factory=dict)
    written: dict[fx.Node, bool] = field(default_factory=dict)
    prefixes: dict[str, int] = field(default_factory=dict)
    patches: list[tuple[str, str, str]] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)

    @property
    def ops(self) -> Any:
        return self.model.graph[0].op


def link(graph: fx.GraphModule, signature: Signature, ta: Torchair, name: str = "graph", platform: Platform = CPU) -> GeFile:
    """Makes one GE graph of a graph lowered for GE.

    Constants are copied with their body, as torchair would have emitted them: GE's fusions treat a constant with two readers
    differently, and sharing constants saves hardly any memory.

    Args:
        graph: placeholders are `signature.operands`; then calls of bodies and getitem; results are `signature.outputs`, with or
            without the state operands behind them. A call of `fold.FOLDED` is not converted: its results are operands of the GE graph.
        signature: of the program; bodies may write its state.
        ta: torchair, loaded.
        name: of the GE graph.
        platform: decides on options that torchair leaves off, and on attributes that it always writes.

    Raises:
        LoweringError: the graph has another form, a body cannot be converted, or bodies disagree on options.
    """
    builder = _Builder(messages().ModelDef())
    builder.model.graph.add().name = name
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    calls = [node for node in graph.graph.nodes if node.op == "call_module" and node.target != FOLDED]
    if len(placeholders) != len(signature.operands):
        raise LoweringError(f"the graph has {len(placeholders)} operands, its signature {len(signature.operands)}")
    state = set(placeholders[len(signature.params) : len(signature.params) + len(signature.state)])
    results = _results(graph, signature, placeholders)
    bodies = _bodies(graph, calls, ta)
    if not platform.serial:
        for body in {id(body): body for body in bodies.values()}.values():
            streams.label(body.ops)
    # `Node.args` is made anew each time it is asked for.
    read = {args[operand] for node in calls for args in [node.args] for operand in bodies[node].feeds.values()}
    folded, derived = _folded(graph, placeholders)
    operands, values_at_load = [*placeholders, *derived], set(derived)
    feeds = _data(builder, operands, read | set(results))
    for node in graph.graph.nodes:
        if node.target == FOLDED or node in values_at_load:
            continue
        if node.op == "call_module":
            _call(builder, node, bodies[node], state)
        elif node.op == "call_function" and node.target is operator.getitem:
            builder.values[node] = builder.values[node.args[0]][node.args[1]]
        elif node.op not in ("placeholder", "output"):
            raise LoweringError(f"the main graph has {node.op} {node.name} ({node.target}); legal are calls of bodies and getitem")
    carried = [node for node, carry in builder.written.items() if carry]
    ports = [*_distinct(builder, results), *(builder.values[node] for node in carried)]
    add_outputs(builder.model.graph[0], [(port.tensor, port.val) for port in ports], builder.control, len(feeds))
    donations = tuple((len(results) + i, builder.operand[node]) for i, node in enumerate(carried))
    drop_later_attributes(builder.ops, platform)
    fixed = len(signature.params) + len(signature.state)
    # Step inputs lie between the state and the derived values.
    fed = [Operand(operands[i].meta["val"], i < fixed or i >= len(placeholders)) for i in feeds]
    if empty := [str(operands[i].meta.get("leaf", i)) for i, own in zip(feeds, fed, strict=True) if own.fixed and not own.value.numel()]:
        raise LoweringError(
            f"{', '.join(empty)} have no values: GE loads no graph with a frozen input of size 0 (hicann/ge@ffdcbc9, graph_manager.cc); "
            "legal is to leave them out of the model"
        )
    return GeFile(
        graph=serialised(builder.model),
        options=builder.options
        | operand_options(fed, len(results), {feeds.index(operand): output for output, operand in donations})
        | graph_options(platform),
        donations=donations,
        bound=tuple(sorted(builder.operand[node] for node, carry in builder.written.items() if not carry)),
        inputs=len(placeholders),
        outputs=len(results),
        patches=tuple(builder.patches),
        feeds=None if feeds == [*range(len(placeholders) + len(derived))] else tuple(feeds),
        engine=builder.engine,
        folded=folded,
    )


def _folded(graph: fx.GraphModule, placeholders: list[fx.Node]) -> tuple[Folded | None, list[fx.Node]]:
    """The graph of derived values, and their nodes by number."""
    call = next((node for node in graph.graph.nodes if node.op == "call_module" and node.target == FOLDED), None)
    if call is None:
        return None, []
    derived = sorted(call.users, key=lambda node: int(str(node.args[1])))
    module: Any = graph.get_submodule(FOLDED)
    order: dict[Any, int] = {param: i for i, param in enumerate(placeholders)}
    return Folded(graph_io.encode(module), tuple(order[param] for param in call.args), len(derived)), derived


def _results(graph: fx.GraphModule, signature: Signature, placeholders: list[fx.Node]) -> list[fx.Node]:
    returned: Any = graph.graph.output_node().args[0]
    first = len(signature.params)
    nodes, own = list(returned), placeholders[first : first + len(signature.state)]
    if len(nodes) == len(signature.results) and nodes[len(signature.outputs) :] == own:
        nodes = nodes[: len(signature.outputs)]
    if len(nodes) != len(signature.outputs) or not all(isinstance(node, fx.Node) for node in nodes):
        raise LoweringError(f"the graph returns {len(nodes)} values, its signature has {len(signature.outputs)} outputs beside the state")
    return nodes


def _data(builder: _Builder, placeholders: list[fx.Node], used: set[Any]) -> list[int]:
    """Adds Data operators for the operands that are read, the only ones that torchair keeps; returns their positions."""
    feeds: list[int] = []
    names: set[str] = set()
    for i, node in enumerate(placeholders):
        builder.operand[node] = i
        if node not in used:
            continue
        name = re.sub(r"[^\w./-]", "_", str(node.meta.get("leaf", node.name)))
        if name in names:
            raise LoweringError(f"two operands are called {name}")
        names.add(name)
        add_data(builder.ops, len(feeds), name, node.meta["val"])
        feeds.append(i)
        builder.values[node] = Port(f"{name}:0", node.meta["val"])
    return feeds


def _bodies(graph: fx.GraphModule, calls: Sequence[fx.Node], ta: Torchair) -> dict[fx.Node, GeBody]:
    """Body of each call; a module is converted once, however many names it has."""
    converted: dict[int, GeBody] = {}
    bodies: dict[fx.Node, GeBody] = {}
    for node in calls:
        module: Any = graph.get_submodule(str(node.target))
        operands = sum(inner.op == "placeholder" for inner in module.graph.nodes)
        if len(node.args) != operands or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
            raise LoweringError(f"{node.name} is called with {node.args}, {dict(node.kwargs)}; legal are {operands} nodes, one an operand")
        if id(module) not in converted:
            converted[id(module)] = convert_body(module, ta, str(node.target))
        bodies[node] = converted[id(module)]
    return bodies


def _call(builder: _Builder, node: fx.Node, body: GeBody, state: set[fx.Node]) -> None:
    _merge_options(builder, body, str(node.target))
    args: list[Any] = list(node.args)
    prefix = _prefix(builder, node)
    names = {tensor: builder.values[args[operand]].tensor for tensor, operand in body.feeds.items()}
    # What waits for an operand waits for what gives it.
    names |= {f"{own.rpartition(':')[0]}:-1": f"{given.rpartition(':')[0]}:-1" for own, given in names.items()}
    _copy(builder.ops, body, prefix, names)
    builder.patches += [(prefix + op, attribute, kind) for op, attribute, kind in body.patches]
    builder.control += [prefix + tensor for tensor in body.control]
    builder.values[node] = [_named(port, prefix, names) for port in body.results]
    for operand, port in body.written.items():
        if args[operand] not in state:
            raise LoweringError(f"{node.name} ({node.target}) writes {args[operand]}; legal are the state operands of the program")
        # Later calls read this call's result instead of the operand: GE orders operators by data alone.
        builder.values[args[operand]] = _named(port, prefix, names)
        builder.written[args[operand]] = builder.written.get(args[operand], False) or operand in body.donated


def _copy(ops: Any, body: GeBody, prefix: str, names: Mapping[str, str]) -> None:
    for op in body.ops:
        new = ops.add()
        new.CopyFrom(op)
        new.name = prefix + op.name
        for i, tensor in enumerate(op.input):
            if tensor:
                new.input[i] = names.get(tensor) or prefix + tensor


def _named(port: Port, prefix: str, names: Mapping[str, str]) -> Port:
    return replace(port, tensor=names.get(port.tensor) or prefix + port.tensor)


def _prefix(builder: _Builder, node: fx.Node) -> str:
    """`layer07_gated_deltanet/` where most operands belong to that layer, else the name of the call; made unique by a number."""
    leaves = (str(arg.meta.get("leaf", "")) for arg in node.args if isinstance(arg, fx.Node))
    layers = Counter(match.groups() for leaf in leaves if (match := _LAYER.match(leaf))).most_common(2)
    prefix = node.name
    # A layer may also read the norm of the next one; a call that reads as much of two layers gets no layer number.
    if layers and (len(layers) == 1 or layers[0][1] > layers[1][1]):
        part, number = layers[0][0]
        prefix = re.sub(r"\W", "_", f"{part + '_' if part else ''}layer{int(number):02d}_{node.target}")
    builder.prefixes[prefix] = builder.prefixes.get(prefix, 0) + 1
    return f"{prefix}/" if builder.prefixes[prefix] == 1 else f"{prefix}.{builder.prefixes[prefix]}/"


def _merge_options(builder: _Builder, body: GeBody, target: str) -> None:
    for options, new in ((builder.options, body.options), (builder.engine, body.engine)):
        for key, value in new.items():
            if key == _NOT_EMPTY:
                options[key] = min(options.get(key, value), value)
            elif options.setdefault(key, value) != value:
                raise LoweringError(f"option {key} is {value!r} for body {target} and {options[key]!r} for an earlier one; a graph has one")


def _distinct(builder: _Builder, results: Sequence[fx.Node]) -> list[Port]:
    """Copies results that are operands or that are returned twice: callers expect each result in memory of its own."""
    in_use, ports = {builder.values[node].tensor for node in builder.operand if node in builder.values}, []
    for i, node in enumerate(results):
        port: Port = builder.values[node]
        if port.tensor in in_use:
            op = builder.ops.add(name=f"result{i}", type="Identity")
            op.input.append(port.tensor)
            describe(op.input_desc.add(), port.val, "x")
            describe_output(op, port.val)
            name_ports(op)
            port = Port(f"result{i}:0", port.val)
        in_use.add(port.tensor)
        ports.append(port)
    return ports
