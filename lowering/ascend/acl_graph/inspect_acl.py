"""Inspects `.aclgraph` files: operator counts, launches, text, and a proof that pools are written in place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from ....graphs.errors import LoweringError
from ....graphs.primitive import nbytes
from ....graphs.types import DTYPE_NAMES, Signature
from ..inspect_weights import LARGE_BYTES
from ..operators.table import BY_TARGET, FORMS, GROUP_ARGUMENTS, HOST_LISTS, group_of
from .file import AclFile, graph_of
from .formats import TRANSPOSED
from .second_stream import STREAM, beside, on_host
from .second_stream import check as check_second_stream

_CLONE = "aten.clone.default"


def launches(nodes: Iterable[Node]) -> list[Node]:
    """Operators that start a kernel in each step, in order: neither views, nor unpackings, nor waits for a collective.

    A graph of this backend computes nothing from constants alone. A slice or a transposition is a view here, where GE copies; a reader
    that needs its values side by side has a `clone` in front of it, which counts.

    Args:
        nodes: of `file.graph_of`, or of a lowered graph.
    """
    return [node for node in nodes if node.op == "call_function" and _launches(node)]


def _launches(node: Node) -> bool:
    return not (on_host(node) or str(node.target).startswith("_c10d_functional.wait_tensor"))


def copied_operands(launched: Iterable[Node]) -> int:
    """How many copies operators may launch besides themselves: one for each operand that is not contiguous.

    Most of CANN's operators copy such an operand first (`l0op::Contiguous`, hicann/ops-math math/mul/op_api/aclnn_mul.cpp at c41933244c31);
    some take it as it is, so this is the most there can be. Matrix products take a transposed matrix as it lies.

    Args:
        launched: what `launches` returns.
    """
    copied = 0
    for node in launched:
        record, form = BY_TARGET.get(str(node.target)), FORMS.get(str(node.target))
        if record is None or not record.copies:
            sources = [
                source for source in node.all_input_nodes if not (form and form.takes_transposed and str(source.target) == TRANSPOSED)
            ]
            copied += sum(isinstance(val, torch.Tensor) and not val.is_contiguous() for val in (source.meta["val"] for source in sources))
    return copied


def launches_by_body(acl_file: AclFile) -> dict[str, list[str]]:
    """Names of the operators that `launches` counts, of each body, in the order of the bodies' first operators."""
    return _by_body(acl_file, _launches)


def launched_by_kind(acl_file: AclFile) -> dict[str, dict[str, int]]:
    """The most launches of each operator in a body of each kind: what all layers share is computed by the first of its kind.

    Copies are left out: which values are views, and which must be copied to lie side by side, depends on sizes, as a dimension of one has
    any stride.
    """
    kinds: dict[str, Counter[str]] = {}
    for body, names in launches_by_body(acl_file).items():
        kind = re.sub(r"_\d+$", "", body)
        kinds[kind] = kinds.get(kind, Counter()) | Counter(name for name in names if name != _CLONE)
    return {kind: dict(counts) for kind, counts in kinds.items()}


def launch_facts(acl_file: AclFile) -> dict[str, Any]:
    """Launches of a step, copies that they may make besides, how often the host reads lengths, and whether the graph is captured."""
    started = launches(graph_of(acl_file).graph.nodes)
    reads = len(acl_file.cuts)
    return {"launches": len(started), "copied_operands": copied_operands(started), "host_reads": reads, "captured": acl_file.captured}


def census_by_body(acl_file: AclFile) -> dict[str, dict[str, int]]:
    """Operators of each body by name, views included, in the order of the bodies' first operators."""
    return {body: dict(sorted(Counter(names).items())) for body, names in _by_body(acl_file, _is_operator).items()}


def _is_operator(node: Node) -> bool:
    return str(node.target) != "operator.getitem"


def _by_body(acl_file: AclFile, counted: Callable[[Node], bool]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    nodes = [node for node in graph_of(acl_file).graph.nodes if node.op == "call_function"]
    for node, body in zip(nodes, acl_file.bodies, strict=True):
        names.setdefault(body, []).extend([str(node.target)] if counted(node) else [])
    return names


def text(acl_file: AclFile) -> str:
    """The graph, an operator a line, with a line where it is cut."""
    lines, bodies, nodes = list[str](), acl_file.bodies, list(graph_of(acl_file).graph.nodes)
    second = beside(acl_file, nodes)
    for number, node in enumerate(nodes):
        if number in acl_file.cuts:
            lines.append("-- the host reads lengths, and updates the attention behind --")
        if node.op == "placeholder":
            lines.append(f"%{number} = operand {node.meta.get('leaf', '')} {_type(node.meta['val'])}")
        elif node.op == "call_function":
            arguments = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
            stream = f" on {STREAM}" if node in second and not on_host(node) else ""
            lines.append(f"%{number} = {next(bodies)}/{node.target}({arguments}) {_type(node.meta['val'])}{stream}")
        else:
            lines.append(f"return {node.args[0]}")
    return "\n".join(lines)


def _type(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_type, value))})"
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    return f"{DTYPE_NAMES.get(dtype, str(dtype))}[{','.join(map(str, shape))}]" if dtype is not None else str(value)


def check(acl_file: AclFile, signature: Signature) -> None:
    """Proves that the file fits a signature, writes pools alone, in place, bakes no length in, and needs no order of its streams.

    Raises:
        LoweringError: naming what is wrong.
    """
    if (acl_file.inputs, acl_file.outputs) != (len(signature.operands), len(signature.outputs)):
        has, wanted = (acl_file.inputs, acl_file.outputs), (len(signature.operands), len(signature.outputs))
        raise LoweringError(f"the graph has {has[0]} operands and {has[1]} results; its signature has {wanted[0]} and {wanted[1]}")
    first = len(signature.params)
    state = range(first, first + len(signature.state))
    if wrong := [signature.operands[operand].name for operand in acl_file.written if operand not in state]:
        raise LoweringError(f"the graph writes {', '.join(wrong)}; legal are the {len(state)} pools of its signature")
    operands: dict[Any, int] = {node: i for i, node in enumerate(graph_of(acl_file).graph.nodes) if node.op == "placeholder"}
    graph = next(iter(operands)).graph
    for node in graph.nodes:
        if (form := FORMS.get(str(node.target))) is not None and form.in_place:
            raise LoweringError(f"{node.name} ({node.target}) copies a pool to change a part of it; legal is its form that writes in place")
        size = nbytes(node.args[0].meta["val"]) if str(node.target) == "aten.copy_.default" else 0
        if size > LARGE_BYTES and operands.get(node.args[0]) in state:
            name = signature.operands[operands[node.args[0]]].name
            raise LoweringError(f"{node.name} writes all of {name}, {size} bytes; legal above {LARGE_BYTES} bytes are writes of rows")
        for argument in HOST_LISTS.get(str(node.target), ())[1:]:
            if not isinstance(node.kwargs.get(argument), Node):
                raise LoweringError(
                    f"{node.name} ({node.target}) has {argument} {node.kwargs.get(argument)} in every step; legal are lengths of the step"
                )
    check_second_stream(acl_file)


def collectives(acl_file: AclFile) -> list[tuple[str, str, torch.Tensor]]:
    """Operator, group and first result of each operator that communicates, in order: a stream runs them as they are."""
    called = []
    for node in graph_of(acl_file).graph.nodes:
        if (name := str(node.target)) in GROUP_ARGUMENTS:
            value = node.meta["val"]
            called.append((name, group_of(name, node.args, node.kwargs), value[0] if isinstance(value, list | tuple) else value))
    return called
