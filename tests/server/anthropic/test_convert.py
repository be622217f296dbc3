"""server/anthropic/convert.py: turns become those of a chat; `test_messages.py` has a client that sends them."""

from __future__ import annotations

from typing import Any

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.anthropic.bodies import MessagesRequest
from npucompile.server.anthropic.convert import chat_of
from npucompile.server.openai.messages import messages_of
from npucompile.server.requests.bodies import validate


def chat(*messages: Any, **fields: Any) -> Any:
    body = validate(MessagesRequest, {"model": "m", "max_tokens": 8, "messages": list(messages), **fields}, "/v1/messages")
    return chat_of(body, "/v1/messages")[0]


def test_results_come_before_what_the_user_says_beside_them_and_reasoning_stays_with_its_turn() -> None:
    body = chat(
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "and?"},
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
             "content": [{"type": "text", "text": "r1"}, {"type": "text", "text": "r2"}]},
        ]},
        system="S",
    )  # fmt: skip
    assert messages_of(body.messages) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "ab", "reasoning_content": "hm",
         "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "r1\nr2", "tool_call_id": "t1"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "any"}, ("required", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
    ],
)
def test_choices_have_the_names_of_chats(given: Any, expected: Any) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    body = chat({"role": "user", "content": "x"}, tools=[tool], tool_choice=given)
    choice = body.tool_choice
    named = getattr(choice, "named", None)
    assert ("required" if named else choice, named, body.parallel_tool_calls) == expected
    assert body.tools[0].function["function"] == {"name": "f", "description": "", "parameters": {"type": "object"}}


def test_a_form_of_the_answer_and_an_effort_are_those_of_chats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = chat({"role": "user", "content": "x"}, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert (body.reasoning_effort, body.response_format.kind) == ("low", "json_schema")


def test_a_picture_is_a_url_of_its_bytes_and_no_assistant_has_one() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = chat({"role": "user", "content": [picture, {"type": "text", "text": "?"}]})
    assert body.messages[0].content[0].image_url.url.take() == "data:image/png;base64,AAAA"
    with pytest.raises(RequestError, match="legal are text, thinking and tool_use"):
        chat({"role": "user", "content": "x"}, {"role": "assistant", "content": [picture]})


def test_what_claude_code_sends_is_a_chat() -> None:
    """The fields of its requests (2.1.197, also with ENABLE_TOOL_SEARCH), each with a value that it has there."""
    cached = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": name, "description": f"does {name}", "input_schema": {"type": "object"}} for name in ("ToolSearch", "NotebookEdit")]
    body = chat(
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>today"}, {"type": "text", "text": "find it", **cached}]},
        {"role": "system", "content": "Available agent types"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "select:NotebookEdit", "max_results": 5}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", **cached, "content": [
                {"type": "tool_reference", "tool_name": "NotebookEdit"}, {"type": "tool_reference", "tool_name": "WebSearch"},
            ]},
            {"type": "text", "text": "Tool loaded.", **cached},
        ]},
        system=[{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief.", **cached}],
        tools=[tools[0], {**tools[1], "defer_loading": True}], thinking={"type": "adaptive"}, output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, metadata={"user_id": "{}"}, stream=True,
    )  # fmt: skip
    assert [message["role"] for message in messages_of(body.messages)] == ["system", "user", "system", "assistant", "tool", "user"]
    assert [message["content"] for message in messages_of(body.messages)][4:] == ["NotebookEdit\nWebSearch", "Tool loaded."]
    assert [tool.function["function"]["name"] for tool in body.tools] == ["ToolSearch", "NotebookEdit"]
    assert body.reasoning_effort == "high"
