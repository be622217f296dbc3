"""Checks of a graph for a GPU that need no GPU: its operators are torch's own, and every value of it is on the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node

from ...graphs.errors import LoweringError

NAMESPACES = ("aten", "prims")
DEVICE = torch.device("cuda", 0)


def check(graph: GraphModule) -> None:
    """Checks a lowered graph.

    Raises:
        LoweringError: an operator is none of torch's; or a value is not on the GPU, or of another shape or dtype than the graph says.
    """
    check_operators(graph)
    with FakeTensorMode():
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        operands = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE) for value in values]
        _Propagation(graph).run(*operands)


def check_operators(graph: GraphModule) -> None:
    """Refuses operators that are not torch's own: primitives, and native kernels, which are for CPUs.

    Raises:
        LoweringError: naming the operators.
    """
    targets = {node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    foreign = sorted(str(target) for target in targets if target.namespace not in NAMESPACES)
    if foreign:
        raise LoweringError(f"a GPU runs operators of {' and '.join(NAMESPACES)}; this graph also calls {', '.join(foreign)}")


def census(graph: GraphModule) -> Mapping[str, int]:
    """Number of operators by name."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    counts = Counter(str(target).partition(".default")[0] for target in targets if isinstance(target, torch._ops.OpOverload))
    return dict(sorted(counts.items()))


class _Propagation(Interpreter):
    """Runs a graph on fake tensors of a GPU, which torch makes on any machine, and compares each value with the recorded one."""

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        if n.op == "output" or not isinstance(result, FakeTensor):
            return result
        if result.device != DEVICE:
            raise LoweringError(f"{n.name} ({n.target}) is on {result.device}; every value of a graph for a GPU is on it")
        recorded = n.meta.get("val")
        if isinstance(recorded, torch.Tensor) and (recorded.shape, recorded.dtype) != (result.shape, result.dtype):
            shown = f"{tuple(result.shape)} {result.dtype} on a GPU and was recorded as {tuple(recorded.shape)} {recorded.dtype}"
            raise LoweringError(f"{n.name} ({n.target}) is {shown}")
        return result
