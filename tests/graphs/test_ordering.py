"""graphs/ordering.py: an order is a node of the graph, and changes no value."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.ir.record import record
from npucompile.graphs.ordering import after


def test_the_result_is_the_tensor() -> None:
    x = torch.arange(3.0)
    ordered = after(x, torch.zeros(2))
    assert torch.equal(ordered, x)
    assert ordered.data_ptr() == x.data_ptr()


def test_a_recorded_graph_keeps_the_order() -> None:
    operands = [torch.empty(3, device="meta"), torch.empty(2, device="meta")]
    graph = record(lambda x, earlier: (after(x, earlier.exp()) + 1,), operands, FakeTensorMode())
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called == ["aten.exp.default", "npuc_order.after.default", "aten.add.Tensor"]
