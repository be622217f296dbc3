"""lowering/ascend/legality/node.py: an operator's view has what rules read, and copies of an operator have one key."""

from __future__ import annotations

import pytest
from support import legal_graph

from npucompile.lowering.ascend.ge_file import messages, parse
from npucompile.lowering.ascend.ge_types import tensor_types
from npucompile.lowering.ascend.legality.node import key_of, node_of, value_of


@pytest.fixture(scope="module")
def legal(tmp_path_factory):
    return legal_graph.legal(tmp_path_factory.mktemp("stubs"))


def test_view_of_an_operator(legal):
    op = next(op for op in parse(legal.graph).graph[0].op if op.type == "GroupedMatmulSwigluQuantV2")
    node = node_of(op, tensor_types(legal), {"some_constant"})
    assert {name: str(tensor) for name, tensor in node.inputs.items()} == {
        "x": "i8[128,1024]", "x_scale": "f32[128]", "group_list": "i64[8]", "weight0": "i8[8,1024,256] NZ", "weight_scale0": "f32[8,256]",
    } | {name: str(tensor) for name, tensor in node.inputs.items() if name == "weight_assist_matrix0"}  # fmt: skip
    assert {name: str(tensor) for name, tensor in node.outputs.items()} == {"y": "i8[128,128]", "y_scale": "f32[128]"}
    assert node.attributes["group_list_type"] == 1
    assert not node.private
    assert "weight0=i8[8,1024,256] NZ" in node.describe()


def test_key_is_of_types_constants_and_attributes(legal):
    op = next(op for op in parse(legal.graph).graph[0].op if op.type == "MoeGatingTopK")
    types, producer = tensor_types(legal), op.input[0].rpartition(":")[0]
    key = key_of(op, types, set())
    renamed = type(op)()
    renamed.CopyFrom(op)
    renamed.name = "copy"
    types |= {tensor.replace(op.name, "copy"): told for tensor, told in types.items() if tensor.startswith(op.name + ":")}
    assert key_of(renamed, types, set()) == key != key_of(op, types, {producer})
    renamed.attr["k"].i += 1
    assert key_of(renamed, types, set()) != key
    renamed.attr["_secret"].i = 1
    assert node_of(renamed, types, set()).private == {"_secret"}


def test_values_of_attributes():
    attribute = messages().AttrDef()
    assert value_of(attribute) is None
    attribute.s = b"TND"
    assert value_of(attribute) == "TND"
    attribute.list.i.extend([1, 2])
    assert value_of(attribute) == (1, 2)
    attribute.f = 0.5
    assert value_of(attribute) == 0.5
