"""lowering/ascend/legality/matching.py: forms and columns are matched by name, and lists by the names before their numbers."""

from __future__ import annotations

from npucompile.lowering.ascend.legality.matching import attributes_of, fitting, form_of, types_of
from npucompile.lowering.ascend.legality.table import read
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType

FORM = {"inputs": {"x": "required", "weight": "dynamic", "bias": "optional"}, "outputs": {"y": "required"}, "attributes": {"k": "Int"}}
TYPES = {"columns": 3, "inputs": {"x": "i8 i8 bf16", "weight": "i8:NZ i4 bf16", "bias": "f32"}, "outputs": {"y": "bf16 bf16 bf16"}}
ROWS = read(
    [
        {"operators": ["Product"], "what": "form", "source": "a", **FORM},
        {"operators": ["Product"], "what": "types", "source": "b", **TYPES},
        {"operators": ["Product"], "what": "folded", "source": "c"},
    ]
).rows


def node(constants: tuple[str, ...] = (), private: tuple[str, ...] = (), attributes: dict[str, object] | None = None, **types: str) -> Node:
    def tensor(text: str) -> TensorType:
        dtype, _, form = text.partition(":")
        return TensorType(dtype, (16, 32), form or "ND")

    inputs = {name: tensor(text) for name, text in types.items() if name != "y"}
    outputs = {name: tensor(text) for name, text in types.items() if name == "y"}
    return Node("n", "Product", inputs, frozenset(constants), outputs, attributes or {}, frozenset(private))


def test_a_column_fits_as_a_whole():
    """int8 weights in ND are in no column with int8 activations, and neither is a mixture of two columns."""
    assert not list(types_of(node(x="i8", weight0="i8:NZ", y="bf16"), ROWS))
    assert not list(types_of(node(x="i8", weight0="i4", weight1="i4", bias="f32"), ROWS))
    for wrong in ({"x": "i8", "weight0": "i8"}, {"x": "bf16", "weight0": "i4"}, {"x": "i8", "weight0": "i4", "weight1": "i8:NZ"}):
        told = list(types_of(node(**wrong), ROWS))
        assert told[0][1] == "b"
        assert "legal x/weight are i8/i8:NZ | i8/i4 | bf16/bf16" in told[0][0]


def test_constants_are_computed_by_ge():
    assert fitting(node(("x", "weight0"), x="u64", weight0="u64"), ROWS) == ROWS[2]
    assert fitting(node(("x",), x="u64", weight0="u64"), ROWS) is None


def test_forms():
    assert not list(form_of(node(x="i8", weight0="i4", weight7="i4"), ROWS))
    assert "lacks x; legal is" in next(form_of(node(weight0="i4"), ROWS))[0]
    assert "has inputs scale; legal are x, weight, bias" in next(form_of(node(x="i8", scale="f32"), ROWS))[0]


def test_attributes():
    assert not list(attributes_of(node(x="i8", attributes={"k": 3, "N": 1}), ROWS))
    assert "has attributes j; legal are N, k, num_split" in next(attributes_of(node(x="i8", attributes={"j": 3}), ROWS))[0]
    assert "k is 0.5; legal is a value of type Int" in next(attributes_of(node(x="i8", attributes={"k": 0.5}), ROWS))[0]
    assert "has attributes _mine" in next(attributes_of(node(private=("_mine",), x="i8"), ROWS))[0]
