"""server/requests/fields.py: readers of single fields pass legal values unchanged and name the legal ones when they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.requests.fields import (
    MAX_PARAM_CHARS,
    FieldError,
    boolean,
    choices,
    integer,
    logit_bias,
    number,
    optional,
    refuse_unknown,
    show,
    string,
    strings,
    token_ids,
)

READERS = {
    "string": string(),
    "string of 3": string(3),
    "integer from 1": integer(1),
    "integer 0 to 20": integer(0, 20),
    "boolean": boolean,
    "choices": choices(("a", "b")),
    "strings": strings(2, 3),
    "a string or several": strings(2, 3, alone=True),
    "token ids": token_ids,
    "number": number,
    "logit bias": logit_bias,
}


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("string", "x" * 1000),
        ("string of 3", "abc"),
        ("integer from 1", 1),
        ("integer from 1", 2**80),
        ("integer 0 to 20", 0),
        ("integer 0 to 20", 20),
        ("boolean", False),
        ("number", -1.5),
    ],
)
def test_legal_values_pass_unchanged(reader, value):
    read = READERS[reader](value, "x")
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("reader", "value", "expected"),
    [
        ("strings", ["abc", "d"], ("abc", "d")),
        ("strings", [], ()),
        ("a string or several", "abc", ("abc",)),
        ("token ids", [3, 1, 3], (1, 3)),
        ("logit bias", {"30": 1, "7": -2.5}, ((7, -2.5), (30, 1))),
        ("logit bias", {}, ()),
    ],
)
def test_lists_become_tuples(reader, value, expected):
    assert READERS[reader](value, "x") == expected


@pytest.mark.parametrize(
    ("reader", "value"),
    [("strings", "abc"), ("strings", ["abcd"]), ("strings", [""]), ("strings", ["a"] * 3), ("strings", [1]),
     ("token ids", []), ("token ids", [-1]), ("token ids", [True]), ("token ids", 1)],
)  # fmt: skip
def test_lists_of_other_things_are_refused(reader, value):
    with pytest.raises(FieldError, match="legal is a list of"):
        READERS[reader](value, "x")


@pytest.mark.parametrize("value", [{"a": 1}, {"-1": 1}, {"1": "2"}, {"1": True}, {"1" * 11: 1}, {"²": 1}, [1]])
def test_a_bias_that_is_none_is_refused(value):
    with pytest.raises(FieldError, match="legal"):
        READERS["logit bias"](value, "logit_bias")


def test_choices_become_a_set():
    assert READERS["choices"]([], "x") == frozenset()
    assert READERS["choices"](["b", "a", "b"], "x") == {"a", "b"}


@pytest.mark.parametrize(
    ("reader", "value", "names"),
    [
        ("string", "", ["''", "not empty"]),
        ("string", 1, ["1", "string"]),
        ("string of 3", "abcd", ["4 characters", "at most 3"]),
        ("integer from 1", 0, ["0", "of at least 1"]),
        ("integer from 1", True, ["True", "integer"]),
        ("integer from 1", 1.0, ["1.0", "integer"]),
        ("integer 0 to 20", -1, ["-1", "from 0 to 20"]),
        ("integer 0 to 20", 21, ["21", "from 0 to 20"]),
        ("integer 0 to 20", "3", ["'3'", "integer"]),
        ("boolean", 1, ["1", "true or false"]),
        ("choices", "a", ["'a'", "list", "'b'"]),
        ("choices", ["a", "c"], ["'c'", "'a', 'b'"]),
        ("choices", [["a"]], ["['a']", "'a', 'b'"]),
    ],
)
def test_illegal_values_are_named_with_the_legal_ones(reader, value, names):
    with pytest.raises(FieldError) as caught:
        READERS[reader](value, "the_field")
    assert (caught.value.code, caught.value.param, caught.value.stream_id) == ("invalid_field", "the_field", None)
    for name in ["the_field", *names]:
        assert name in str(caught.value)


JUNK = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.sampled_from(sorted(READERS)), JUNK | st.dictionaries(st.text(max_size=3), JUNK, max_size=2))
def test_whatever_comes_is_read_or_refused_shortly(reader, value):
    message = ""
    try:
        hash(READERS[reader](value, "x"))
    except FieldError as error:
        message = str(error)
    assert len(message) < 300


def test_what_is_absent_is_none_and_not_read():
    assert optional({}, "x", integer(1)) is None
    assert optional({"x": 5}, "x", integer(1)) == 5
    with pytest.raises(FieldError, match="x is None"):
        optional({"x": None}, "x", integer(1))


def test_fields_nobody_knows_are_refused_beside_the_known():
    refuse_unknown({"a": 1}, ("a", "b"), "the body")
    with pytest.raises(FieldError, match=r"the body has no field 'c'; legal fields are \['a', 'b'\]") as caught:
        refuse_unknown({"a": 1, "c": 1}, ("a", "b"), "the body")
    assert (caught.value.code, caught.value.param) == ("unknown_field", "c")
    with pytest.raises(FieldError) as caught:
        refuse_unknown({"x" * 10_000: 1}, ("a",), "the body")
    assert len(caught.value.param) == MAX_PARAM_CHARS
    assert len(str(caught.value)) < 300


def test_values_are_shown_shortly():
    assert show("ab") == "'ab'"
    nested = 1
    for _ in range(5):
        nested = [nested] * 6
    assert len(show(nested)) < 300
