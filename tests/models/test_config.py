"""models/config.py: typed access to the fields of a config.json."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ConfigError
from npucompile.models.config import Fields, read_json

FIELDS = Fields({"n": 3, "x": 0.5, "on": True, "name": "silu", "none": None, "inner": {"y": 2}, "list": [1]}, "file")


def test_values_come_in_the_kind_that_is_asked_for():
    assert (FIELDS.get(int, "n"), FIELDS.get(float, "x"), FIELDS.get(bool, "on"), FIELDS.get(str, "name")) == (3, 0.5, True, "silu")
    as_float = FIELDS.get(float, "n")
    assert (as_float, type(as_float)) == (3.0, float)


def test_the_first_name_that_is_present_wins_and_null_is_absent():
    assert FIELDS.get(int, "none", "missing", "n") == 3
    assert FIELDS.get(int, "none", default=7) == 7
    assert FIELDS.has("n")
    assert not FIELDS.has("none")
    assert not FIELDS.has("missing")


@pytest.mark.parametrize("kind, name", [(int, "x"), (int, "on"), (float, "on"), (bool, "n"), (str, "n"), (int, "name"), (int, "list")])
def test_another_kind_is_refused_with_the_value(kind, name):
    with pytest.raises(ConfigError) as error:
        FIELDS.get(kind, name)
    assert str(error.value) == f"file: {name} is {FIELDS.values[name]!r}; expected {kind.__name__}"


def test_a_missing_field_is_named_with_its_alternatives():
    with pytest.raises(ConfigError, match=r"^file: a or b is missing$"):
        FIELDS.get(int, "a", "b")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(2**60)])
def test_numbers_nobody_can_compute_with_are_refused(value):
    with pytest.raises(ConfigError, match=r"^file: v is .*expected a number of at most"):
        Fields({"v": value}, "file").get(float, "v")


@given(value=st.integers(-(2**53), 2**53), minimum=st.integers(-100, 100))
def test_minimum_is_inclusive(value, minimum):
    fields = Fields({"v": value}, "file")
    if value >= minimum:
        assert fields.get(int, "v", minimum=minimum) == value
    else:
        with pytest.raises(ConfigError, match=f"expected at least {minimum}"):
            fields.get(int, "v", minimum=minimum)


def test_only_accepts_what_is_implemented():
    FIELDS.only("name", "silu", "gelu")
    FIELDS.only("missing", "silu")
    FIELDS.only("none", "silu")
    FIELDS.only("on", True)
    with pytest.raises(ConfigError, match=r"^file: name is 'silu'; supported is 'gelu' or 'relu'$"):
        FIELDS.only("name", "gelu", "relu")
    with pytest.raises(ConfigError, match=r"n is 3; supported is True"):
        FIELDS.only("n", True)
    with pytest.raises(ConfigError, match=r"one is 1; supported is True"):
        Fields({"one": 1}, "file").only("one", True)


def test_sub_objects_know_where_they_are():
    inner = FIELDS.sub("inner")
    assert (inner.get(int, "y"), inner.where) == (2, "file: inner")
    assert FIELDS.sub("missing").values == {}
    with pytest.raises(ConfigError, match=r"^file: list is \[1\]; expected an object$"):
        FIELDS.sub("list")


def test_read_json_reads_objects_only(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}', encoding="utf-8")
    assert read_json(path) == {"a": 1}
    unreadable = "not readable as JSON"
    for content, problem in ((b"[1]", "holds a JSON list; expected an object"), (b"{", unreadable), (b"\xff{}", unreadable)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_json(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="not readable"):
        read_json(tmp_path)
