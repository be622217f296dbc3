"""server/requests/fields.py: errors name what is wrong, and stay short whatever was sent."""

from __future__ import annotations

import pytest

from npucompile.server.requests.fields import MAX_PARAM_CHARS, FieldError, refuse_unknown, show


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
