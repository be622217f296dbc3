"""Inspects GE graphs: operator counts, text, and a proof that donated memory is updated in place."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...graphs.errors import LoweringError
from ...graphs.types import Leaf, Signature
from .ge_file import GeFile, messages, parse
from .ge_operators import read
from .launches import body_of, launches
from .operators.table import BY_TYPE, IN_PLACE, VIEWS
from .operators.tensor_type import DTYPES

_proved = set[tuple[Any, ...]]()
"""All that `check` of the last graph without a breach depends on, which is the same for graphs that differ in sizes alone."""
_HIDDEN = re.compile(r"_(in|out)put_name_(key|value)|_readable_value|value|index")


@dataclass
class MemoryFlow:
    """Which tensors lie in the memory of which operand.

    Attributes:
        operand: tensor -> operand in whose memory it lies: the operand, a view of it, or its value after an update in place.
        version: tensor -> how often the operand had been written when the tensor was computed.
        latest: operand -> tensor with its newest value, before any view.
        writers: operand -> operators that wrote it in place, in order.
        readers: (operand, version) -> operators that read it.
        viewed: tensors that are views.
        breaches: writes that GE may not do in place.
    """

    operand: dict[str, int]
    version: dict[str, int] = field(default_factory=dict)
    latest: dict[int, str] = field(default_factory=dict)
    writers: dict[int, list[Any]] = field(default_factory=dict)
    readers: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    viewed: set[str] = field(default_factory=set)
    breaches: list[str] = field(default_factory=list)


def follow_memory(ops: Iterable[Any], data: Mapping[str, int]) -> MemoryFlow:
    """Follows operands through views and through operators that write in place.

    Args:
        ops: OpDef messages in topological order.
        data: tensor -> operand, for the operands to follow.
    """
    flow = MemoryFlow(operand=dict(data), version=dict.fromkeys(data, 0), latest={operand: tensor for tensor, operand in data.items()})
    for op in ops:
        written = IN_PLACE.get(op.type, {})
        for tensor in op.input:
            if tensor in flow.operand:
                flow.readers.setdefault((flow.operand[tensor], flow.version[tensor]), []).append(op)
        for port, position in written.items():
            if position < len(op.input) and op.input[position] in flow.operand:
                _write(flow, op, op.input[position], f"{op.name}:{port}")
        if op.type in VIEWS and op.input[0] in flow.operand:
            out = f"{op.name}:0"
            flow.operand[out], flow.version[out] = flow.operand[op.input[0]], flow.version[op.input[0]]
            flow.viewed.add(out)
    return flow


def _write(flow: MemoryFlow, op: Any, old: str, new: str) -> None:
    operand = flow.operand[old]
    writers = flow.writers.setdefault(operand, [])
    if flow.version[old] != len(writers):
        flow.breaches.append(f"{op.name} overwrites {old}, which {writers[-1].name} has overwritten before")
    if old in flow.viewed:
        flow.breaches.append(f"{op.name} writes operand {operand} through the view {old}, which may be a copy")
    writers.append(op)
    flow.operand[new], flow.version[new], flow.latest[operand] = operand, len(writers), new


def census_by_body(graph: bytes) -> dict[str, dict[str, int]]:
    """Operators by type, for each prefix of their names; "" has the operators of the main graph.

    Raises:
        LoweringError: the bytes are no GE model.
    """
    return _by_body(read(graph))


def launched_by_body(graph: bytes) -> dict[str, dict[str, int]]:
    """Those of them that start a kernel in each step. Constants are left out: two of equal sizes are one."""
    return _by_body(launches(read(graph)))


def _by_body(ops: Iterable[Any]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for op in ops:
        counts.setdefault(body_of(op.name), Counter())[op.type] += 1
    return {prefix: dict(sorted(count.items())) for prefix, count in counts.items()}


def text(graph: bytes) -> str:
    """One line an operator: `name = Type(inputs) attribute=value : results`.

    Raises:
        LoweringError: the bytes are no GE model.
    """
    return "\n".join(_line(op) for op in parse(graph).graph[0].op) + "\n"


def _line(op: Any) -> str:
    attrs = [f"{key}={shown}" for key, value in sorted(op.attr.items()) if not _HIDDEN.fullmatch(key) and (shown := _attr(value))]
    if op.type in ("Data", "Const"):
        attrs.insert(0, _attr(op.attr["index"]) if op.type == "Data" else op.attr["_readable_value"].s.decode())
    inputs = ", ".join(op.input).rstrip(", ")
    shapes = ", ".join(shape(desc) for desc in op.output_desc)
    return " ".join([f"{op.name} = {op.type}({inputs})", *attrs]) + (f" : {shapes}" if shapes else "")


def shape(desc: Any) -> str:
    """Dtype and sizes of a tensor, as in `bf16[16,2,256]`; sizes that conversion leaves to GE are `bf16[?]`."""
    if "_meta" in desc.attr:
        return str(desc.attr["_meta"].s.decode())
    return f"{_dtypes().get(desc.dtype, '?')}[{','.join(map(str, desc.shape.dim)) or '?'}]"


@functools.cache
def _dtypes() -> dict[int, str]:
    return {messages().DataType.Value(long): short for long, short in DTYPES.items()}


def _attr(value: Any) -> str:
    kind = value.WhichOneof("value")
    if kind == "s":
        return repr(value.s.decode(errors="replace"))
    if kind == "list":
        items = value.list
        return str([x.decode(errors="replace") for x in items.s] or list(items.i) or [round(x, 6) for x in items.f] or list(items.b))
    if kind == "f":
        return f"{value.f:.6g}"
    return str(getattr(value, kind)).replace("\n", " ") if kind else ""


def check(ge_file: GeFile, signature: Signature) -> None:
    """Proves properties that neither torchair nor GE checks.

    Names are unique, inputs exist, Data operators are numbered from 0; every state operand that the graph takes is updated in its own
    memory by an operator that GE keeps, is never copied whole, and is not read after it was overwritten; prompts leave rows of pictures
    as they are; attention lengths are no constants.

    Args:
        ge_file: the linked graph.
        signature: of the program; its state is donated.

    Raises:
        LoweringError: naming every breach.
    """
    ops = list(read(ge_file.graph))
    # Names are for messages alone.
    depends = (ge_file.data, ge_file.outputs, ge_file.donations, ge_file.bound, len(signature.params), signature.state)
    structure = tuple(op.vertex for op in ops), tuple(op.attr["index"].i for op in ops if op.type == "Data"), depends
    if structure in _proved:
        return
    breaches = [*_form(ops, ge_file), *_lengths(ops)]
    if not breaches:
        breaches = _donation(ops, ge_file, signature)
    if breaches:
        raise LoweringError(f"the GE graph has {len(breaches)} breaches: " + "; ".join(breaches))
    _proved.clear()
    _proved.add(structure)


def misnamed(ops: Iterable[Any]) -> list[str]:
    """What is wrong with the names of operators, in order, and of the tensors and operators that they read or wait for."""
    breaches, ports = [], {"": 0}
    for op in ops:
        if op.name in ports:
            breaches.append(f"two operators are called {op.name}")
        for tensor in op.input:
            producer, _, port = tensor.rpartition(":")
            if not tensor:
                continue
            if producer not in ports or (port != "-1" and not 0 <= int(port or -2) < ports[producer]):
                breaches.append(f"{op.name} reads {tensor}, which no operator before it gives")
        ports[op.name] = len(op.output_desc)
    return breaches


def _form(ops: list[Any], ge_file: GeFile) -> list[str]:
    breaches = misnamed(ops)
    indices = [op.attr["index"].i for op in ops if op.type == "Data"]
    if sorted(indices) != list(range(len(ge_file.data))):
        breaches.append(f"data are numbered {indices}; legal is each of 0 to {len(ge_file.data) - 1} once")
    results = [[t for t in op.input if not t.endswith(":-1")] for op in ops if op.type == "NetOutput"]
    wanted = ge_file.outputs + len(ge_file.donations)
    if not results or ops[-1].type != "NetOutput":
        breaches.append("the last operator is not NetOutput")
    counts = [len(tensors) for tensors in results]
    if counts != [wanted] or [o for o, _ in ge_file.donations] != [*range(ge_file.outputs, wanted)]:
        declared = f"{ge_file.outputs} results and donations {ge_file.donations}"
        breaches.append(f"NetOutput has {counts} inputs for {declared}; legal is one for each, results first")
    return breaches


def _lengths(ops: list[Any]) -> list[str]:
    kinds = {op.name: op.type for op in ops}
    return [
        f"{op.name} has the constant {op.input[position]} as lengths; legal is a tensor of the step"
        for op in ops
        for position in (BY_TYPE[op.type].lengths if op.type in BY_TYPE else ())
        if position < len(op.input) and kinds.get(op.input[position].rpartition(":")[0]) == "Const"
    ]


def _donation(ops: list[Any], ge_file: GeFile, signature: Signature) -> list[str]:
    first = len(signature.params)
    state = {first + i: leaf for i, leaf in enumerate(signature.state)}
    data = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in ops if op.type == "Data"}
    flow = follow_memory(ops, {tensor: operand for tensor, operand in data.items() if operand in state})
    outputs = next(op for op in ops if op.type == "NetOutput")
    results = [tensor for tensor in outputs.input if not tensor.endswith(":-1")]
    donated = {operand: results[output] for output, operand in ge_file.donations}
    order = {op.name: i for i, op in enumerate(ops)}
    breaches = [*flow.breaches, *_copies(ops, flow, state), *_dead(ops, order, flow, state)]
    for operand in sorted(set(flow.latest) & set(state)):
        leaf, value = state[operand], donated.get(operand)
        writers = list(flow.writers.get(operand, ()))
        if not writers and value is None and not _only_read(leaf, signature):
            breaches.append(f"{leaf.name} is not written in place, and no output is bound to its memory")
        if value is not None and flow.operand.get(value) != operand:
            writers.append(ops[order[value.rpartition(":")[0]]])
        for version, writer in enumerate(writers):
            readers = flow.readers.get((operand, version), [])
            breaches += _late(ops, order, leaf, writer, [op for op in readers if op.type not in VIEWS and op.name != writer.name])
        if results[: ge_file.outputs].count(flow.latest[operand]):
            breaches.append(f"{leaf.name} is a result of the program and its own next state")
    illegal = sorted({*donated, *ge_file.bound, *flow.writers} - set(state))
    breaches += [f"operand {operand} ({signature.operands[operand].name}) is written and is no state" for operand in illegal]
    if claimed := sorted(set(ge_file.bound) - set(flow.writers)):
        breaches.append(f"operands {claimed} are said to be written in place, and no operator does")
    return breaches


def _only_read(leaf: Leaf, signature: Signature) -> bool:
    """Whether a pool may stay as it is: rows of pictures do in graphs of prompts; those that write them have no other pool."""
    return "picture_rows" in leaf.aval.axes and len(signature.state) > 1


def _copies(ops: list[Any], flow: MemoryFlow, state: Mapping[int, Leaf]) -> list[str]:
    breaches = []
    for op in ops:
        for tensor in op.input[: BY_TYPE[op.type].copies if op.type in BY_TYPE else 0]:
            if tensor in flow.operand:
                leaf = state[flow.operand[tensor]]
                breaches.append(f"{op.name} copies all {math.prod(leaf.aval.shape)} elements of {leaf.name}")
    return breaches


def _dead(ops: list[Any], order: Mapping[str, int], flow: MemoryFlow, state: Mapping[int, Leaf]) -> list[str]:
    live = _before(ops, order, ops[-1], 0)
    return [
        f"{op.name} writes {state[operand].name}, but no result waits for it: GE drops it"
        for operand, writers in flow.writers.items()
        for op in writers
        if op.name not in live
    ]


def _before(ops: list[Any], order: Mapping[str, int], last: Any, floor: int) -> set[str]:
    """Names of the operators that `last` depends on, itself included, from position `floor` on."""
    names, queue = {last.name}, [last]
    while queue:
        for name in queue.pop().producers:
            if name not in names and order[name] >= floor:
                names.add(name)
                queue.append(ops[order[name]])
    return names


def _late(ops: list[Any], order: Mapping[str, int], leaf: Leaf, writer: Any, readers: list[Any]) -> list[str]:
    """Readers of the old value that the writer does not depend on: GE may run them after it."""
    if not readers:
        return []
    # Operators are in topological order, so nothing before the first reader depends on a reader.
    earlier = _before(ops, order, writer, min(order[op.name] for op in readers))
    return [f"{op.name} reads {leaf.name}, and {writer.name} overwrites it without waiting" for op in readers if op.name not in earlier]
