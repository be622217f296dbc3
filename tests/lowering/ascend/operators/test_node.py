"""lowering/ascend/operators/node.py: copies of an operator have one key, and tensors are found by the names of inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType

X = TensorType("bf16", (4, 32))
NODE = Node("n", "MatMul", {"x1": X}, attributes={"k": 1}, input=("a:0", ""), slots=("x1", "bias"), after=("b",))


def test_key_is_of_types_constants_strides_and_attributes():
    assert replace(NODE, name="copy", input=("c:0", "")).key == NODE.key
    changes = [
        {"type": "MatMulV2"}, {"called": "aten.mm.default"}, {"inputs": {"x1": replace(X, format="NZ")}}, {"outputs": {"y": X}},
        {"attributes": {"k": 1.0}}, {"constants": frozenset({"x1"})}, {"strided": frozenset({"x1"})}, {"private": frozenset({"_secret"})},
    ]  # fmt: skip
    assert len({NODE.key, *(replace(NODE, **change).key for change in changes)}) == len(changes) + 1


def test_tensors_are_found_by_the_names_of_inputs():
    assert (NODE.tensor("x1"), NODE.find("bias"), NODE.reads, NODE.producers) == ("a:0", "", ["a:0"], ("a", "b"))
    with pytest.raises(LoweringError, match=r"n \(MatMul\) has no input bias; it has x1, bias"):
        NODE.tensor("bias")
