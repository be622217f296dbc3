"""lowering/ascend/options.py: options follow the platform, and each says where it comes from."""

from __future__ import annotations

import re

import pytest
import torch

from npucompile.lowering.ascend.ge_file import messages
from npucompile.lowering.ascend.options import OPTIONS, Operand, drop_later_attributes, graph_options, operand_options, other_kernels
from npucompile.lowering.platform import CANN_RELEASES, CPU, Platform


def test_every_release_sinks_tiling_and_keeps_the_order_of_operators() -> None:
    for release in CANN_RELEASES:
        options = graph_options(Platform("ascend910_93", release))
        assert options == {"ge.tiling_schedule_optimize": "1", "ge.topoSortingMode": "3"}
    assert graph_options(CPU) == {}
    assert graph_options(Platform("ascend910_93", "9.1", kernels="online")) == graph_options(Platform("ascend910_93", "9.1"))
    prebuilt = graph_options(Platform("ascend910_93", "9.1", kernels="prebuilt"))
    assert prebuilt == graph_options(Platform("ascend910_93", "9.1")) | {"ge.jit_compile": "0"}


def test_kernels_may_come_from_the_other_place() -> None:
    online, prebuilt = ({"a": "1", "ge.jit_compile": value} for value in "20")
    assert other_kernels({"a": "1"}) == other_kernels(online) == prebuilt
    assert other_kernels(prebuilt) == online


def test_options_name_their_sources() -> None:
    assert all(re.search(r"\((TA|CR)\b.*\)", option.reason) for option in OPTIONS)
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_operands_that_lie_where_they_are_are_frozen() -> None:
    operands = [Operand(torch.empty(2, 3, device="meta"), True), Operand(torch.empty(4, device="meta"), False)]
    options = {"frozenInput": "1,0", "ge.inputHintShape": "0:[2, 3];1:[4]", "ge.exec.outputReuseMemIndexes": "0,1"}
    assert operand_options(operands, 2, {}) == options
    assert operand_options(operands, 2, {0: 2}) == options | {"ge.exec.outputReuseInputMemIndexes": "0,2"}


@pytest.mark.parametrize("platform, kept", [(CPU, True), (Platform("ascend910_93", "9.0"), True), (Platform("ascend910_93", "8.5"), False)])
def test_attributes_of_a_later_release_are_not_written_for_an_older_one(platform: Platform, kept: bool) -> None:
    graph = messages().GraphDef()
    for kind in ("MoeDistributeDispatchV2", "Cast"):
        op = graph.op.add(name=kind, type=kind)
        op.attr["y_dtype"].i, op.attr["quant_mode"].i = 2, 2
    drop_later_attributes(graph.op, platform)
    assert [sorted(op.attr) for op in graph.op] == [["quant_mode", *(["y_dtype"] if kept else [])], ["quant_mode", "y_dtype"]]
