"""lowering/ascend/legality/torch_rules.py: lists of tokens are read as they were written."""

from __future__ import annotations

import pytest
from torch.fx import Graph, GraphModule, Node

from npucompile.lowering.artifact.graph_io import NamedOperator
from npucompile.lowering.ascend.legality.torch_rules import COUNTS, SUMS, group_list_kind

DISPATCH, SORT = "npu.npu_moe_distribute_dispatch_v2.default", "npu.npu_moe_init_routing_v2.default"
GROUPED, FIRST, DEQUANT = (
    f"npu.{name}.default" for name in ("npu_grouped_matmul", "npu_grouped_matmul_swiglu_quant_v2", "npu_dequant_swiglu_quant")
)


def broken(writer: tuple[str, int, dict[str, int]], reader: tuple[str, dict[str, int]]) -> list[tuple[Node, str]]:
    """What is wrong where a reader takes a writer's result behind a cast."""
    graph = Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(NamedOperator(writer[0]), (x, x), writer[2])
    counts = graph.call_function(
        NamedOperator("aten._to_copy.default"), (graph.call_function(NamedOperator("operator.getitem"), (rows, writer[1])),)
    )
    name = "group_index" if reader[0] == DEQUANT else "group_list"
    args, kwargs = ((x, [x], [x], x, counts), {}) if reader[0] == FIRST else ((x, [x]), {name: counts})
    graph.output(graph.call_function(NamedOperator(reader[0]), args, {**kwargs, **reader[1]}))
    return list(group_list_kind(GraphModule({}, graph)))


@pytest.mark.parametrize(
    ("writer", "reader", "kinds"),
    [
        ((DISPATCH, 3, {}), (GROUPED, {}), (COUNTS, SUMS)),
        ((DISPATCH, 3, {"expert_token_nums_type": 0}), (FIRST, {"group_list_type": 1}), (SUMS, COUNTS)),
        ((SORT, 2, {}), (DEQUANT, {}), (SUMS, COUNTS)),
        ((SORT, 2, {"expert_tokens_num_type": 1}), (DEQUANT, {}), None),
        ((DISPATCH, 3, {}), (FIRST, {"group_list_type": 1}), None),
        ((DISPATCH, 4, {}), (GROUPED, {}), None),
    ],
)
def test_kinds_agree(writer, reader, kinds):
    told = broken(writer, reader)
    assert [(str(node.target), message.split(" is read as ")[1]) for node, message in told] == (
        [(reader[0], f"{kinds[1]} and {writer[0]} writes {kinds[0]}; legal is the same on both sides")] if kinds else []
    )
