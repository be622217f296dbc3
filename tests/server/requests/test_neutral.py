"""server/requests/neutral.py: what clients send without meaning anything by it."""

from __future__ import annotations

import pytest

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.neutral import IGNORED, NEUTRAL, without_neutral

NOTHING = {
    "user": "me", "service_tier": "auto", "max_tool_calls": 3,
    "truncation": "disabled", "context_management": [],
}  # fmt: skip


def test_what_says_nothing_is_dropped():
    assert without_neutral({"input": "a", **NOTHING}) == {"input": "a"}
    for name, (values, _) in NEUTRAL.items():
        for value in values:
            assert without_neutral({name: value}) == {}
    assert not IGNORED.keys() & NEUTRAL.keys()


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("truncation", "auto", "legal is disabled or absent"),
        ("conversation", "conv_1", "legal is absent"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(name, value, legal):
    with pytest.raises(FieldError) as caught:
        without_neutral({name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} is ")
    assert legal in str(caught.value)
