"""lowering/ascend/copies.py: a copy that only makes a value contiguous is no operator of GE; a copy of an operand stays one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_bodies as gb

from npucompile.lowering.ascend.convert import convert_body

X = ((4, 8), gb.F32)


@pytest.mark.parametrize(
    ("body", "types"),
    [
        (lambda x: tuple(part.contiguous() + 1 for part in torch.ops.aten.split_with_sizes(x, [4, 4], -1)), ["SplitV", "Add", "Add"]),
        (lambda x: (x.t().contiguous().view(-1),), ["Transpose", "Reshape"]),
        (lambda x: (x.clone(),), ["Identity"]),
    ],
    ids=["parts", "transposed", "operand"],
)
def test_copies_of_values_that_are_not_contiguous_vanish(tmp_path_factory: pytest.TempPathFactory, body: Any, types: list[str]) -> None:
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    graph = gb.trace(mode := gb.FakeTensorMode(), body, [X])
    assert mode is graph.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    converted = convert_body(graph, ta)
    assert [op.type for op in converted.ops if op.type not in ("Const", "Fill")] == types
