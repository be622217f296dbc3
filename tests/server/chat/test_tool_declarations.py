"""server/chat/tool_declarations.py: Kimi's templates are given tools as its own Python gives them, and no other templates are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import Chat, ChatTemplate
from npucompile.server.chat.tool_declarations import in_order, typescript

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.\n\nOf cities alone.",
        "parameters": {
            "type": "object",
            "required": ["days", "city"],
            "properties": {
                "unit": {"type": ["string", "null"], "enum": ["C", "F", None], "default": "C"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "how many"},
                "city": {"type": "string", "maxLength": 20, "pattern": "[A-Z].*"},
                "hours": {"type": "array", "items": {"type": "number", "description": "of a day"}, "minItems": 1, "default": []},
                "names": {"type": "array", "items": {"type": "string"}},
                "about": {"type": "object", "properties": {"wind": {"type": "boolean", "default": True}}, "additionalProperties": False},
                "more": {"anyOf": [{"type": "integer"}, {"type": ["string", "array"]}, True], "description": "anything"},
                "free": {},
            },
            "additionalProperties": {"type": "object"},
        },
    },
}
TREE = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "$defs": {"Leaf": {"type": "object", "description": "green", "properties": {"at": {"$ref": "#/$defs/Leaf"}}}},
            "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/Leaf", "description": "one"}},
            "required": ["leaf"],
        },
    },
}
# What tool_declaration_ts.py of Kimi-K2.5 makes of the two.
DECLARED = """\
# Tools

## functions
namespace functions {
// Says the weather.

// Of cities alone.
type get_weather = (_: {
  // maxLength: 20, pattern: [A-Z].*
  city: string,
  // how many
  // maximum: 7, minimum: 1
  days: number,
  about?: {
    // Default: True
    wind?: boolean,
    [k: string]: never
  },
  free?: any,
  // minItems: 1
  // Default: []
  hours?: Array<
    // of a day
    number
  >,
  // anything
  more?: number | string | Array<any> | any,
  names?: Array<string>,
  // Default: "C"
  unit?: "C" | "F" | None,
  [k: string]: {}
}) => any;
interface parameters {
  // one
  leaf: Leaf,
  left?: parameters
}
// green
interface Leaf {
  at?: Leaf
}
type plant = (_: parameters) => any;
}
"""
CHAT = Chat([{"role": "user", "content": "How?"}], [WEATHER])
MARKS = "{# <|tool_call_begin|> <|tool_call_argument_begin|> #}"


def test_tools_are_declared_as_kimis_own_python_does() -> None:
    assert typescript(in_order([WEATHER, {"type": "_plugin"}, TREE])) == DECLARED
    assert typescript([{"type": "function", "function": {"name": "f"}}]) == (
        "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": []}, {"$ref": "#/$defs/none"}, {"$ref": "other.json"}, {"type": ["string", "weird"]}, {"enum": [1], "type": "string"},
        {"enum": [1], "type": ["string", "number"]}, {"type": "object", "additionalProperties": "some"}, 5,
        {"type": "string", "description": 5},
    ],
)  # fmt: skip
def test_what_it_cannot_say_is_shown_as_json(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    assert typescript([tool]) is None
    form = ChatFormat.of(ChatTemplate(MARKS + "{% if tools_ts_str %}{{ tools_ts_str }}{% else %}{{ tools | tojson }}{% endif %}"))
    assert form.render(Chat(CHAT.messages, [tool])) == json.dumps([in_order(tool)])


def test_no_tools_are_not_declared() -> None:
    assert typescript([]) is typescript([{"type": "_plugin"}]) is typescript([{"type": "function", "function": {}}]) is None


def test_templates_of_kimi_get_them_in_order_and_those_that_look_for_it_as_typescript() -> None:
    form = ChatFormat.of(ChatTemplate(MARKS + "{{ tools_ts_str }}|{{ tools | tojson }}"))
    assert form.tool_calls == "kimi_k2"
    assert form.render(CHAT) == f"{typescript(in_order([WEATHER]))}|{json.dumps([in_order(WEATHER)])}"
    assert in_order(WEATHER) == WEATHER
    assert json.dumps(in_order(WEATHER)) != json.dumps(WEATHER)
    assert form.render(Chat(CHAT.messages, [WEATHER], variables={"tools_ts_str": "mine"})).startswith("mine|")
    assert form.render(Chat(CHAT.messages)) == "|null"
    plain = ChatFormat.of(ChatTemplate("{# <tool_call> #}{{ tools_ts_str }}|{{ tools | tojson }}"))
    assert plain.render(CHAT) == "|" + json.dumps([WEATHER])
