"""lowering/ascend/operators/checks.py: undefined rows, dtype numbers, int8 rounding, packed int4 and groups."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.operators import checks as common


def naive_pack(values: list[int]) -> int:
    """Eight int4 values packed in an int32, the first in the lowest bits."""
    word = 0
    for i, value in enumerate(values):
        word |= (value & 0xF) << (4 * i)
    return struct.unpack("<i", struct.pack("<I", word))[0]


@given(st.lists(st.integers(-8, 7), min_size=16, max_size=16))
def test_unpacking_undoes_packing(values: list[int]) -> None:
    packed = torch.tensor([[naive_pack(values[:8]), naive_pack(values[8:])]], dtype=torch.int32)
    assert common.unpack_int4(packed).tolist() == [values]
    assert common.unpack_int4(packed).dtype == torch.int8


@given(st.floats(width=32, allow_nan=False))
def test_int64_scales_hold_the_bits_of_a_float(value: float) -> None:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert common.float_scale(torch.tensor([bits])).tolist() == [value]
    assert common.float_scale(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == torch.float32


def test_int8_rounds_to_even_saturates_and_marks_nan() -> None:
    x = torch.tensor([0.5, 1.5, -0.5, -2.5, 300.0, -300.0, float("nan")])
    assert common.to_int8(x).tolist() == [0, 2, 0, -2, 127, -128, -128]


def test_rows_are_quantised_by_their_largest() -> None:
    x = torch.tensor([[127.0, -254.0, 3.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 2.0]])
    q, scale = common.quantise_rows(x)
    assert q[:2].tolist() == [[64, -127, 2], [0, 0, 0]]
    assert scale[:2].tolist() == [2.0, 0.0]
    assert (q[2] == -128).all()
    assert scale[2].isnan()


def test_integer_products_are_exact() -> None:
    x, w = torch.full((1, 70_000), -128, dtype=torch.int8), torch.full((70_000, 1), -128, dtype=torch.int8)
    x[0, 0] = 1
    assert common.int_matmul(x, w).item() == 69_999 * 2**14 - 128


def test_undefined_values_are_loud() -> None:
    assert common.undefined(2, dtype=torch.bfloat16).isnan().all()
    assert common.undefined(2, dtype=torch.int8).tolist() == [-128, -128]
    assert common.undefined(dtype=torch.int64).shape == ()


def test_dtype_numbers_are_torchs() -> None:
    schema = torch.ops.aten.arange.default._schema
    assert "ScalarType? dtype" in str(schema)
    for number, dtype in common.DTYPE_NUMBERS.items():
        assert torch.ops.aten.to.dtype(torch.zeros(1), number).dtype == dtype
        assert common.dtype_of("op", number) == common.dtype_of("op", dtype) == dtype
    with pytest.raises(LoweringError, match="output_dtype is None"):
        common.dtype_of("op", None)


def test_groups_are_counts() -> None:
    assert common.group_bounds("op", torch.tensor([2, 0, 3]), 1, 3, 7) == [(0, 2), (2, 2), (2, 5)]


@pytest.mark.parametrize(
    ("groups", "kind", "rows", "message"),
    [
        (torch.tensor([2, 0, 3]), 1, 4, "do not fit 4 rows"),
        (torch.tensor([2, -1, 3]), 1, 9, "rising order"),
        (torch.tensor([2, 1]), 1, 9, r"group_list is \(2,\)"),
        (torch.tensor([2, 3, 4]), 0, 9, "group_list_type is 0; legal is 1"),
        (torch.tensor([2, 1, 1], dtype=torch.int32), 1, 9, "int32; legal is a tensor of .*int64"),
        (None, 1, 9, "group_list is absent"),
    ],
)
def test_bad_groups_are_refused(groups: torch.Tensor | None, kind: int, rows: int, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        common.group_bounds("op", groups, kind, 3, rows)


def test_options_without_a_meaning_here_are_refused() -> None:
    common.refuse_options("op", {"a": None, "b": 0, "c": "", "d": [], "e": False, "f": 3}, f=3)
    with pytest.raises(LoweringError, match="op: f=4 has no CPU kernel; legal is 3"):
        common.refuse_options("op", {"f": 4}, f=3)
    with pytest.raises(LoweringError, match="t=tensor"):
        common.refuse_options("op", {"t": torch.zeros(1)})


def test_operands_are_checked_by_name() -> None:
    x = torch.zeros(2, 3)
    assert common.require("op", "x", x, (torch.float32,), (2,)) is x
    with pytest.raises(LoweringError, match=r"op: x is \(2, 3\) torch.float32; legal is a tensor of .*int8"):
        common.require("op", "x", x, (torch.int8,))
    with pytest.raises(LoweringError, match=r"with \[3\] dimensions"):
        common.require("op", "x", x, (torch.float32,), (3,))
    with pytest.raises(LoweringError, match=r"op: x is \(2, 3\); the other operands make \(3, 2\) legal"):
        common.require_shape("op", "x", x, (3, 2))
