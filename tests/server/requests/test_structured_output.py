"""server/requests/structured_output.py: the published forms are read, and every other is refused by the name of its field."""

from __future__ import annotations

import pytest

from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.structured_output import OutputFormat, of_chat, of_extension, of_responses

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("read", "value", "want"),
    [
        (of_responses, {}, None),
        (of_responses, {"format": {"type": "text"}}, None),
        (of_responses, {"format": None, "verbosity": "medium"}, None),
        (of_responses, {"format": {"type": "json_object"}}, ("json_object", None, "text.format")),
        (of_responses, {"format": {"type": "json_schema", **NAMED, "strict": True}}, ("json_schema", SCHEMA, "text.format.schema")),
        (of_chat, {"type": "text"}, None),
        (of_chat, {"type": "json_object"}, ("json_object", None, "response_format")),
        (of_chat, {"type": "json_schema", "json_schema": NAMED}, ("json_schema", SCHEMA, "response_format.schema")),
        (of_extension, {"regex": "a+"}, ("regex", "a+", "structured_outputs.regex")),
        (of_extension, {"json": SCHEMA, "regex": None}, ("json_schema", SCHEMA, "structured_outputs.json")),
        (of_extension, {"choice": ["a", "b"]}, ("choice", ["a", "b"], "structured_outputs.choice")),
        (of_extension, {"json_object": True}, ("json_object", None, "structured_outputs.json_object")),
    ],
)  # fmt: skip
def test_published_forms_are_read(read, value, want):
    assert read(value) == (want and OutputFormat(*want))


@pytest.mark.parametrize(
    ("read", "value", "param"),
    [
        (of_responses, [], "text"),
        (of_responses, {"format": "json"}, "text.format"),
        (of_responses, {"format": {"type": "xml"}}, "text.format.type"),
        (of_responses, {"format": {"type": "json_object", "schema": SCHEMA}}, "schema"),
        (of_responses, {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
        (of_responses, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": "yes"}}, "text.format.strict"),
        (of_responses, {"verbosity": "low"}, "text.verbosity"),
        (of_chat, {"type": "json_schema", "schema": SCHEMA}, "schema"),
        (of_chat, {"type": "json_schema"}, "response_format.json_schema"),
        (of_chat, {"type": None}, "response_format.type"),
        (of_extension, {}, "structured_outputs"),
        (of_extension, {"regex": "a", "choice": ["b"]}, "structured_outputs"),
        (of_extension, {"guided": 1}, "guided"),
        (of_extension, {"json_object": False}, "structured_outputs.json_object"),
        (of_extension, {"whitespace_pattern": " "}, "structured_outputs"),
        (of_extension, {"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        (of_extension, {"choice": ["a"], "disable_any_whitespace": False}, "structured_outputs.disable_any_whitespace"),
        (of_extension, {"json": SCHEMA, "whitespace_pattern": 1}, "structured_outputs.whitespace_pattern"),
        (of_extension, {"json": SCHEMA, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
        (
            of_extension,
            {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.disable_any_whitespace",
        ),
    ],
)
def test_other_forms_are_refused_by_the_name_of_the_field(read, value, param):
    with pytest.raises(FieldError, match="legal") as caught:
        read(value)
    assert caught.value.param == param
