"""The fields of a request that ask for structured output: OpenAI's two forms, and vLLM's for what OpenAI does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import FieldError, refuse_unknown, show
from .json_blanks import with_blanks

EXTENDED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object"}
"""Fields of vLLM's `structured_outputs`, and the kind of grammar that each holds."""

PATTERN, COMPACT = "whitespace_pattern", "disable_any_whitespace"
"""Its fields that say which blanks JSON has: those of an expression, none or any."""


@dataclass(frozen=True)
class OutputFormat:
    """What an output must be.

    Attributes:
        kind: one of `grammar.KINDS`, or `grammar.REPLY`.
        value: of that kind; None for json_object.
        param: the field that asks for it.
    """

    kind: str
    value: Any
    param: str


def of_responses(text: Any) -> OutputFormat | None:
    """`text` of OpenAI's Responses: `{"format": {"type": "json_schema", "name": ..., "schema": ...}}`; None for plain text.

    Raises:
        FieldError: it has another form.
    """
    param = "text"
    body = _object(text, param)
    refuse_unknown(body, ("format", "verbosity"), param)
    if body.get("verbosity") not in (None, "medium"):
        raise FieldError(f"{param}.verbosity is {show(body['verbosity'])}; legal is 'medium' or absent", param=f"{param}.verbosity")
    if body.get("format") is None:
        return None
    form = _object(body["format"], f"{param}.format")
    legal = ("type", "name", "schema", "strict", "description") if form.get("type") == "json_schema" else ("type",)
    refuse_unknown(form, legal, f"{param}.format")
    return _typed(form, form, f"{param}.format")


def of_chat(response_format: Any) -> OutputFormat | None:
    """`response_format` of OpenAI's chat completions: `{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}`.

    Raises:
        FieldError: it has another form.
    """
    param = "response_format"
    form = _object(response_format, param)
    refuse_unknown(form, ("type", "json_schema") if form.get("type") == "json_schema" else ("type",), param)
    inner: Mapping[str, Any] = {}
    if form.get("type") == "json_schema":
        inner = _object(form.get("json_schema"), f"{param}.json_schema")
        refuse_unknown(inner, ("name", "schema", "strict", "description"), f"{param}.json_schema")
    return _typed(form, inner, param)


def of_extension(structured_outputs: Any) -> OutputFormat:
    """vLLM's `structured_outputs`: exactly one of its fields, and beside JSON which blanks that has.

    Raises:
        FieldError: it has another form.
    """
    param = "structured_outputs"
    given = {name: value for name, value in _object(structured_outputs, param).items() if value is not None}
    refuse_unknown(given, (*EXTENDED, PATTERN, COMPACT), param)
    body = {name: value for name, value in given.items() if name in EXTENDED}
    if len(body) != 1:
        raise FieldError(f"{param} has {sorted(body) or 'no fields'}; legal is exactly one of {list(EXTENDED)}", param=param)
    ((name, value),) = body.items()
    if name == "json_object" and value is not True:
        raise FieldError(f"{param}.json_object is {show(value)}; legal is true", param=f"{param}.json_object")
    value = None if name == "json_object" else value
    if len(given) == 1:
        return OutputFormat(EXTENDED[name], value, f"{param}.{name}")
    blanks = _blanks(given, name, param)
    schema = {"type": "object"} if value is None else _parsed(value)
    return OutputFormat("json_schema", with_blanks(schema, blanks) if isinstance(schema, Mapping) else value, f"{param}.{name}")


def _blanks(given: Mapping[str, Any], name: str, param: str) -> Mapping[str, Any]:
    """Which blanks JSON has, as llguidance's options of a schema."""
    pattern, compact = given.get(PATTERN), given.get(COMPACT)
    field = PATTERN if pattern is not None else COMPACT
    if name not in ("json", "json_object"):
        raise FieldError(f"{param}.{field} is given beside {name}; legal is json or json_object beside it", param=f"{param}.{field}")
    if not isinstance(pattern, str | None):
        raise FieldError(f"{param}.{PATTERN} is {show(pattern)}; legal is an expression", param=f"{param}.{PATTERN}")
    if not isinstance(compact, bool | None) or (compact and pattern is not None):
        legal = "true, false or absent" if pattern is None else f"false or absent beside {PATTERN}"
        raise FieldError(f"{param}.{COMPACT} is {show(compact)}; legal is {legal}", param=f"{param}.{COMPACT}")
    return {"whitespace_flexible": not compact} if pattern is None else {"whitespace_pattern": pattern}


def _parsed(schema: Any) -> Any:
    """A schema that may be a text; what is no JSON stays one, for the grammar to refuse."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return schema


def _typed(form: Mapping[str, Any], schema_holder: Mapping[str, Any], param: str) -> OutputFormat | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_object", None, param)
    if kind != "json_schema":
        raise FieldError(f"{param}.type is {show(kind)}; legal are 'text', 'json_object' and 'json_schema'", param=f"{param}.type")
    strict = schema_holder.get("strict")
    if strict not in (None, True, False):
        raise FieldError(f"{param}.strict is {show(strict)}; legal is true, false or absent: it is always strict", param=f"{param}.strict")
    if not isinstance(schema_holder.get("schema"), Mapping):
        shown = show(schema_holder.get("schema"))
        raise FieldError(f"{param} has the schema {shown}; legal is a JSON schema, an object", param=f"{param}.schema")
    return OutputFormat("json_schema", schema_holder["schema"], f"{param}.schema")


def _object(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise FieldError(f"{param} is {show(value)}; legal is an object", param=param)
    return value
