"""server/openai/messages.py: messages as chat templates read them."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.openai.messages import messages_of
from npucompile.server.openai.request_models import RequestMessage

CALLED = {"name": "f", "arguments": {"a": 1}}
CALL = "messages[0].tool_calls[0]"


def read(**fields):
    return messages_of([RequestMessage.model_validate(fields)])[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"role": "user", "content": "a", "name": "me"}, {"role": "user", "content": "a", "name": "me"}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "reasoning": "hm", "content": "a"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}),
        ({"role": "tool", "tool_call_id": "1", "content": ""}, {"role": "tool", "tool_call_id": "1", "content": ""}),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
         {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": CALLED}]},
         {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]}),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "patch", "input": "a"}}]},
         {"role": "assistant", "content": "",
          "tool_calls": [{"id": "1", "type": "function", "function": {"name": "patch", "arguments": {"input": "a"}}}]}),
    ],
)  # fmt: skip
def test_content_is_text_and_arguments_are_objects(fields, expected):
    assert read(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, f"{CALL}.function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, f"{CALL}.custom"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("nothing", ["", "null", None, {}])
def test_a_call_may_have_no_arguments(nothing):
    message = read(role="assistant", tool_calls=[{"function": CALLED | {"arguments": nothing}}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_hints_within_messages_change_nothing():
    hints = {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": 1}, "extra_content": {"google": {}}}
    part = {"type": "text", "text": "a", "annotations": [], **hints}
    call = {"id": "1", "type": "function", "function": {**CALLED, "parsed_arguments": {"a": 1}, **hints}, **hints}
    said = {"role": "assistant", "reasoning_details": [{"type": "reasoning.text"}], "thinking_blocks": [{}], "parsed": None, **hints}
    expected = read(role="assistant", content="a", tool_calls=[{"id": "1", "function": CALLED}])
    assert read(**said, content=[part], tool_calls=[call]) == expected
    seen = {"type": "image_url", "image_url": {"url": "data:,", "format": "image/png"}, "uuid": "x", **hints}
    filmed = {"type": "video_url", "video_url": {"url": "data:,", "format": "video/mp4"}, "uuid": "x", **hints}
    assert read(role="user", content=[seen, filmed], **hints)["content"] == [{"type": "image"}, {"type": "video"}]
