"""lowering/ascend/cost/experts.py: rows follow from the routing behind a list of group sizes."""

from __future__ import annotations

from support import ge_calls as gc

from npucompile.lowering.ascend.cost.experts import routed_rows
from npucompile.lowering.ascend.ge_operators import operators
from npucompile.lowering.ascend.ge_types import declared_type
from npucompile.lowering.ascend.legality.nodes import of_ge
from npucompile.lowering.ascend.operators.work import Rows


def routed(kind: str, **attrs):
    hand = gc.Hand()
    ids = {"x": hand.data(0, "bf16[4,64]"), "expert_ids": hand.data(1, "i32[4,3]")}
    hand.op(kind, ids, "route", ["bf16[12,64]"] * 4, **attrs)
    hand.op("Cast", {"x": "route:2"}, "counts", ["i64[2]"])
    ops = operators(hand.model.graph[0].op)
    types = {f"{op.name}:{port}": declared_type(desc.attr["_meta"].s) for op in ops for port, desc in enumerate(op.output_desc)}
    nodes = {node.name: node for node in of_ge(ops, types, range(2))}
    return routed_rows(nodes, types, "counts:0", 4), routed_rows(nodes, types, "x0:0", 4)


def test_rows_are_those_of_the_routing():
    assert routed("MoeDistributeDispatchV2", ep_world_size=4, moe_expert_num=8) == (Rows(12, 48, 2, 8), None)
    assert routed("MoeInitRoutingV3", expert_num=8, active_expert_range=[2, 4])[0] == Rows(3, 12, 2, 8)
