"""server/parsers/schemas.py: what the schema of a tool says of an argument, for those who read it and for those who force it."""

from __future__ import annotations

import json

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import WRITERS
from support.grammars import COMPILER, ids
from support.parsing import Call, joined

from npucompile.graphs.errors import RequestError
from npucompile.server.chat.reply_grammar import NONE, Reply
from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.parsers.schemas import MAX_SHAPES, TYPES, Schemas
from npucompile.server.parsers.tool_calls import ToolCallParser
from npucompile.server.requests.tool_fields import ToolUse

TAGGED = ("qwen3_coder", "deepseek_v32")

PLAIN = st.sampled_from(
    [
        ({"type": "string"}, "a b"),
        ({"type": "string"}, "1"),
        ({"type": "integer"}, 3),
        ({"type": "number"}, 2.5),
        ({"type": "boolean"}, True),
        ({"type": "null"}, None),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/Node"}}}, {"a": {"next": {}}}),
        ({"properties": {"a": {"type": "integer"}}}, {"a": 1}),
        ({"items": {"type": "string"}}, ["a"]),
        ({"minimum": 0}, 3),
        ({"enum": ["red", "1"]}, "1"),
        ({"enum": ["red", 1]}, 1),
        ({"enum": [1, 2]}, 2),
        ({"const": True}, True),
        ({"const": "true"}, "true"),
        ({"const": None}, None),
        ({"const": {"a": [1]}}, {"a": [1]}),
        ({"type": "string", "enum": ["a"]}, "a"),
        ({"type": ["string", "null"], "enum": ["a", None]}, None),
        ({"$ref": "#/$defs/Node"}, {"next": {"next": {}}}),
        ({"$ref": "#/properties/other"}, 7),
        ({"$ref": "#/definitions/a~1b%20c"}, False),
        ({}, {"a": 1}),
        (True, [1]),
    ]
)
DEFINITIONS = {
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "additionalProperties": False}},
    "definitions": {"a/b c": {"type": "boolean"}},
}
NULL = {"type": "null"}


@st.composite
def arguments(draw):
    """A schema as pydantic and others write them, a value that it allows, and definitions that it needs."""
    schema, value = draw(PLAIN)
    definitions = {}
    for name in draw(st.lists(st.sampled_from("AB"), max_size=2, unique=True)):
        definitions[name] = schema
        reference = {"$ref": f"#/$defs/{name}"}
        schema = draw(
            st.sampled_from(
                [reference, {**reference, "description": "x"}, {"anyOf": [reference, NULL]}, {"oneOf": [reference]}, {"allOf": [reference]}]
            )
        )
    return schema, value, definitions


def written(form, values, arguments):
    """A call as the grammar has it: texts as they are, all else as JSON, also texts where something else would be legal."""
    if form == "qwen3_coder":
        shown = {name: value if values[name].is_text else json.dumps(value) for name, value in arguments.items()}
        return WRITERS[form]("f", shown)
    text = WRITERS[form]("f", arguments)
    for name, value in arguments.items():
        if isinstance(value, str) and not values[name].is_text:
            text = text.replace(f'"{name}" string="true">{value}<', f'"{name}" string="false">{json.dumps(value)}<')
    return f"<｜DSML｜function_calls>\n{text}</｜DSML｜function_calls>"


