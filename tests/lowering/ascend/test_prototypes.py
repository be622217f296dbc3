"""lowering/ascend/prototypes.py: headers of CANN are read as they are written, and differences that matter are named."""

from __future__ import annotations

from npucompile.lowering.ascend.prototypes import Prototype, difference, forms, parsed

HEADER = """
/**
 * REG_OP(InAComment).INPUT(x, TensorType::ALL()).OP_END_FACTORY_REG(InAComment)
 */
REG_OP(TopKV2) // the second
    .INPUT(
        x, TensorType({DT_FLOAT, DT_INT32}))
    .INPUT(k, TensorType({DT_INT32}))
    .OPTIONAL_INPUT(mask, "T")
    .DYNAMIC_INPUT(more, TensorType::ALL())
    .OUTPUT(values, TensorType::ALL())
    .DYNAMIC_OUTPUT(indices, TensorType::IndexNumberType())
    .REQUIRED_ATTR(sorted, Bool)
    .ATTR(dims, ListInt, {0, 1})
    .OP_END_FACTORY_REG(TopKV2)
REG_OP(Unfinished) .INPUT(x, TensorType::ALL())
"""


def test_a_header_is_read():
    assert dict(parsed(HEADER)) == {
        "TopKV2": Prototype(
            {"x": "required", "k": "required", "mask": "optional", "more": "dynamic"},
            {"values": "required", "indices": "dynamic"},
            frozenset({"sorted", "dims"}),
        )
    }


def test_what_comes_behind_is_no_difference_and_what_is_asked_for_is():
    fact = next(fact for fact, operator in forms("ascend910_93", "9.1", ()) if operator == "QuantBatchMatmulV3")
    same = Prototype({**fact.inputs, "later": "optional"}, {**fact.outputs, "more": "required"}, frozenset({*fact.attributes, "other"}))
    assert difference(fact, same) == ""
    turned = Prototype(dict(reversed(fact.inputs.items())), fact.outputs, same.attributes)
    assert difference(fact, turned) == f"inputs {', '.join(fact.inputs)} beside {', '.join(reversed(fact.inputs))}"
    assert difference(fact, Prototype({**fact.inputs, "later": "required"}, fact.outputs, same.attributes)).endswith("later")
    assert difference(fact, Prototype(fact.inputs, {}, same.attributes)).startswith("outputs y beside")
    assert difference(fact, Prototype(fact.inputs, fact.outputs, frozenset())).endswith("are not there")
