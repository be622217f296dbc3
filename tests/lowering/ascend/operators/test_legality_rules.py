"""lowering/ascend/operators/legality_rules.py: each rule passes what is at its limit and names what is beyond."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.lowering.ascend.operators.legality_rules import RULES, listed
from npucompile.lowering.ascend.operators.node import Node
from npucompile.lowering.ascend.operators.tensor_type import TensorType


def node(attributes: dict[str, Any] | None = None, constants: tuple[str, ...] = (), **inputs: TensorType) -> Node:
    return Node("n", "Op", inputs, frozenset(constants), {}, attributes or {})


X, NZ = TensorType("bf16", (4, 32)), TensorType("i8", (16, 32), "NZ")

CASES: dict[str, tuple[dict[str, Any], Node, Node, str]] = {
    "attribute_values": (
        {"attribute": "mode", "legal": [0, 3], "default": 0}, node(), node({"mode": 1}), "mode is 1; legal are 0, 3",
    ),
    "attribute_range": (
        {"attribute": "ranks", "least": 2, "most": 8, "multiple": 2}, node({"ranks": 8}), node({"ranks": 3}),
        "ranks is 3; legal is 2 to 8, a multiple of 2",
    ),
    "no_attribute": ({"attribute": "y_dtype"}, node({"x": 1}), node({"y_dtype": 1}), "has the attribute y_dtype"),
    "no_inputs": ({"inputs": ["bias"]}, node(x=X), node(bias=X), "takes bias; legal is to leave them out"),
    "dimension": (
        {"inputs": ["x"], "axis": -1, "least": 16, "most": 64, "multiple": 16, "meaning": "the width"},
        node(x=X), node(x=TensorType("bf16", (4, 40))), "x is bf16[4,40]: the width is 40; legal is 16 to 64, a multiple of 16",
    ),
    "power_of_two": (
        {"inputs": ["x"], "axis": -1, "most": 64, "meaning": "the number of heads"}, node(x=X), node(x=TensorType("bf16", (4, 48))),
        "x is bf16[4,48]: the number of heads is 48; legal is a power of two up to 64",
    ),
    "rank": ({"inputs": ["x"], "legal": [2, 3]}, node(x=X), node(x=TensorType("f32", (4,))), "of 1 dimensions; legal are 2, 3"),
    "known_at_build": (
        {"inputs": ["shape"]}, node(constants=("shape",), shape=X), node(shape=X), "shape (bf16[4,32]) is computed in the step",
    ),
    "filled_tiles": (
        {"inputs": ["weight"], "rows": 16, "widths": {"i8": 32, "i4": 64}}, node(weight0=NZ, weight1=X),
        node(weight0=TensorType("i4", (16, 96), "NZ")), "which does not divide into tiles; legal are multiples of 16 rows of 64 i4, or ND",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", CASES)
def test_rule(rule):
    parameters, legal, wrong, message = CASES[rule]
    assert RULES[rule](legal, {}, **parameters) is None
    told = RULES[rule](wrong, {}, **parameters)
    assert told is not None
    assert message in told


def test_inputs_that_are_absent_or_shorter_are_passed_over():
    limit = {"inputs": ["x", "z"], "axis": 2, "least": 16, "most": 64, "meaning": "the width"}
    assert RULES["dimension"](node(x=X), {}, **limit) is None
    assert [name for name, _ in listed(node(weight0=X, weight12=X, weights=X), ["weight"])] == ["weight0", "weight12"]


@pytest.mark.parametrize(
    ("kind", "group", "message"),
    [
        ("MoeDistributeDispatchV2", "dispatch", None),
        ("HcomAllReduce", "tp", None),
        ("MoeDistributeCombineV2", "world", "shares the communicator 'world'"),
        ("HcomAllReduce", "dispatch", "is for expert dispatch and combine alone"),
        ("HcomAllReduce", "group_name_7", "legal are the symbols tp, dp, world, dispatch"),
    ],
)
def test_communicators(kind: str, group: str, message: str | None) -> None:
    told = RULES["communicator"](Node("n", kind, attributes={"group": group}), {}, attribute="group")
    assert (message in str(told)) if message else told is None
