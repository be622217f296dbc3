"""lowering/ascend/operators/call.py: operators are read completely, and an attribute or input that is left unread is an error."""

from __future__ import annotations

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import messages
from npucompile.lowering.ascend.operators.call import DTYPES, INT4, Int4, binary, read, same_dtype, unary


def test_an_operator_is_read_with_the_names_of_its_inputs() -> None:
    op = read(gc.message("Thing", {"x0": True, "x1": True, "bias": False}, ["f32[2]", ""], ["early"], {"axis": -1, "how": "sum"}))
    assert (op.name, op.type, str(op)) == ("op", "Thing", "op (Thing)")
    assert op.inputs == ("x0_source:0", "x1_source:0", "")
    assert op.slots == ("x0", "x1", "bias")
    assert op.after == ("early",)
    assert op.attrs == {"axis": -1, "how": "sum"}
    assert op.results == ("f32[2]", "")


def test_attributes_keep_their_kinds() -> None:
    values = {"i": 3, "f": 0.5, "b": True, "s": "TND", "ints": [1, 2], "floats": [0.5], "bools": [True, False], "none": []}
    attrs = read(gc.message("Thing", {}, [], [], values)).attrs
    assert attrs == values
    assert {name: type(value) for name, value in attrs.items()} == {name: type(value) for name, value in values.items()}


def test_names_that_torchair_keeps_for_itself_are_no_attributes() -> None:
    assert read(gc.message("Thing", {}, [], [], {"_inputs_all_sym": True, "axis": 0})).attrs == {"axis": 0}


@pytest.mark.parametrize("value", [
    torch.tensor(1.5), torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.arange(6, dtype=torch.int64).view(2, 3),
    torch.tensor([True, False]), torch.tensor([-128, 127], dtype=torch.int8), torch.empty(0, 3), torch.tensor(7, dtype=torch.int32),
])  # fmt: skip
def test_constants_have_their_dtype_shape_and_bits(value: torch.Tensor) -> None:
    tensor = read(gc.message("Const", {}, [""], [], {"value": value})).attrs["value"]
    assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
    assert torch.equal(tensor, value)


def test_a_constant_of_the_wrong_size_or_type_is_refused() -> None:
    op = gc.message("Const", {}, [""], [], {"value": torch.zeros(3)})
    op.attr["value"].t.data += b"\0\0\0\0"
    with pytest.raises(LoweringError, match=r"op.value is a constant DT_FLOAT\[3\] of 16 bytes; legal is 12"):
        read(op)
    op.attr["value"].t.desc.dtype = messages().DataType.Value("DT_STRING")
    with pytest.raises(LoweringError, match="a constant of DT_STRING; legal are DT_FLOAT, "):
        read(op)


def test_inputs_without_names_and_attributes_of_other_kinds_are_refused() -> None:
    op = gc.message("Thing", {"x": True}, [], [], {})
    op.input.append("more:0")
    with pytest.raises(LoweringError, match=r"has 2 inputs and names for 1"):
        read(op)
    op = gc.message("Thing", {}, [], [], {})
    op.attr["sub"].func.name = "f"
    with pytest.raises(LoweringError, match=r"op\.sub is an attribute of kind func"):
        read(op)


def test_inputs_are_found_by_name() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    call = gc.call("Thing", {"x0": x, "x1": y, "xs": torch.ones(1), "bias": None})
    assert call.tensors("x") == [x, y]
    assert call.optional("bias") is None
    assert call.optional("unheard_of") is None
    with pytest.raises(LoweringError, match=r"op \(Thing\): input bias is absent; it has x0, x1, xs"):
        call.tensor("bias")


def test_an_empty_tensor_stands_for_an_absent_one() -> None:
    call = gc.call("Thing", {"bias0": torch.empty(0), "scale0": torch.ones(2)})
    assert call.single("bias") is None
    assert torch.equal(call.single("scale"), torch.ones(2))


def test_integers_are_read_from_tensors() -> None:
    call = gc.call("Thing", {"shape": gc.i64(2, -1), "axis": torch.tensor(3, dtype=torch.int32), "x": torch.ones(1)})
    assert call.integers("shape") == [2, -1]
    assert call.integer("axis") == 3
    with pytest.raises(LoweringError, match=r"shape is \[2, -1\]; legal is one number"):
        call.integer("shape")
    with pytest.raises(LoweringError, match=r"x is torch\.float32; legal are int32 and int64"):
        call.integers("x")


def test_int4_is_no_tensor() -> None:
    words = Int4(torch.zeros(2, dtype=torch.int32))
    call = gc.call("Thing", {"x": words})
    assert call.value("x") is words
    with pytest.raises(LoweringError, match=r"x is int4 \(2,\) \(packed\)"):
        call.tensor("x")


def test_dtypes_are_those_of_ge() -> None:
    assert gc.call("Cast", dst_type=27).dtype("dst_type") is torch.bfloat16
    assert gc.call("Cast").dtype("dst_type", 9) is torch.int64
    with pytest.raises(LoweringError, match=r"attribute dst_type is dtype number 28; legal are \[0, 1, 2, 3"):
        gc.call("Cast", dst_type=28).dtype("dst_type")
    assert INT4 not in DTYPES
    # The numbers of the messages' DataType differ from torchair's, for the same names.
    assert {number: messages().DataType.Name(number) for number in (1, 27)} == {1: "DT_FLOAT", 27: "DT_BF16"}


def test_what_nobody_asked_for_is_refused() -> None:
    call = gc.call("Thing", {"x": torch.ones(1), "mask": torch.ones(1), "bias": None}, axis=1, fusion=0)
    call.tensor("x")
    call.expect(axis=1)
    with pytest.raises(LoweringError, match=r"has fusion, mask, which the interpreter does not know; it knows axis, x"):
        call.finish()
    call.ignore("fusion")
    call.optional("mask")
    call.finish()


def test_attributes_of_other_values_are_refused() -> None:
    call = gc.call("Thing", mode="edge")
    with pytest.raises(LoweringError, match=r"op \(Thing\): attribute mode is 'edge'; the interpreter knows 'constant' only"):
        call.expect(mode="constant")
    call.expect(other=3)


def test_forms_of_one_and_two_inputs() -> None:
    call = gc.call("Neg", {"x": torch.tensor([1.0])}, base=2.0)
    with pytest.raises(LoweringError, match=r"attribute base is 2\.0"):
        unary(torch.neg, base=-1.0)(call)
    both = {"x1": torch.tensor([1, 2]), "x2": torch.tensor([[10], [20]])}
    assert torch.equal(binary(torch.add)(gc.call("Add", both)), torch.tensor([[11, 12], [21, 22]]))


def test_dtypes_are_not_promoted() -> None:
    call = gc.call("Add", {"x1": torch.ones(2), "x2": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(LoweringError, match=r"takes x1 \(2,\) torch.float32, x2 \(2,\) torch.int32; legal is one dtype"):
        binary(torch.add)(call)
    same_dtype(call, a=torch.ones(1), b=torch.ones(2))
