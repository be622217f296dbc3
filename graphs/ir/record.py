"""Recording: a function of tensors without values becomes a graph of the operators that torch calls, in order.

`make_fx` over fake tensors does this in general. Here only shapes matter, so the function runs on plain meta tensors, whose
operators torch implements in C++; that takes less than half the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import GraphError

META = torch.device("meta")
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_CURRENT: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recording() -> Recorder | None:
    """The recorder that is open; None when nothing is being recorded."""
    return _CURRENT.get()


class Recorder(TorchDispatchMode):
    """Records each operator that runs while it is open.

    Attributes:
        graph: the recorded nodes.
        root: the bodies that the graph calls.
    """

    def __init__(self, mode: FakeTensorMode, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = Graph(), torch.nn.Module()
        self.graph.owning_module = self.root  # type: ignore[assignment]
        self._mode, self._device, self._paused = mode, torch.device(device), False
        # Tensors are kept alive: the id of a freed one could be given to another.
        self._known: dict[int, tuple[torch.Tensor, Node]] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, operators run without being recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def operand(self, like: torch.Tensor) -> torch.Tensor:
        """A new operand of the same layout."""
        node = self.graph.placeholder(f"arg{len(self.graph.nodes)}_1")
        return self._new(like, node)

    def call(self, name: str, body: GraphModule, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Records a call of a body and returns its results, with the layouts of `results`."""
        if not hasattr(self.root, name):
            setattr(self.root, name, body)
        call = self.graph.call_module(name, tuple(map(self.node, operands)))
        values = [self._new(like, self.graph.call_function(operator.getitem, (call, i))) for i, like in enumerate(results)]
        call.meta["val"] = tuple(self.node(value).meta["val"] for value in values)
        return values

    def node(self, value: Any) -> Any:
        """The node of a tensor; any other argument unchanged, except that device meta becomes the device of the graph.

        Raises:
            GraphError: the tensor does not belong to this graph.
        """
        if isinstance(value, torch.Tensor):
            if id(value) not in self._known:
                tensor = f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device} is neither an operand nor computed from one"
                raise GraphError(f"{tensor}; legal is a function that reads its operands alone")
            return self._known[id(value)][1]
        return self._device if value == META and isinstance(value, torch.device) else value

    def _new(self, like: torch.Tensor, node: Node) -> torch.Tensor:
        with no_dispatch():
            tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        self._know(tensor, node)
        return tensor

    def _know(self, tensor: torch.Tensor, node: Node) -> None:
        with no_dispatch():
            storage = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        node.meta["val"] = FakeTensor(self._mode, storage, self._device)
        self._known[id(tensor)] = tensor, node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # DTensor dispatches to its local tensors
        if self._paused or FakeTensor in types:
            return func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = META
        recorded = map_aggregate(args, self.node), map_aggregate(kwargs, self.node)
        result = func(*args, **kwargs)
        if isinstance(result, FakeTensor):
            return result  # torch asks for a shape, e.g. DTensor when it propagates a sharding; it is not part of the function
        if func is torch.ops.aten.detach.default:
            # Torch inserts detach where gradients may be tracked; none are, so the result is the operand itself.
            self._known[id(result)] = result, recorded[0][0]
            return result
        node = self.graph.call_function(func, *recorded)
        if isinstance(result, torch.Tensor):
            self._know(result, node)
        elif isinstance(result, tuple | list):
            for i, value in enumerate(result):
                self._know(value, self.graph.call_function(operator.getitem, (node, i)))
            node.meta["val"] = tuple(self.node(value).meta["val"] for value in result)
        return result


def record(
    fn: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], mode: FakeTensorMode, device: str = "meta"
) -> GraphModule:
    """The graph of a function of meta tensors with the layouts of `operands`.

    Args:
        fn: takes as many tensors and returns a sequence of tensors; its writes in place stay writes in place in the graph.
        operands: only their shapes, strides and dtypes are read.
        mode: mode of the fake tensors in every node's `meta["val"]`; it need not be active.
        device: of these fake tensors, and of every node that names a device.

    Returns:
        a graph that returns a tuple of results, without nodes that nothing reads.

    Raises:
        GraphError: the function reads a tensor that is not an operand.
    """
    outer, recorder = _CURRENT.get(), Recorder(mode, device)
    values = [recorder.operand(like) for like in operands]
    token, tracing = _CURRENT.set(recorder), collectives._are_we_tracing
    # Without this flag functional collectives return `AsyncCollectiveTensor`, whose lazy wait would be recorded at the first read.
    collectives._are_we_tracing = lambda: True
    try:
        if outer is None:
            with torch.no_grad(), recorder:
                results = fn(*values)
        else:
            with outer.paused(), recorder:
                results = fn(*values)
    finally:
        _CURRENT.reset(token)
        collectives._are_we_tracing = tracing
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    recorder.graph.eliminate_dead_code()
    return _make_graph_module(recorder.root, recorder.graph)
