"""lowering/ascend/acl_graph/formats.py: weights are stored in NZ where every reader takes them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.formats import in_nz, weight_operands

WEIGHT = ((32, 16), ag.BF16)


@pytest.fixture(autouse=True)
def operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))


def body(plain: Any, viewed: Any, summed: Any, narrow: Any, x: Any) -> tuple[Any, ...]:
    y = torch.ops.npu.npu_linear(x, plain) + torch.ops.npu.npu_linear(x, summed) + torch.ops.npu.npu_linear(x, viewed.view(32, 16) * 2)
    return (y + summed.sum(), torch.ops.npu.npu_linear(x, narrow))


def test_only_weights_with_full_tiles_that_nothing_else_reads(tmp_path: Path) -> None:
    made, _ = ag.of_body(
        lambda x, *weights: body(*weights, x),
        inputs_x=((4, 16), ag.BF16),
        inputs_plain=WEIGHT,
        inputs_viewed=((2, 16, 16), ag.BF16),
        inputs_summed=WEIGHT,
        inputs_narrow=((24, 16), ag.BF16),
    )
    assert weight_operands(made) == (1,)
    assert [node.name for node in graph_of(made).graph.nodes if node in in_nz(made)] == ["operand_1", "t"]