@given(arguments(), st.sampled_from(TAGGED), st.booleans(), st.sampled_from(["plain", "$ref", "allOf", "anyOf"]))
@settings(max_examples=150, deadline=None)
def test_what_a_schema_allows_is_legal_in_the_grammar_and_read_as_the_value(argument, form, strict, root):
    schema, value, definitions = argument
    whole = {"type": "object", "properties": {"x": schema, "other": {"type": "integer"}}, "required": ["x"]}
    parameters = whole if root == "plain" else {"$ref": "#/$defs/Root"} if root == "$ref" else {root: [{"$ref": "#/$defs/Root"}]}
    parameters = {**parameters, "$defs": {**DEFINITIONS["$defs"], **definitions, "Root": whole}, "definitions": DEFINITIONS["definitions"]}
    # The reference to another property is to where it is.
    parameters = json.loads(json.dumps(parameters).replace("#/properties/", "#/$defs/Root/properties/"))
    schemas = Schemas(parameters)
    values = {name: schemas.argument(name) for name in ("x", "other")}
    text = written(form, values, {"x": value})
    use = ToolUse(
        ({"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}},), "required", parallel=False
    )
    matcher = llguidance.LLMatcher(COMPILER._tokens, COMPILER._grammar("reply", Reply(NONE, use, form), "tools"), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = ids(text)
    assert matcher.validate_tokens(tokens) == len(tokens), text
    (call,) = joined(ToolCallParser(FORMATS[form], {"f": parameters}), [text])
    assert call == Call("f", {"x": value})
    assert type(call.arguments["x"]) is type(value)
    assert values["x"].allows(value)


@pytest.mark.parametrize(
    ("schema", "types", "options"),
    [
        ({}, TYPES, None),
        ({"$ref": "#/none"}, TYPES, None),
        ({"$ref": "http://x"}, TYPES, None),
        (False, set(), ()),
        ({"$ref": "#/$defs/loop"}, set(), ()),
        ({"anyOf": [{"$ref": "#/$defs/list"}, {"$ref": "#/$defs/list"}]}, {"array", "integer"}, None),
        ({"type": "number"}, {"integer", "number"}, None),
        ({"type": ["string", 3]}, TYPES, None),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["null", "integer"]}]}, {"null"}, None),
        ({"enum": ["a", "b", 1], "allOf": [{"enum": ["b", 1.0, True]}]}, {"string", "integer"}, ("b", 1)),
        ({"anyOf": [{"const": "a"}, {"type": "null"}, {"enum": ["b"]}]}, {"string", "null"}, ("a", None, "b")),
        ({"anyOf": [{"required": ["a"]}, {"pattern": "b"}]}, {"object", "string"}, None),
    ],
)
def test_a_schema_says_which_values_it_allows(schema, types, options):
    loops = {"loop": {"$ref": "#/$defs/loop"}, "list": {"anyOf": [{"$ref": "#/$defs/list"}, {"items": {}}, {"type": "integer"}]}}
    values = Schemas({"$defs": loops}).values(schema)
    assert values.types == types
    assert values.options == options or options is None


def test_what_a_schema_does_not_name_is_a_text_unless_it_says_what_others_are():
    assert Schemas({}).argument("x").is_text
    assert Schemas({"additionalProperties": {"type": "integer"}}).argument("x").types == {"integer"}
    assert Schemas(None).argument("x").is_text


def nested(depth, schema):
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema


WIDE = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 9} for i in range(60)}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": WIDE},
        {"properties": {"x": nested(200, {"type": "integer"})}},
        {"properties": {"x": {"allOf": [{"enum": [*range(10**5)]}] * 2}}},
        {"$ref": "#"},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": True}} for i in "abc"]} for j in range(12)]},
    ],
    ids=["references", "depth", "values", "circle", "alternatives"],
)
def test_any_schema_is_read_within_bounds(parameters):
    """Without bounds each takes longer than anybody waits, or ends the stack."""
    schemas = Schemas(parameters)
    assert len(schemas.shapes()) <= MAX_SHAPES + 1
    assert schemas.argument("x").types
    schemas.standalone(parameters.get("properties", {}).get("x"))


def test_a_grammar_has_so_many_alternatives_and_no_more():
    parameters = {"anyOf": [{"properties": {str(i): True}} for i in range(MAX_SHAPES + 1)]}
    use = ToolUse(({"type": "function", "function": {"name": "f", "parameters": parameters}},), "required")
    with pytest.raises(RequestError, match=f"'f' have more than {MAX_SHAPES} alternatives") as caught:
        Reply(NONE, use, "qwen3_coder").grammar({})
    assert caught.value.param == "tools"
