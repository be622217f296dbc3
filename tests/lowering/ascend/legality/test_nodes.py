"""lowering/ascend/legality/nodes.py: a node has what rules read, whether GE or torch runs its graph."""

from __future__ import annotations

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import messages
from npucompile.lowering.ascend.legality.check import DEFAULT
from npucompile.lowering.ascend.legality.nodes import nodes_of, value_of
from npucompile.lowering.ascend.operators.node import Node


@pytest.fixture
def nodes(legal, captured):
    """First node of each operator, of the same step as a GE graph and as a captured one."""
    return [{node.type: node for node in reversed(nodes_of(graph, DEFAULT).nodes)} for graph in (legal, captured)]


def shown(tensors) -> dict[str, str]:
    return {name: str(tensor) for name, tensor in tensors.items()}


def test_an_operator_is_the_same_in_both_graphs(nodes):
    operands = {"x": "i8[128,1024]", "x_scale": "f32[128]", "group_list": "i64[8]", "weight0": "i8[8,1024,256] NZ"}
    for node in (of_kind["GroupedMatmulSwigluQuantV2"] for of_kind in nodes):
        inputs = shown(node.inputs)
        inputs.pop("weight_assist_matrix0", None)
        assert inputs == operands | {"weight_scale0": "f32[8,256]"}
        assert shown(node.outputs) == {"y": "i8[128,128]", "y_scale": "f32[128]"}
        assert node.attributes["group_list_type"] == 1
        assert not node.private | node.unnamed | node.strided
    for node in (of_kind["MoeDistributeDispatchV2"] for of_kind in nodes):
        assert node.group == "dispatch"


def test_of_a_torch_operator_it_says_what_runs_it(nodes):
    attention, product = (nodes[1][kind] for kind in ("FusedInferAttentionScore", "aclnnMatmulWeightNz"))
    assert attention.label == "npu.npu_fused_infer_attention_score.default by FusedInferAttentionScore"
    assert attention.constants == {"actual_seq_lengths_kv"}, "lists of the host are known before the operator runs"
    assert shown(attention.inputs)["key0"] == "bf16[8,128,512]"
    assert attention.attributes["input_layout"] == "BSH"
    assert shown(product.inputs) == {"self": "bf16[8,1024]", "mat2": "bf16[1024,1024] NZ"}
    assert product.strided == {"mat2"}


def of_body(body, **operands) -> Node:
    return nodes_of(ag.of_body(body, **operands)[0], DEFAULT).nodes[-1]


def test_packed_int4_and_numbers_in_place_of_tensors(tmp_path):
    gb.loaded(tmp_path)
    x = {"inputs_x": ((2, 4), torch.int8)}
    assert shown(of_body(lambda x: (x + 1,), **x).inputs) == {"self": "i8[2,4]"}

    def grouped(weight, x, counts):
        return (torch.ops.npu.npu_grouped_matmul([x], [weight], group_list=counts, group_type=0, split_item=2, output_dtype=BF16)[0],)

    node = of_body(grouped, params_w=((3, 4, 8), torch.int32), **x, inputs_counts=((3,), torch.int64))
    assert shown(node.inputs)["weight0"] == "i4[3,4,64]"
    with pytest.raises(LoweringError, match=r"torch.complex64.*; legal are f32"):
        of_body(lambda x: (x + 1,), inputs_x=((2, 4), torch.complex64))


BF16 = torch.bfloat16


def test_values_of_attributes():
    attribute = messages().AttrDef()
    assert value_of(attribute) is None
    attribute.s = b"TND"
    assert value_of(attribute) == "TND"
    attribute.list.i.extend([1, 2])
    assert value_of(attribute) == (1, 2)
    attribute.f = 0.5
    assert value_of(attribute) == 0.5
