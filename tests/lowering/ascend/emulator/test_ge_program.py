"""lowering/ascend/emulator/ge_program.py: what is computed once, what is kept, and that each type of operator has one function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_calls as gc

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator import ge_program
from npucompile.lowering.ascend.emulator.ge_program import GeProgram, parsed_shape
from npucompile.lowering.ascend.emulator.program import MeshExchange

ALONE = MeshExchange(Mesh())


def test_what_depends_on_constants_alone_is_computed_once_unless_it_is_written() -> None:
    hand = gc.Hand()
    dims, one = hand.op("Const", {}, "dims", value=gc.i64(2)), hand.op("Const", {}, "one", value=torch.ones(()))
    filled = [hand.op("Fill", {"dims": dims, "value": one}, name) for name in ("read", "buffer")]
    rows = hand.op("Const", {}, "rows", value=gc.i32([1]))
    written = hand.op("ScatterNdUpdate", {"var": filled[1], "indices": rows, "updates": hand.data(0)}, "write")
    program = GeProgram(hand.model_with(hand.op("Add", {"x1": written, "x2": filled[0]}, "sum")))
    assert [str(step.label) for step in program.steps] == ["buffer (Fill)", "write (ScatterNdUpdate)", "sum (Add)"]
    for value in (5.0, 7.0):
        assert program.run([[torch.tensor([value])]], ALONE)[0][0].tolist() == [2.0, value + 1]


def test_a_feature_map_is_the_largest_sum_of_values_that_live_at_once() -> None:
    hand, eight = gc.Hand(), ["f32[8]"]
    x, rows = hand.data(0), hand.op("Const", {}, "rows", value=gc.i32([1]))
    twice = hand.op("Add", {"x1": x, "x2": x}, "twice", eight)
    four = hand.op("Add", {"x1": twice, "x2": twice}, "four", eight)
    written = hand.op("ScatterNdUpdate", {"var": four, "indices": rows, "updates": hand.data(1)}, "write", eight)
    assert GeProgram(hand.model_with(hand.op("Add", {"x1": written, "x2": four}, "sum", eight))).feature_map_bytes == 2 * 32


def test_large_constants_are_not_kept() -> None:
    hand = gc.Hand()
    dims, one = hand.op("Const", {}, "dims", value=gc.i64(1 << 22)), hand.op("Const", {}, "one", value=torch.ones(()))
    filled = hand.op("Fill", {"dims": dims, "value": one}, "filled")
    program = GeProgram(hand.model_with(filled))
    assert [str(step.label) for step in program.steps] == ["filled (Fill)"]
    assert program.run([[]], ALONE)[0][0].sum() == 1 << 22


def test_equal_masks_of_many_graphs_are_kept_once() -> None:
    def filled(value: float) -> torch.Tensor:
        hand = gc.Hand()
        dims, number = hand.op("Const", {}, "dims", value=gc.i64(1 << 16)), hand.op("Const", {}, "number", value=torch.tensor(value))
        program = GeProgram(hand.model_with(hand.op("Fill", {"dims": dims, "value": number}, "filled")))
        assert program.steps == []
        return keep.append(program) or program.run([[]], ALONE)[0][0]

    keep: list[Any] = []
    assert filled(1.0) is filled(1.0)
    assert filled(2.0).tolist()[:2] == [2.0, 2.0]


def test_shapes_are_read_as_they_are_written() -> None:
    for text in ("bf16[16,2]", "f32[]", "i64[3]"):
        dtype, sizes = parsed_shape(text) or (None, ())
        assert ge_program.shape_of(torch.zeros(sizes, dtype=dtype)) == text
    assert [parsed_shape(text) for text in ("", "bf16[?]", "odd[1]")] == [None] * 3


def test_net_output_without_or_with_equal_inputs_is_refused() -> None:
    hand = gc.Hand()
    x = hand.data(0)
    with pytest.raises(LoweringError, match="legal is one NetOutput whose inputs are all different"):
        GeProgram(hand.model_with(x, x))
