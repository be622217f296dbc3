"""server/requests/json_blanks.py: JSON that is forced ends, however much a model likes blanks, wherever a grammar is made."""

from __future__ import annotations

import json
import random
import re

import pytest
from support.grammars import EOS, TEXT, vocabulary

from npucompile.graphs.errors import RequestError
from npucompile.server.chat.reply_grammar import INSIDE, MAYBE, NONE, Reply
from npucompile.server.parsers.call_formats import FORMATS
from npucompile.server.requests.json_blanks import ONE_SPACE, OPTIONS, with_blanks
from npucompile.server.requests.structured_output import OutputFormat, of_chat, of_extension, of_responses
from npucompile.server.requests.tool_fields import ToolUse

KNOWN = vocabulary(TEXT)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
WRITTEN = '{"a": 1, "b": [true, false]}'
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
BODY = OutputFormat("json_schema", SCHEMA, "response_format.schema")
CHOICE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS = [
    of_chat({"type": "json_object"}),
    of_chat(CHOICE),
    of_responses({"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
    of_extension({"json": SCHEMA}),
    of_extension({"json": json.dumps(SCHEMA)}),
    of_extension({"json_object": True}),
    OutputFormat("reply", Reply(INSIDE, body=BODY), ""),
    OutputFormat("reply", Reply(MAYBE, body=of_chat({"type": "json_object"})), ""),
    *(
        OutputFormat("reply", Reply(reasoning, ToolUse((tool,), choice, parallel=False), form, body), "")
        for form in FORMATS
        for reasoning, tool, choice, body in (
            (NONE, TOOL, "required", None),
            (INSIDE, STRICT, "required", None),
            (NONE, STRICT, "auto", BODY),
        )
    ),
]


def blank_lover(constraint, begun=""):
    """What a model writes that likes nothing better than many blanks: the text, and whether it came to its end."""
    draw, output = random.Random(1), KNOWN.ids(begun)
    for _ in range(160):
        texts = {token: KNOWN.text([token]) for token in KNOWN.masks(constraint, output)[0]}
        blanks = [token for token, text in texts.items() if text and not text.strip(" \t\r\n")]
        ends = [token for token, text in texts.items() if token == EOS or text in ("}", "]")]
        token = max(blanks, key=lambda token: len(texts[token])) if blanks else (sorted(ends) or [draw.choice(sorted(texts))])[-1]
        if token == EOS:
            return KNOWN.text(output), True
        output.append(token)
    return KNOWN.text(output), False


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_likes_blanks_comes_to_an_end(form):
    reasoning = form.value.reasoning if isinstance(form.value, Reply) else NONE
    begun = {NONE: "", INSIDE: "hm</think>", MAYBE: "<think>hm</think>"}[reasoning]
    text, ended = blank_lover(KNOWN.compiler.constraint(form.kind, form.value), begun)
    assert ended
    assert not re.search(r"\s\s", text.removeprefix(begun).lstrip())


@pytest.mark.parametrize("form", [BODY, of_extension({"json": SCHEMA})])
def test_what_models_write_is_legal(form):
    constraint = KNOWN.compiler.constraint(form.kind, form.value)
    assert KNOWN.follows(constraint, WRITTEN)
    assert KNOWN.follows(constraint, WRITTEN.replace(" ", ""))
    assert not KNOWN.follows(constraint, WRITTEN.replace(" ", "  "))


LINES = json.dumps(json.loads(WRITTEN), indent=4)
FREE, NONE_AT_ALL = {"whitespace_flexible": True}, {"whitespace_flexible": False}


@pytest.mark.parametrize(
    ("schema", "fields", "legal", "illegal"),
    [
        ({**SCHEMA, OPTIONS: FREE}, {}, [LINES, WRITTEN], []),
        ({**SCHEMA, OPTIONS: NONE_AT_ALL}, {}, [WRITTEN.replace(" ", "")], [WRITTEN]),
        ({**SCHEMA, OPTIONS: {"item_separator": ", "}}, {}, [WRITTEN.replace(": ", ":")], [WRITTEN.replace(", ", ",")]),
        (SCHEMA, {"disable_any_whitespace": False}, [LINES, WRITTEN], []),
        (SCHEMA, {"disable_any_whitespace": True}, [WRITTEN.replace(" ", "")], [WRITTEN]),
        (json.dumps(SCHEMA), {"whitespace_pattern": r"\n {4,8}|\n| "}, [LINES, WRITTEN], [WRITTEN.replace(" ", "  ")]),
        ({**SCHEMA, OPTIONS: NONE_AT_ALL}, {"disable_any_whitespace": False}, [WRITTEN.replace(" ", "")], [WRITTEN]),
    ],
)
def test_a_schema_or_a_request_says_which_blanks_are_legal(schema, fields, legal, illegal):
    """The schema goes before the request, and that before the default."""
    form = of_extension({"json": schema, **fields})
    constraint = KNOWN.compiler.constraint(form.kind, form.value)
    assert all(KNOWN.follows(constraint, text) for text in legal)
    assert not any(KNOWN.follows(constraint, text) for text in illegal)


@pytest.mark.parametrize("form", FORMATS)
def test_a_schema_of_a_function_says_which_blanks_are_legal(form):
    """In tags that is so for each argument."""
    parameters = {**SCHEMA, "properties": {"b": SCHEMA["properties"]["b"]}, "required": ["b"]}
    for options, walks in ((FREE, True), (NONE_AT_ALL, False)):
        tool = {"type": "function", "function": {"name": "f", "parameters": {**parameters, OPTIONS: options}}}
        constraint = KNOWN.compiler.constraint("reply", Reply(NONE, ToolUse((tool,), "required", parallel=False), form))
        ended = blank_lover(constraint)[1]
        assert ended is not walks


def test_any_object_may_have_any_blanks():
    form = of_extension({"json_object": True, "disable_any_whitespace": False})
    assert KNOWN.follows(KNOWN.compiler.constraint(form.kind, form.value), LINES)


def test_options_of_a_schema_stay():
    assert with_blanks({"type": "string"}) == {"type": "string", OPTIONS: ONE_SPACE}
    assert with_blanks({OPTIONS: {"lenient": False}}, lenient=True) == {OPTIONS: {**ONE_SPACE, "lenient": False}}
    assert with_blanks({OPTIONS: 3}) == {OPTIONS: 3}
    with pytest.raises(RequestError, match="no legal json_schema"):
        KNOWN.compiler.constraint("json_schema", {OPTIONS: {"whitespace_pattern": "("}})
