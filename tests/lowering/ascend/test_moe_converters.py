"""lowering/ascend/moe_converters.py: what is written is what CANN's definitions name; products are tested beside their primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs.ir.record import record
from npucompile.graphs.ordering import after
from npucompile.lowering.ascend import moe_converters
from npucompile.lowering.ascend.toolchain import harness


@pytest.fixture(scope="module")
def torchair(tmp_path_factory: pytest.TempPathFactory) -> harness.Torchair:
    return harness.load(tmp_path_factory.mktemp("stubs"))


def converted(torchair: harness.Torchair, run: Callable[..., Any], *operands: torch.Tensor) -> list[Any]:
    """The GE operators of a function of tensors."""
    moe_converters.register(torchair)
    moe_converters.register(torchair)
    mode = FakeTensorMode()
    graph = record(run, [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in operands], mode)
    with mode:
        metas = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        return list(torchair.get_compiler(torchair.CompilerConfig())(graph, metas).runner.graph.op)


@pytest.mark.parametrize("renorm", [0, 1])
def test_gating_has_the_attributes_of_its_definition(torchair: harness.Torchair, renorm: int) -> None:
    graph = converted(torchair, lambda x: torch.ops.npu.npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=renorm)[:2], torch.zeros(5, 9))
    (gating,) = (op for op in graph if op.type == "MoeGatingTopKSoftmaxV2")
    written = {name: value.i for name, value in gating.attr.items() if not name.startswith("_")}
    assert {"renorm": 0, **written} == {"k": 3, "renorm": renorm}
    assert [desc.name for desc in gating.output_desc] == ["y", "expert_idx", "softmax_result"]


def test_a_dispatch_waits_for_what_was_ordered_before_it(torchair: harness.Torchair) -> None:
    def run(x: torch.Tensor, ids: torch.Tensor, *, ordered: bool) -> tuple[torch.Tensor, ...]:
        first = x.exp()
        dispatch = torch.ops.npu.npu_moe_distribute_dispatch_v2
        return first, dispatch(after(x, first) if ordered else x, ids, "dispatch", 4, 0, 8)[0]

    operands = torch.zeros(5, 16, dtype=torch.bfloat16), torch.zeros(5, 3, dtype=torch.int32)
    for ordered in (True, False):
        graph = converted(torchair, lambda x, ids, ordered=ordered: run(x, ids, ordered=ordered), *operands)
        (sent,) = (op for op in graph if op.type == "MoeDistributeDispatchV2")
        edges = [tensor.removesuffix(":-1") for tensor in sent.input if tensor.endswith(":-1")]
        assert edges == [op.name for op in graph if op.type == "Exp" and ordered]
