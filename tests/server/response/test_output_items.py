"""server/response/output_items.py: the bodies of the events of one output item."""

from __future__ import annotations

import json

import pytest

from npucompile.server.response.output_items import MessageItem

PLACE = {"item_id": "msg_1", "output_index": 2, "content_index": 0}
LIKELY = {"token": "x", "token_id": 120, "logprob": -1.0}
BARE = [{"token": chr(id), "token_id": id, "logprob": -0.5, "top_logprobs": [LIKELY]} for id in (97, 98, 99)]
LOGPROBS = [entry | {"bytes": [entry["token_id"]], "top_logprobs": [LIKELY | {"bytes": [120]}]} for entry in BARE]


def item(status, *content):
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": list(content)}


def part(text, logprobs=()):
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


OPENING = [
    {"type": "response.output_item.added", "output_index": 2, "item": item("in_progress")},
    {"type": "response.content_part.added", **PLACE, "part": part("")},
]


def test_the_first_delta_opens_the_item_and_close_sums_it_up():
    output = MessageItem("msg_1", 2)
    assert not output.opened
    assert output.delta("a", [97], LOGPROBS[:1]) == [
        *OPENING,
        {"type": "response.output_text.delta", **PLACE, "delta": "a", "logprobs": BARE[:1], "token_ids": [97]},
    ]
    assert output.opened
    assert output.delta("bc", [98, 99], LOGPROBS[1:]) == [
        {"type": "response.output_text.delta", **PLACE, "delta": "bc", "logprobs": BARE[1:], "token_ids": [98, 99]},
    ]
    assert output.as_object() == item("in_progress", part("abc", LOGPROBS))
    assert output.close("completed") == [
        {"type": "response.output_text.done", **PLACE, "text": "abc", "logprobs": BARE},
        {"type": "response.content_part.done", **PLACE, "part": part("abc", LOGPROBS)},
        {"type": "response.output_item.done", "output_index": 2, "item": item("completed", part("abc", LOGPROBS))},
    ]
    assert output.as_object() == item("completed", part("abc", LOGPROBS))


@pytest.mark.parametrize("status", ["completed", "incomplete", "cancelled", "failed"])
def test_close_opens_what_nothing_came_of(status):
    output = MessageItem("msg_1", 2)
    shown = "completed" if status == "completed" else "incomplete"
    assert output.close(status) == [
        *OPENING,
        {"type": "response.output_text.done", **PLACE, "text": "", "logprobs": []},
        {"type": "response.content_part.done", **PLACE, "part": part("")},
        {"type": "response.output_item.done", "output_index": 2, "item": item(shown, part(""))},
    ]
    assert output.opened
    assert output.as_object()["status"] == shown


def test_bodies_do_not_change_once_they_are_handed_out():
    output = MessageItem("msg_1", 2)
    first = output.delta("a", [97], LOGPROBS[:1])
    snapshot = output.as_object()
    before = json.dumps([first, snapshot])
    output.delta("b", [98], LOGPROBS[1:2])
    output.close("completed")
    assert json.dumps([first, snapshot]) == before
