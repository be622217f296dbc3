"""server/requests/tools.py: every kind of tool that openai's types know is done or named, and none of them fails a request."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from openai.types.chat import ChatCompletionCustomToolParam
from openai.types.responses import CustomToolParam, FunctionToolParam, NamespaceToolParam, tool_param

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.left_out import LeftOut
from npucompile.server.requests.tool_fields import Declared, Offer, ToolChoice
from npucompile.server.requests.tools import MAX_TOOLS, read_chat_tools, read_choice, read_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
RULES = 'start: "*** Begin Patch"'
FUNCTION = FunctionToolParam(type="function", name="f", parameters=SCHEMA, strict=False)
CUSTOM = CustomToolParam(
    type="custom", name="patch", description="edits", format={"type": "grammar", "syntax": "lark", "definition": RULES}
)
TOLD = f"edits\n\ninput keeps to this grammar (lark):\n{RULES}"


def functions(tools):
    return [tool.function["function"] for tool in tools if isinstance(tool, Offer)]


def kinds(union):
    """The types of tools of openai's union."""
    return {get_args(get_args(get_type_hints(kind, include_extras=True)["type"])[0])[0] for kind in get_args(union)}


def test_hints_of_a_tool_are_not_in_the_prompt():
    hints = {"defer_loading": True, "allowed_callers": ["direct"], "async": True, "output_schema": {}, "cache_control": {"a": 1}}
    hinted = {**FUNCTION, **hints}
    plain = {"name": "f", "parameters": SCHEMA, "strict": False}
    assert functions(read_tools([hinted])) == functions(read_tools([FUNCTION])) == [plain]
    chat = {"type": "function", "function": {**plain, "cache_control": {"type": "ephemeral"}}, "cache_control": {"type": "ephemeral"}}
    assert functions(read_chat_tools([chat])) == [plain]


def test_a_custom_tool_is_a_function_of_one_text():
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": RULES}}
    inner = ChatCompletionCustomToolParam(type="custom", custom={"name": "patch", "description": "edits", "format": form})
    for tools, at in ((read_tools([CUSTOM]), "tools[0]"), (read_chat_tools([inner]), "tools[0].custom")):
        offer, left_out = tools
        assert offer.function["function"] == {"name": "patch", "description": TOLD, "parameters": TEXT}
        assert offer.declared == Declared("patch", custom=True)
        assert left_out == LeftOut(f"{at}.format", "the grammar of 'patch' is told to the model, and not forced on it")
    (offer,) = read_tools([{"type": "custom", "name": "say", "format": {"type": "text"}}])
    assert offer.function["function"]["description"] == ""


def test_tools_of_a_namespace_have_both_names():
    tools = [FUNCTION, {"type": "custom", "name": "say"}, {"type": "local_shell"}]
    space = NamespaceToolParam(type="namespace", name="mcp__notes", description="Notes.", tools=tools)
    first, second, shell = read_tools([space])
    assert (first.name, first.declared) == ("mcp__notes__f", Declared("f", "mcp__notes"))
    assert (second.name, second.declared) == ("mcp__notes__say", Declared("say", "mcp__notes", custom=True))
    assert [function.get("description") for function in functions([first, second])] == ["Notes.", ""]
    assert shell.param == "tools[0].tools[2]"
    assert read_tools([{**space, "name": "crm__"}])[0].name == "crm__f"
    plain, custom, _ = read_tools([{**space, "name": "functions", "description": ""}])
    assert (plain.name, plain.declared, custom.declared) == ("f", Declared("f"), Declared("say", custom=True))


