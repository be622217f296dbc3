"""lowering/ascend/legality/torch_nodes.py: a node's view has what rules read, and copies of an operator have one key."""

from __future__ import annotations

import pytest
import torch
from support import legal_acl

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.file import graph_of
from npucompile.lowering.ascend.acl_graph.formats import in_nz
from npucompile.lowering.ascend.legality.node import Node
from npucompile.lowering.ascend.legality.table import table
from npucompile.lowering.ascend.legality.torch_nodes import key_of, node_of
from npucompile.lowering.ascend.legality.torch_operators import torch_operators


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_acl.legal(tmp_path_factory.mktemp("stubs"))


def view(acl_file, name: str) -> Node:
    node = next(node for node in graph_of(acl_file).graph.nodes if str(node.target) == name)
    row = torch_operators()[name]
    return node_of(node, "it", row, table().facts(row.runs, "ascend910_93", "9.1", ("vllm-ascend",)), in_nz(acl_file))


def shown(tensors) -> dict[str, str]:
    return {name: str(tensor) for name, tensor in tensors.items()}


def test_view_of_an_operator(legal):
    node = view(legal, "npu.npu_grouped_matmul_swiglu_quant_v2.default")
    assert (node.name, node.type, node.label) == (
        "it", "GroupedMatmulSwigluQuantV2", "npu.npu_grouped_matmul_swiglu_quant_v2.default by GroupedMatmulSwigluQuantV2",
    )  # fmt: skip
    assert shown(node.inputs) == {
        "x": "i8[128,1024]", "x_scale": "f32[128]", "group_list": "i64[8]", "weight0": "i8[8,1024,256] NZ", "weight_scale0": "f32[8,256]",
    }  # fmt: skip
    assert shown(node.outputs) == {"y": "i8[128,128]", "y_scale": "f32[128]"}
    assert (node.attributes["group_list_type"], node.attributes["dequant_mode"]) == (1, 0), "one given, and a default"
    assert not node.unnamed | node.strided | node.constants


def test_lists_of_the_host_are_known_before_the_operator_runs(legal):
    node = view(legal, "npu.npu_fused_infer_attention_score.default")
    assert node.constants == {"actual_seq_lengths_kv"}
    assert shown(node.inputs)["key0"] == "bf16[8,128,512]"
    assert node.attributes["input_layout"] == "BSH"


def test_transposed_weights_are_in_nz(legal):
    node = view(legal, "aten.mm.default")
    assert shown(node.inputs) == {"self": "bf16[8,1024]", "mat2": "bf16[1024,1024] NZ"}
    assert node.strided == {"mat2"}


def test_packed_int4_and_numbers_in_place_of_tensors():
    graph = torch.fx.Graph()
    x, weight, counts = (graph.placeholder(name) for name in ("x", "weight", "counts"))
    for node, value in ((x, torch.int8), (weight, torch.int32), (counts, torch.int64)):
        node.meta["val"] = torch.empty((2, 4, 8), dtype=value, device="meta")
    product = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    product.meta["val"] = x.meta["val"]
    row = torch_operators()["aten.add.Tensor"]
    assert shown(node_of(product, "it", row, table().by_operator["aclnnAdd"], frozenset()).inputs) == {"self": "i8[2,4,8]"}
    grouped = graph.call_function(torch.ops.npu.npu_grouped_matmul.default, ([x], [weight]), {"group_list": counts})
    grouped.meta["val"] = [x.meta["val"]]
    row = torch_operators()["npu.npu_grouped_matmul.default"]
    viewed = node_of(grouped, "it", row, table().by_operator["GroupedMatmul"], frozenset())
    assert shown(viewed.inputs)["weight0"] == "i4[2,4,64]"
    assert shown(viewed.outputs) == {"y0": "i8[2,4,8]"}
    x.meta["val"] = torch.empty(2, dtype=torch.complex64, device="meta")
    with pytest.raises(LoweringError, match=r"x is torch.complex64.*; legal are f32"):
        node_of(grouped, "it", row, table().by_operator["GroupedMatmul"], frozenset())


def test_key_is_of_types_formats_strides_and_arguments():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    keys = set()
    for target, args, value, nz in (
        (torch.ops.aten.add.Tensor, (x, 1), x.meta["val"], ()),
        (torch.ops.aten.add.Tensor, (x, 1.0), x.meta["val"], ()),
        (torch.ops.aten.sub.Tensor, (x, 1), x.meta["val"], ()),
        (torch.ops.aten.add.Tensor, (x, 1), x.meta["val"].t(), ()),
        (torch.ops.aten.add.Tensor, (x, 1), x.meta["val"], (x,)),
    ):
        for _ in range(2):
            node = graph.call_function(target, args)
            node.meta["val"] = value
            keys.add(key_of(node, frozenset(nz)))
    assert len(keys) == 5
