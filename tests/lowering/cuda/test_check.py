"""lowering/cuda/check.py: what a GPU could not run is named, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from npucompile.graphs import native_ops
from npucompile.graphs import ops as ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ir.record import record
from npucompile.lowering.cuda.check import census, check


def recorded(fn: Callable[..., Any], device: str = "cuda") -> GraphModule:
    return record(fn, [torch.empty(4, 4, device="meta")], FakeTensorMode(), device)


def test_operators_of_torch_pass_and_are_counted() -> None:
    graph = recorded(lambda x: ((x @ x + torch.arange(4, device=x.device)).sort(-1)[0],))
    check(graph)
    assert census(graph) == {"aten.add.Tensor": 1, "aten.arange": 1, "aten.mm": 1, "aten.sort": 1}


def test_a_kernel_for_cpus_is_named() -> None:
    with pytest.raises(LoweringError, match=r"a GPU runs operators of aten and prims; this graph also calls .*npuc_linear"):
        check(recorded(lambda x: (native_ops.TABLE["npuc_linear"].op(x, x),)))


def test_a_value_on_the_host_is_named() -> None:
    graph = recorded(lambda x: (x + torch.zeros(4, device=x.device),))
    (zeros,) = (node for node in graph.graph.nodes if "zeros" in node.name)
    zeros.kwargs = {**zeros.kwargs, "device": torch.device("cpu")}
    with pytest.raises(LoweringError, match=r"zeros.* is on cpu; every value of a graph for a GPU is on it"):
        check(graph)


def test_a_value_of_another_shape_than_recorded_is_named() -> None:
    graph = recorded(lambda x: (x + 1,))
    (add,) = (node for node in graph.graph.nodes if node.name.startswith("add"))
    add.meta["val"] = add.meta["val"].new_empty(2, 2)
    with pytest.raises(LoweringError, match=r"add.* is \(4, 4\) torch.float32 on a GPU and was recorded as \(2, 2\) torch.float32"):
        check(graph)