def test_every_other_kind_is_left_out_by_name_and_fails_nothing():
    others = kinds(tool_param.ToolParam) - {"function", "custom", "namespace"}
    assert {"web_search", "local_shell", "tool_search", "mcp", "computer"} <= others
    for read, function in ((read_tools, FUNCTION), (read_chat_tools, {"type": "function", "function": {"name": "f"}})):
        tools = read([{"type": kind, "name": "x", "filters": []} for kind in sorted(others)] + [function])
        assert [tool.param for tool in tools[:-1]] == [f"tools[{i}]" for i in range(len(others))]
        assert all(repr(kind) in tool.why for kind, tool in zip(sorted(others), tools, strict=False))
        assert functions(tools)[0]["name"] == "f"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", "auto"),
        ({"type": "function", "name": "f"}, ToolChoice("f")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("f")),
        ({"type": "custom", "custom": {"name": "patch"}}, ToolChoice("patch")),
        ({"type": "function", "name": "f", "namespace": "mcp__notes"}, ToolChoice("mcp__notes__f")),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, ToolChoice(None, ("f",), "auto")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}},
            ToolChoice(None, ("f",), "required"),
        ),
    ],
)
def test_a_choice_is_a_word_a_tool_or_those_that_are_allowed(value, expected):
    assert read_choice(value) == expected


def test_a_tool_that_is_allowed_and_left_out_is_named():
    choice = read_choice({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]})
    assert (choice.allowed, [part.param for part in choice.left_out]) == ((), ["tool_choice.tools[0]"])


@pytest.mark.parametrize(
    ("read", "value", "code", "param", "words"),
    [
        (read_tools, {}, "invalid_field", "tools", "a list of at most"),
        (read_tools, [FUNCTION] * (MAX_TOOLS + 1), "invalid_field", "tools", f"{MAX_TOOLS + 1} tools"),
        (
            read_tools,
            [{"type": "namespace", "name": "n", "tools": [FUNCTION] * MAX_TOOLS}],
            "invalid_field",
            "tools",
            f"{MAX_TOOLS + 1} tools",
        ),
        (read_tools, ["f"], "invalid_field", "tools[0]", "'function', 'custom'"),
        (read_tools, [{"name": "f"}], "invalid_field", "tools[0].type", "None"),
        (read_tools, [{"type": "function"}], "missing_field", "tools[0].name", "missing"),
        (read_tools, [{**FUNCTION, "paramters": {}}], "unknown_field", "tools[0].paramters", "did you mean parameters?"),
        (read_tools, [{**FUNCTION, "name": ""}], "invalid_field", "tools[0].name", "not empty"),
        (read_tools, [{**CUSTOM, "format": 1}], "invalid_field", "tools[0].format", "an object"),
        (read_tools, [{**CUSTOM, "format": {"type": "xml"}}], "invalid_field", "tools[0].format.type", "'text' or 'grammar'"),
        (read_tools, [{**CUSTOM, "format": {"type": "grammar", "syntax": "lark"}}], "missing_field", "tools[0].format", "no definition"),
        (read_tools, [{"type": "namespace", "name": "n", "tools": 1}], "invalid_field", "tools[0].tools", "a list"),
        (read_tools, [{"type": "namespace", "name": "n", "tools": [1]}], "invalid_field", "tools[0].tools[0]", "1"),
        (read_chat_tools, [{"type": "function"}], "missing_field", "tools[0].function", "missing"),
        (read_chat_tools, [{"type": "custom", "function": {"name": "f"}}], "missing_field", "tools[0].custom", "missing"),
        (read_chat_tools, [{"type": "function", "function": {"name": 1}}], "invalid_field", "tools[0].function.name", "a string"),
        (read_choice, "any", "invalid_field", "tool_choice", "'required'"),
        (read_choice, {"type": "web_search"}, "invalid_field", "tool_choice", "allowed_tools"),
        (read_choice, {"type": "function", "name": "f", "x": 1}, "unknown_field", "tool_choice.x", "not a field"),
        (read_choice, {"type": "allowed_tools", "tools": []}, "invalid_field", "tool_choice.mode", "'auto'"),
        (read_choice, {"type": "allowed_tools", "mode": "auto"}, "invalid_field", "tool_choice.tools", "a list"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(read, value, code, param, words):
    with pytest.raises(FieldError) as caught:
        read(value)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in str(caught.value)
