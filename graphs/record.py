"""Turns a function of tensors that have no values into its graph: the operators that torch calls, in their order.

What `make_fx` over fake tensors does in general is done here for what needs no more than shapes: the function runs on plain meta
tensors, which torch's own C++ knows how to step through, and that takes a third of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import GraphError


class _Recorder(TorchDispatchMode):
    """Writes down each operator that runs while it is open."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._mode = mode
        # Tensors are kept: another one could take the place, and so the id, of one that is gone.
        self._known: dict[int, tuple[torch.Tensor, Node]] = {}

    def know(self, tensor: torch.Tensor, node: Node) -> None:
        """A node gives this tensor from now on."""
        with no_dispatch():
            held = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        node.meta["val"] = FakeTensor(self._mode, held, held.device)
        self._known[id(tensor)] = tensor, node

    def node(self, value: Any) -> Any:
        """The node of a tensor; anything else as it is.

        Raises:
            GraphError: the tensor is none of this graph's.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            raise GraphError(f"{value!r} is neither an operand nor computed from one; legal is a function that reads its operands alone")
        return self._known[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = map_aggregate(args, self.node), map_aggregate(kwargs, self.node)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:
            # Torch does it here and there where gradients might have been; without any it is nothing.
            self._known[id(result)] = result, given[0][0]
            return result
        node = self.graph.call_function(func, *given)
        if isinstance(result, torch.Tensor):
            self.know(result, node)
        elif isinstance(result, tuple | list):
            for i, value in enumerate(result):
                self.know(value, self.graph.call_function(operator.getitem, (node, i)))
            node.meta["val"] = tuple(self.node(value).meta["val"] for value in result)
        return result


def record(fn: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: FakeTensorMode) -> GraphModule:
    """The graph of a function of meta tensors with the layouts of `operands`.

    Args:
        fn: takes as many tensors and returns a sequence of tensors; what it writes in place is written in place in the graph.
        operands: only shapes, strides and dtypes are read.
        mode: of which every node's `meta["val"]` is a fake tensor, on device meta. Not open: plain tensors are stepped through.

    Returns:
        a graph of a tuple of results, without what nothing reads.

    Raises:
        GraphError: the function reads a tensor that it was not given.
    """
    recorder = _Recorder(mode)
    values = [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta") for like in operands]
    for i, value in enumerate(values):
        recorder.know(value, recorder.graph.placeholder(f"arg{i}_1"))
    with torch.no_grad(), recorder:
        results = fn(*values)
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    recorder.graph.eliminate_dead_code()
    return _make_graph_module(torch.nn.Module(), recorder.graph)
