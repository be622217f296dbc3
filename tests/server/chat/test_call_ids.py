"""server/chat/call_ids.py: ids that a model's own template shows, whoever made the ids of the history."""

from __future__ import annotations

import pytest

from npucompile.server.chat.call_ids import with_ids
from npucompile.server.parsers.call_formats import FORMATS

KIMI, MISTRAL = FORMATS["kimi_k2"].ids, FORMATS["mistral"].ids


def called(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": own, "function": {"name": name}} for name, own in calls]}


def result(own):
    return {"role": "tool", "tool_call_id": own, "content": "so"}


def ids_of(messages, ids):
    shown = with_ids(messages, ids)
    return [[call["id"] for call in m["tool_calls"]] if "tool_calls" in m else m.get("tool_call_id") for m in shown]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([called(("f", "call_1"), ("g", "call_2")), result("call_2"), result("call_1"), called(("f", "x")), result("x")],
         [["functions.f:0", "functions.g:1"], "functions.g:1", "functions.f:0", ["functions.f:2"], "functions.f:2"]),
        ([called(("f", "functions.f:0")), result("functions.f:0"), called(("f", "call_9"))],
         [["functions.f:0"], "functions.f:0", ["functions.f:1"]]),
        # A legal id stays, whatever its number; one that another call has does not.
        ([called(("f", "functions.f:1")), called(("f", "a")), result("a")], [["functions.f:1"], ["functions.f:2"], "functions.f:2"]),
        ([called(("f", "functions.f:0")), result("functions.f:0"), called(("f", "functions.f:0")), result("functions.f:0")],
         [["functions.f:0"], "functions.f:0", ["functions.f:1"], "functions.f:1"]),
        ([called(("f", None), ("f", None)), result(None), result(None)],
         [["functions.f:0", "functions.f:1"], "functions.f:0", "functions.f:1"]),
        ([{"role": "user", "content": "a"}, result("unknown")], [None, "unknown"]),
    ],
)  # fmt: skip
def test_calls_are_numbered_over_the_conversation(messages, expected):
    assert ids_of(messages, KIMI) == expected


def test_ids_of_nine_characters_are_legal_for_mistral():
    assert ids_of([called(("f", "a1b2c3d4e"), ("g", "toolu_1")), result("toolu_1")], MISTRAL) == [["a1b2c3d4e", "000000001"], "000000001"]
