"""Turns a program into its traced graph: functional, static, on global shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from .. import compile_count, tree
from .. import ops as ops
from ..errors import GraphError
from ..stage import Stage
from ..types import Aval, Leaf, Program, Signature, leaf_name
from .block import collecting
from .record import record


@dataclass(frozen=True)
class TracedProgram(Stage):
    """A program as a graph over global shapes. Placeholders follow `signature.operands`, results `signature.results`."""

    program: Program
    graph: GraphModule
    signature: Signature

    @property
    def title(self) -> str:
        return f"{self.program.bucket.name} traced"


def trace(program: Program) -> TracedProgram:
    """Traces a program on tensors without values, so nothing is allocated.

    Raises:
        GraphError: when the program returns no outputs and state, or a new state of another structure, shape or dtype.
    """
    operands = signature_of(program)
    outputs: list[Leaf] = []

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        results, leaves = call_flat(program, operands, values)
        outputs.extend(leaves)
        return results

    graph = traced_graph(flat, [(leaf.aval.shape, leaf.aval.dtype) for leaf in operands.operands])
    signature = Signature(operands.params, operands.state, operands.inputs, tuple(outputs))
    name_placeholders(graph, signature)
    return TracedProgram(program, graph, signature)


def signature_of(program: Program) -> Signature:
    """Signature of a program's operands; outputs are known after tracing."""
    return Signature(tree.leaves("params", program.params), tree.leaves("state", program.state), tree.leaves("inputs", program.inputs), ())


def call_flat(program: Program, signature: Signature, values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Leaf]]:
    """Calls a program on flat operands; returns flat results and the leaves of the outputs among them.

    Raises:
        GraphError: when forward returns anything but a pair of trees of tensors, or a new state unlike the state.
    """
    params, state = len(signature.params), len(signature.state)
    result: object = program.forward(
        tree.unflatten(program.params, values[:params]),
        tree.unflatten(program.state, values[params : params + state]),
        tree.unflatten(program.inputs, values[params + state :]),
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise GraphError(f"{program.name}: forward returned {type(result).__name__}; it returns the pair (outputs, new state)")
    named, stored = tree.flatten(result[0]), tree.flatten(result[1])
    for kind, leaves in (("output", named), ("state", stored)):
        for name, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise GraphError(f"{program.name}: {kind} {name or '(the whole)'} is {leaf!r}; every leaf is a tensor")
    old = [(leaf.path, leaf.aval) for leaf in signature.state]
    new = [(name, Aval(tuple(t.shape), t.dtype)) for name, t in stored]
    for (a, was), (b, now) in zip(old, new, strict=False):
        if a != b or was.shape != now.shape or was.dtype != now.dtype:
            raise GraphError(f"{program.name}: state {a} is {was}, the new state returns {b} as {now}; they must be equal")
    if len(old) != len(new):
        raise GraphError(f"{program.name}: state has {len(old)} tensors, the new state {len(new)}; they must be equal")
    outputs = [Leaf(leaf_name("outputs", name), Aval(tuple(t.shape), t.dtype)) for name, t in named]
    return [t for _, t in (*named, *stored)], outputs


def traced_graph(fn: Callable[..., list[torch.Tensor]], operands: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> GraphModule:
    """The graph of a flat function of CPU tensors, gradients off."""
    compile_count.record("trace")
    with collecting():
        return record(fn, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in operands], FakeTensorMode(), "cpu")


def name_placeholders(graph: GraphModule, signature: Signature) -> None:
    """Records each placeholder's leaf name, so that a printed graph reads like the program."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(nodes, signature.operands, strict=True):
        node.meta["leaf"] = leaf.name
