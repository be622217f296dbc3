"""lowering/ascend/launches.py: what runs in a step is counted, and what does not run is not."""

from __future__ import annotations

import pytest
import torch
from support import ge_bodies as gb

from npucompile.lowering.ascend.ge_file import parse
from npucompile.lowering.ascend.launches import body_of, launches
from npucompile.lowering.ascend.link import link


def body(x, pool, rows, new):
    steps = torch.arange(8, device=x.device).to(gb.F32) * 2  # constants alone
    return ((x.abs().view(4, 8).sqrt().view(8, 4) + steps[:, None])[:, 1:3].neg(),)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    main = gb.Main()
    shapes = [((8, 4), gb.F32), ((16, 4), gb.F32), ((2, 1), gb.I32), ((2, 4), gb.F32)]
    names = ("params.x", "state.pool", "inputs.rows", "inputs.new")
    operands = [main.operand(name, shape) for name, shape in zip(names, shapes, strict=True)]
    main.body("body", body, shapes)
    traced, signature = main.done(*main.call("body", *operands))
    return parse(link(traced, signature, gb.loaded(tmp_path_factory.mktemp("stubs"))).graph).graph[0]


def test_constants_views_and_what_depends_on_constants_alone_start_nothing(graph):
    assert {"Range", "Reshape", "Mul"} <= {op.type for op in graph.op}
    assert [op.type for op in launches(graph.op)] == ["Abs", "Sqrt", "Add", "StridedSliceV2", "Neg"]
    assert {body_of(op.name) for op in launches(graph.op)} == {"body"}


def test_a_collective_of_a_constant_runs_in_each_step(graph):
    graph.op.add(name="gathered", type="HcomAllGather", input=[next(op.name for op in graph.op if op.type == "Const") + ":0"])
    assert launches(graph.op)[-1].name == "gathered"
