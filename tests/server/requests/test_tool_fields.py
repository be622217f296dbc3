"""server/requests/tool_fields.py: tools, choices and reasoning as OpenAI's Responses API has them."""

from __future__ import annotations

import pytest

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.tool_fields import ToolUse, read_effort, read_tools, read_variables

TOOL = {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}


@pytest.mark.parametrize(
    ("body", "use"),
    [
        ({}, ToolUse()),
        ({"tools": [TOOL]}, ToolUse((CHAT_TOOL,))),
        ({"tools": [{**TOOL, "strict": None, "description": None, "parameters": None}]}, ToolUse((
            {"type": "function", "function": {"name": "f"}},))),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, ToolUse((CHAT_TOOL,), "required", None, False)),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, ToolUse((CHAT_TOOL,), "required", "f")),
        ({"tools": [TOOL], "tool_choice": "none"}, ToolUse((CHAT_TOOL,), "none")),
    ],
)  # fmt: skip
def test_tools_get_the_form_that_templates_know(body, use):
    assert read_tools(body) == use


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": {}}, "tools", "a list"),
        ({"tools": [{"type": "mcp"}]}, "tools[0]", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "not empty"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name", "not empty"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "JSON schema"),
        ({"tools": [{**TOOL, "description": 1}]}, "tools[0].description", "a string"),
        ({"tools": [{**TOOL, "strict": 1}]}, "tools[0].strict", "true or false"),
        ({"tools": [{**TOOL, "x": 1}]}, "x", "no field"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "name": "f", "x": 1}}, "tool_choice", "required"),
        ({"tool_choice": []}, "tool_choice", "required"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(body, param, words):
    with pytest.raises(FieldError) as caught:
        read_tools(body)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_reasoning_has_an_effort_and_no_other_setting():
    assert read_effort({}) is None
    assert read_effort({"reasoning": {"effort": None, "summary": "auto"}}) is None
    assert read_effort({"reasoning": {"effort": "low"}}) == "low"
    refused = {"effort": ({"effort": 1}, "reasoning.effort"), "summary": ({"summary": "detailed"}, "reasoning.summary")}
    for value, param in (*refused.values(), ([], "reasoning"), ({"mode": "pro"}, "mode")):
        with pytest.raises(FieldError) as caught:
            read_effort({"reasoning": value})
        assert caught.value.param == param
    assert read_variables({"a": 1}, "x") == {"a": 1}
    with pytest.raises(FieldError):
        read_variables([], "x")
