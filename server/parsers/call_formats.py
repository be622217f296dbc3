"""How kinds of models write tool calls. Formats have the names that vLLM and SGLang gave their parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .tool_calls import CallFormat, ToolCall, Tools

SEP = "<｜tool▁sep｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DSML = "｜DSML｜"

_FENCED = re.compile(rf"[^\n]*?{SEP}(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```\s*", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>\n]+)>(?P<value>.*?)</parameter>", re.DOTALL)
_INVOKE = re.compile(r'\s*name="(?P<name>[^"\n]+)"\s*>(?P<body>.*)', re.DOTALL)
_ARGUMENT = re.compile(
    rf'<{DSML}parameter\s+name="(?P<name>[^"\n]+)"\s+string="(?P<string>true|false)"\s*>(?P<value>.*?)</{DSML}parameter>', re.DOTALL
)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _named(name: Any, arguments: str) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise ValueError("no name")
    return ToolCall(name.strip(), arguments)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def json_call(body: str, _: Tools) -> ToolCall:
    """`{"name": ..., "arguments": {...}}`."""
    call = _object(body)
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return _named(call.get("name"), _dump(arguments))


def xml_call(body: str, tools: Tools) -> ToolCall:
    """`<function=NAME><parameter=NAME>VALUE</parameter>...</function>`; the tool's schema says which values are JSON."""
    found = _FUNCTION.fullmatch(body)
    if found is None or _PARAMETER.sub("", found["body"]).strip():
        raise ValueError("no function")
    name = found["name"].strip()
    properties = tools.get(name, {}).get("properties", {})
    arguments = {
        match["name"].strip(): _typed(match["value"].removeprefix("\n").removesuffix("\n"), properties.get(match["name"].strip()))
        for match in _PARAMETER.finditer(found["body"])
    }
    return _named(name, _dump(arguments))


def _typed(value: str, schema: Any) -> Any:
    """The value of an argument: text, unless its schema has a type other than string and the value is JSON of that type."""
    types = _types(schema)
    if not types or types == {"string"}:
        return value
    try:
        parsed = json.loads(value.strip().lower() if types & {"boolean", "null"} and value.strip().lower() in _WORDS else value)
    except (ValueError, RecursionError):
        return value
    return parsed if types & _TYPES[type(parsed)] else value


_WORDS = ("true", "false", "null")
_TYPES: Mapping[type, set[str]] = {
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
    str: {"string"},
}
"""Types of JSON schemas that a value of Python has."""


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    for several in ("anyOf", "oneOf"):
        choices = schema.get(several)
        types |= {kind for choice in (choices if isinstance(choices, list) else ()) for kind in _types(choice)}
    return types


def fenced_call(body: str, _: Tools) -> ToolCall:
    """`function<sep>NAME`, and the arguments in a fence of Markdown."""
    found = _FENCED.fullmatch(body)
    if found is None:
        raise ValueError("no fence")
    return _named(found["name"], _dump(_object(found["arguments"])))


def bare_call(body: str, _: Tools) -> ToolCall:
    """`NAME<sep>{...}`."""
    name, mark, arguments = body.partition(SEP)
    if not mark:
        raise ValueError("no separator")
    return _named(name, _dump(_object(arguments)))


def invoke_call(body: str, _: Tools) -> ToolCall:
    """Attributes and parameters of an `invoke` element, each of which says whether it is a string or JSON."""
    found = _INVOKE.fullmatch(body)
    if found is None or _ARGUMENT.sub("", found["body"]).strip():
        raise ValueError("no invocation")
    arguments = {
        match["name"]: match["value"] if match["string"] == "true" else json.loads(match["value"])
        for match in _ARGUMENT.finditer(found["body"])
    }
    return _named(found["name"], _dump(arguments))


FORMATS: Mapping[str, CallFormat] = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", json_call),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", xml_call),
    "deepseek_v3": CallFormat(CALL_BEGIN, CALL_END, fenced_call, CALLS),
    "deepseek_v31": CallFormat(CALL_BEGIN, CALL_END, bare_call, CALLS),
    "deepseek_v32": CallFormat(f"<{DSML}invoke", f"</{DSML}invoke>", invoke_call, (f"<{DSML}function_calls>", f"</{DSML}function_calls>")),
}

ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
}
"""Names that others have for them."""


def choose(template: str) -> str | None:
    """The format that a chat template tells its model to write calls in; None where it knows no tools."""
    if DSML in template:
        return "deepseek_v32"
    if CALL_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    return None
