"""Tools as Kimi's templates declare them: with their keys in order, and from K2.5 on as TypeScript.

Kimi's checkpoints do so in Python beside the template (`apply_chat_template` in tokenization_kimi.py and tool_declaration_ts.py of
moonshotai/Kimi-K2.5), which other servers run and nothing here does; the template has the variable `tools_ts_str` for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .template import Chat, ChatTemplate

FORMAT, VARIABLE = "kimi_k2", "tools_ts_str"

Tools = Sequence[Mapping[str, Any]]

_INDENT, _BETWEEN = "  ", ",\n"
_ROOT, _DEFINITION = "#", "#/$defs/"
_ROOT_NAME = "parameters"
_OF_UNIONS = {
    **{name: name for name in ("string", "number", "boolean", "null")}, "integer": "number", "object": "{}", "array": "Array<any>",
}  # fmt: skip
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"), "number": ("maximum", "minimum"), "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}  # fmt: skip
"""What is said of a type besides its description."""
_OF_ENUMS: Mapping[str, Any] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}


def declared(chat: Chat, template: ChatTemplate, tool_calls: str | None) -> Chat:
    """The chat with its tools as the template was trained with them: one of another format of calls shows them as they come."""
    if tool_calls != FORMAT or not chat.tools:
        return chat
    tools = in_order(chat.tools)
    said = typescript(tools) if VARIABLE in template.variables else None
    return replace(chat, tools=tools, variables={**({VARIABLE: said} if said else {}), **chat.variables})


def in_order(value: Any) -> Any:
    """The value with the keys of all its objects sorted."""
    if isinstance(value, Mapping):
        return {key: in_order(each) for key, each in sorted(value.items())}
    return [in_order(each) for each in value] if isinstance(value, list | tuple) else value


def typescript(tools: Tools) -> str | None:
    """The declaration of tools; None where there is none, or one has a schema that it cannot say: templates show JSON then."""
    try:
        functions = [_function(tool["function"]) for tool in tools if tool.get("type") == "function" and tool.get("function")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    body = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n" if functions else None


def _function(function: Mapping[str, Any]) -> str:
    parameters, known = function.get("parameters") or {}, _Known()
    known.read_object(parameters)
    lines: list[str] = []
    # What a definition refers to makes no interface of the whole any more.
    if whole := known.root:
        fields = _BETWEEN.join(_fields(parameters, parameters.get("properties", {}), _INDENT))
        lines.append(f"interface {_ROOT_NAME} {{" + (f"\n{fields}\n" if fields else "") + "}")
    for name, schema in tuple(known.definitions.items()):
        known.read(schema)
        about = schema.get("description", "")
        lines += [_comment(about, "")] if about else []
        lines.append(f"interface {name} {_type(schema, '')}")
    about = function.get("description")
    lines += [_comment(about, "")] if about else []
    kind = _ROOT_NAME if whole else _object(parameters, "")
    return "\n".join([*lines, f"type {function.get('name', 'function')} = (_: {kind}) => any;"])


@dataclass
class _Known:
    """What a function's schema defines and refers to, in the order in which it is read.

    Attributes:
        definitions: of `$defs`, by name.
        root: whether a part of it is the whole again.
    """

    definitions: dict[str, Any] = field(default_factory=dict)
    root: bool = False

    def read(self, schema: Any) -> None:
        """Reads a schema.

        Raises:
            ValueError: it is none that has a type.
        """
        if isinstance(schema, bool):
            return
        if "$ref" in schema:
            self._refer(schema["$ref"])
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                self.read(each)
        elif "enum" in schema:
            _check_enum(schema)
        elif isinstance(schema.get("type"), list):
            _union(schema["type"])
        elif schema.get("type") == "object":
            self.read_object(schema)
        elif schema.get("type") == "array" and schema.get("items"):
            self.read(schema["items"])
        elif schema and "type" not in schema:
            raise ValueError(f"{schema} has no type")

    def read_object(self, schema: Mapping[str, Any]) -> None:
        """Reads the schema of an object."""
        self.definitions |= schema.get("$defs") or {}
        if isinstance(more := schema.get("additionalProperties"), Mapping):
            self.read(more)
        for each in schema.get("properties", {}).values():
            self.read(each)

    def _refer(self, place: str) -> None:
        self.root |= place == _ROOT
        if place != _ROOT and not (place.startswith(_DEFINITION) and place.rpartition("/")[2] in self.definitions):
            raise ValueError(f"{place} is not among the definitions")


def _check_enum(schema: Mapping[str, Any]) -> None:
    kinds = schema.get("type")
    named = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) and len(kinds) == 2 else kinds
    if isinstance(named, list) and len(named) != 1:
        raise ValueError(f"an enumeration of {kinds} has no one type")
    legal = _OF_ENUMS.get(named[0] if isinstance(named, list) else named or "", object)
    if not all(value is None or isinstance(value, legal) for value in schema["enum"]):
        raise ValueError(f"{schema['enum']} are not of type {kinds}")


def _type(schema: Any, indent: str) -> str:
    """The type of a schema; what it has on further lines is indented."""
    if isinstance(schema, bool) or not schema:
        return "any" if schema is not False else "null"
    if "$ref" in schema:
        return _ROOT_NAME if schema["$ref"] == _ROOT else str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(_type(each, indent) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema["type"]
    if isinstance(kind, list):
        return _union(kind)
    if kind == "array":
        return _array(schema.get("items") or True, indent)
    return _object(schema, indent) if kind == "object" else "number" if kind == "integer" else str(kind)


def _union(kinds: Sequence[str]) -> str:
    return " | ".join(_OF_UNIONS[kind] for kind in kinds)


def _array(item: Any, indent: str) -> str:
    inner = indent + _INDENT
    comments = _comments(item, inner)
    return f"Array<\n{comments}{inner}{_type(item, inner)}\n{indent}>" if comments else f"Array<{_type(item, indent)}>"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    inner, properties = indent + _INDENT, schema.get("properties", {})
    required = set(schema.get("required", []))
    fields = [*_fields(schema, sorted(properties, key=lambda name: (name not in required, name)), inner)]
    more = schema.get("additionalProperties")
    if more is not None:
        if not isinstance(more, bool | Mapping):
            raise ValueError(f"additionalProperties is {more!r}")
        fields.append(f"{inner}[k: string]: {'never' if more is False else _type(more, inner)}")
    body = _BETWEEN.join(fields)
    return f"{{\n{body}\n{indent}}}" if fields else "{}"


def _fields(schema: Mapping[str, Any], names: Iterable[str], indent: str) -> Iterable[str]:
    required = schema.get("required", [])
    for name in names:
        value = schema["properties"][name]
        comments, default = _comments(value, indent), value.get("default") if isinstance(value, Mapping) else None
        if default is not None:
            said = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comments += f"{indent}// Default: {said}\n"
        yield f"{comments}{indent}{name}{'' if name in required else '?'}: {_type(value, indent)}"


def _comments(schema: Any, indent: str) -> str:
    """Its description, and the bounds of a type that stands for itself, each on lines of its own."""
    if isinstance(schema, bool):
        return ""
    plain = isinstance(schema.get("type"), str) and not {"$ref", "anyOf", "enum"} & set(schema)
    bounds = [f"{name}: {schema[name]}" for name in _BOUNDS.get(schema["type"], ()) if name in schema] if plain else []
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    return "".join(f"{line}\n" for line in [*lines, *([f"{indent}// {', '.join(bounds)}"] if bounds else [])])


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
