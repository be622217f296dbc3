"""lowering/ascend/acl_graph/inspect_acl.py: what is counted, shown and refused of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph import inspect_acl
from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.make import acl_file
from npucompile.lowering.ascend.inspect_weights import LARGE_BYTES


def layer(x: Any) -> tuple[Any, ...]:
    left, right = x.split(4, 1)
    whole = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(left + right, "sum", "tp"))
    return (whole.t().contiguous().view(-1) * 2,)


def test_views_unpackings_and_waits_launch_nothing() -> None:
    made, _ = ag.of_body(layer, inputs_x=((4, 8), ag.F32))
    launched = inspect_acl.launches(graph_of(made).graph.nodes)
    names = ["aten.add.Tensor", "_c10d_functional.all_reduce.default", "aten.clone.default", "aten.mul.Tensor"]
    assert [str(node.target) for node in launched] == names
    assert inspect_acl.launches_by_body(made) == {"body": names}
    # Both halves of x are parts of longer rows; what `clone` reads is its own business.
    assert inspect_acl.copied_operands(launched) == 2
    assert inspect_acl.launch_facts(made) == {"launches": 4, "copied_operands": 2, "host_reads": 0, "captured": made.captured}
    census = inspect_acl.census_by_body(made)["body"]
    assert census["aten.view.default"] == 1
    assert not any("getitem" in name for name in census)


def test_a_product_takes_a_transposed_weight_as_it_lies() -> None:
    made, _ = ag.of_body(lambda x, w: (torch.mm(x, w.t()), x.t() + 1), inputs_x=((4, 8), ag.F32), inputs_w=((6, 8), ag.F32))
    launched = inspect_acl.launches(graph_of(made).graph.nodes)
    assert [str(node.target) for node in launched] == ["aten.mm.default", "aten.add.Tensor"]
    assert inspect_acl.copied_operands(launched) == 1, "of the sum alone"


def test_collectives_are_listed_with_their_groups() -> None:
    made, _ = ag.of_body(layer, inputs_x=((4, 8), ag.F32))
    ((name, group, value),) = inspect_acl.collectives(made)
    assert (name, group, tuple(value.shape)) == ("_c10d_functional.all_reduce.default", "tp", (4, 4))


def test_the_text_says_where_the_host_reads() -> None:
    made = acl_file(*gb.two_kinds(2), captured=True)
    lines = inspect_acl.text(made).splitlines()
    assert lines[made.cuts[0]].startswith("-- the host reads lengths")
    assert sum(" = operand " in line for line in lines) == made.operands
    assert "npu.npu_fused_infer_attention_score.default" in inspect_acl.text(made)


def test_what_writes_other_memory_or_whole_pools_is_refused() -> None:
    graph, signature = gb.two_kinds(2)
    made = acl_file(graph, signature, captured=True)
    with pytest.raises(LoweringError, match=r"the graph writes .*params.*legal are the 4 pools of its signature"):
        inspect_acl.check(replace(made, written=(*made.written, 0)), signature)
    with pytest.raises(LoweringError, match=f"the graph has {made.inputs} operands and {made.outputs + 1} results"):
        inspect_acl.check(replace(made, outputs=made.outputs + 1), signature)
    side = LARGE_BYTES // 4
    for size, legal in ((side, True), (side + 1, False)):
        whole, own = ag.of_body(lambda pool, x: (pool.copy_(x * 2).sum(),), state_pool=((size,), ag.F32), inputs_x=((size,), ag.F32))
        if legal:
            inspect_acl.check(whole, own)
        else:
            with pytest.raises(LoweringError, match=f"writes all of state.pool, {4 * size} bytes; legal above {LARGE_BYTES} bytes"):
                inspect_acl.check(whole, own)
