"""server/response/events.py: the shapes and the order of server events."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import ProtocolError, RequestError
from npucompile.runtime.request import ExecutionRecord
from npucompile.server.engine.generation import completion_id
from npucompile.server.engine.output_stream import CompletionEnd, Usage
from npucompile.server.requests.fields import FieldError
from npucompile.server.response.events import TERMINAL_TYPES, ResponseEvents, ResponseInfo, error_event
from npucompile.server.response.output_items import MessageItem
from npucompile.server.response.output_writer import TextWriter
from npucompile.server.response.usage import usage_object

RECORD = ExecutionRecord(1.5, 2.5, 9.0, ("prefill-b1-q32",), (("decode-b2-q1", 3),), padded_rows=3, preemptions=0, cached_tokens=4)
ROOT = Path(__file__).resolve().parents[3]
HEAD = ResponseInfo("resp_1", "s", "tiny", 1700000000, 16, 0.0, 1.0, top_logprobs=2)
USAGE = Usage(5, 3, RECORD)


def writers(count=1):
    return [TextWriter(MessageItem(completion_id("msg_1", index), index), count == 1) for index in range(count)]


def run(deltas, reason, message=None):
    events = ResponseEvents(HEAD, writers())
    out = events.begin()
    for text, ids in deltas:
        out += events.delta(0, [text], ids)
    ending = CompletionEnd(reason, USAGE, message)
    return out + events.close(0, ending.status) + events.end([ending])


def test_a_completed_response_event_by_event():
    events = run([("Hel", [1, 2]), ("lo", [3])], "stop")
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    body = [{name: event[name] for name in event if name not in ("sequence_number", "stream_id")} for event in events]
    assert [event["type"] for event in body[:2]] == ["response.created", "response.in_progress"]
    assert body[2:-1] == [
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"status": "in_progress", "content": []}},
        {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "Hel", "logprobs": [], "token_ids": [1, 2]},
        {"type": "response.output_text.delta", **place, "delta": "lo", "logprobs": [], "token_ids": [3]},
        {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]
    assert body[-1]["type"] == "response.completed"
    assert body[-1]["response"] == body[0]["response"] | {"status": "completed", "output": [item], "usage": usage_object([USAGE])}


def test_the_response_object_of_the_first_event():
    assert run([], "stop")[0]["response"] == {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000,
        "status": "in_progress",
        "model": "tiny",
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_logprobs": 2,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "store": False,
        "background": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": None,
    }


@pytest.mark.parametrize(
    ("reason", "last", "status", "item_status"),
    [
        ("stop", "response.completed", "completed", "completed"),
        ("length", "response.incomplete", "incomplete", "incomplete"),
        ("cancelled", "response.cancelled", "cancelled", "incomplete"),
        ("error", "response.failed", "failed", "incomplete"),
    ],
)
def test_every_reason_has_its_last_event(reason, last, status, item_status):
    event = run([("x", [1])], reason, "the step failed" if reason == "error" else None)[-1]
    response = event["response"]
    assert last in TERMINAL_TYPES
    assert (event["type"], response["status"], response["output"][0]["status"]) == (last, status, item_status)
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if reason == "length" else None)
    assert response["error"] == ({"code": "server_error", "message": "the step failed"} if reason == "error" else None)
    assert response["usage"]["total_tokens"] == 8


def test_the_first_completion_has_the_name_of_the_whole():
    assert [completion_id("resp_a", index) for index in range(3)] == ["resp_a", "resp_a_1", "resp_a_2"]


def test_errors_are_told_apart():
    refused = error_event(FieldError("top_k is -1", param="top_k", stream_id="a"))
    error = {"type": "invalid_request_error", "code": "invalid_field", "message": "top_k is -1", "param": "top_k"}
    assert refused == {"type": "error", "status": 400, "error": error, "stream_id": "a"}
    frame = error_event(ProtocolError("not JSON", code="invalid_json"))
    error = {"type": "invalid_request_error", "code": "invalid_json", "message": "not JSON", "param": None}
    assert frame == {"type": "error", "status": 400, "error": error}
    request = error_event(RequestError("too long", param="input", code="context_length_exceeded"), stream_id="b")
    assert request["stream_id"] == "b"
    assert (request["error"]["code"], request["error"]["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_a_page_that_names_one_end_of_a_response_names_them_all(page):
    """A client that is written from it would wait for ever at the others."""
    named = {kind for kind in TERMINAL_TYPES if f"`{kind}`" in page.read_text(encoding="utf-8")}
    whole = "response.completed" in named or page.name == "README.md"
    assert named == set(TERMINAL_TYPES) or not whole
