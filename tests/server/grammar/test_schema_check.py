"""server/grammar/schema_check.py: a schema keeps what decides which values are legal, and loses what a compiler of grammars cannot hold."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.grammar.schema_check import compilable

BIG = 2**64


def test_annotations_may_hold_anything_and_names_are_no_keywords():
    schema = {
        "default": BIG,
        "examples": [float("nan")],
        "description": "\ud800",
        "properties": {"default": {"type": "integer", "title": "x"}},
    }
    assert compilable(schema, "f") == {"properties": {"default": {"type": "integer"}}}
    values = {"enum": [{"default": 1}], "const": {"title": "x"}}
    assert compilable(values, "f") == values


def test_bounds_beyond_64_bits_are_floats():
    assert compilable({"maximum": BIG, "minimum": -3}, "f") == {"maximum": float(BIG), "minimum": -3}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": BIG}, "const holds an integer of 65 bits"),
        ({"items": {"enum": [1, -BIG]}}, "enum holds an integer"),
        ({"multipleOf": BIG}, "multipleOf holds an integer"),
        ({"maximum": 10**400}, "maximum holds an integer"),
        ({"minimum": float("inf")}, "minimum holds inf; legal are finite"),
        ({"properties": {"\udfff": {}}}, "half a surrogate pair"),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_by_name(schema, message):
    with pytest.raises(RequestError, match=message) as caught:
        compilable(schema, "f")
    assert (caught.value.param, caught.value.code) == ("f", "invalid_grammar")


def test_a_schema_without_end_is_refused():
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        compilable(schema, "f")
