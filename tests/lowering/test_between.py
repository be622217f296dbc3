"""lowering/between.py: values of a size from those of three sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.ge_file import messages
from npucompile.lowering.between import between

SIZES = (8, 34, 64)


@dataclass(frozen=True)
class Leaf:
    name: str
    shape: tuple[int, ...]
    exact: float = 0.5


numbers = st.tuples(st.integers(0, 10**12), st.integers(0, 10**6))


def value(made, rows):
    """A tree whose numbers are `first + rise * rows` each."""
    grown = [first + rise * rows for first, rise in made]
    text = "\n".join(f"%{i} = op(%7, [{number}, -1]) : f32[{number},3]" for i, number in enumerate(grown))
    data = b"".join(number.to_bytes(8, "little") for number in grown)
    return {"leaf": Leaf(text, tuple(grown)), "list": [text.encode(), data, None, True, 1.5], "same": ("007", b"\0\1")}


@given(st.lists(numbers, min_size=1, max_size=6), st.integers(1, 500))
def test_what_grows_by_the_same_with_every_row_is_known_for_every_size(made, rows):
    form = between([value(made, size) for size in SIZES], SIZES)
    assert form(rows) == value(made, rows)


def model(rows):
    made = messages().ModelDef()
    graph = made.graph.add()
    for name in ("a", "b"):
        op = graph.op.add(name=name, type="Const")
        op.attr["value"].t.data = rows.to_bytes(8, "little") + (4).to_bytes(8, "little")
        op.attr["_meta"].s = f"i32[{rows},4]".encode()
        op.attr["axes"].list.i.extend([rows * 3, 1])
        op.output_desc.add().shape.dim.extend([rows, 4])
        made.attr["shapes"].list.s.append(f"[{rows}]".encode())
    return made


@pytest.mark.parametrize("rows", [2, 8, 16, 49, 64, 300])
def test_messages_are_values_too(rows):
    first = model(SIZES[0])
    form = between([first, *map(model, SIZES[1:])], SIZES)
    assert form(rows) == model(rows)
    assert first == model(SIZES[0])
    assert between([first] * 3, SIZES)(rows) == first


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 2, 3], r"x is '1' for 8 rows, '2' for 34 rows, '3' for 64 rows; legal are numbers that grow by the same"),
        ([True, False, False], "x is 'True' for 8 rows"),
        ([0.5, 1.0, 2.0], "x is '0.5' for 8 rows"),
        ([1, "1", 1], "x is '1' for 8 rows"),
        ([[1], [1, 2], [1]], "'1 of them' for 8 rows, '2 of them' for 34 rows"),
        ([{"a": 8}, {"a": 34}, {"b": 64}], r"\['a'\]"),
        (["a 8", "a 34", "b 64"], "'b 64' for 64 rows"),
        (["same\na 8 b", "same\na 34 b", "same\na 64 c"], "x is 'a 8 b' for 8 rows, 'a 34 b' for 34 rows, 'a 64 c' for 64 rows"),
        (["k08", "k34", "k64"], "'k08' for 8 rows"),
        ([b"\x08\0", b"\x22\0\0", b"\x40\0"], "x is"),
        ([{"y": [8, 8]}, {"y": [34, 34]}, {"y": [64, 65]}], r"x\.y\.1 is '8' for 8 rows"),
    ],
)
def test_other_differences_are_named(values, said):
    with pytest.raises(LoweringError, match=said):
        between(values, SIZES, "x")


@pytest.mark.parametrize(
    "change", [lambda m: m.graph[0].op.add(), lambda m: m.graph[0].op[0].ClearField("type"), lambda m: m.graph[0].op[1].attr["new"]]
)
def test_other_differences_of_messages_are_named(change):
    models = list(map(model, SIZES))
    change(models[2])
    with pytest.raises(LoweringError, match=r"graph\.0\.op"):
        between(models, SIZES)


def test_a_size_between_rows_of_which_a_number_is_whole_is_refused():
    form = between([4, 17, 32], SIZES)
    assert form(10) == 5
    with pytest.raises(LoweringError, match="no number for 11"):
        form(11)
    with pytest.raises(LoweringError, match="no number for 2"):
        between([0, 26, 56], SIZES)(2)
