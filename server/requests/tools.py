"""Reads tools of a request, and the `tool_choice` beside them, as OpenAI's chats and its Responses have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from .bodies import HINT, Body, Ignored, checked
from .fields import FieldError, show
from .left_out import LeftOut
from .tool_fields import AUTO, INPUT, NONE, REQUIRED, Declared, Function, Offer, ToolChoice

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
DEFAULT_NAMESPACE = "functions"
"""The namespace of functions that have no other: its name changes nothing."""


class ToolFields(Body):
    """What all tools have; hints are not in the prompt."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    cache_control: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True)
    defer_loading: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True)
    allowed_callers: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True)
    output_schema: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True)
    at_once: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True, alias="async")
    provider_specific_fields: Annotated[Any, Ignored(HINT)] = Field(None, exclude=True)


class FunctionFields(ToolFields):
    """What a function is."""

    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolRules(Body):
    """A grammar of a text."""

    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomFormat(ToolRules):
    """What the text of a custom tool must be; in chats its grammar is one level further in."""

    type: Literal["text", "grammar"]
    grammar: ToolRules | None = None


class CustomFields(ToolFields):
    """What a custom tool is."""

    format: CustomFormat | None = None


class Tool(Body):
    """A tool of a chat, around what it is."""

    type: str
    function: FunctionFields | None = None
    custom: CustomFields | None = None
    cache_control: Annotated[Any, Ignored(HINT)] = None
    provider_specific_fields: Annotated[Any, Ignored(HINT)] = None


class Namespace(Body):
    """Functions and custom tools under a name."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    tools: list[Any]


def in_namespace(namespace: object, name: str) -> str:
    """What a function of a namespace is called in the prompt."""
    if not isinstance(namespace, str) or namespace in ("", DEFAULT_NAMESPACE):
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def read_tools(value: Any, param: str = "tools") -> tuple[Offer | LeftOut, ...]:
    """The tools of a response, or of an item that brings some.

    Raises:
        FieldError: one of them is not legal.
    """
    return tuple(tool for i, entry in enumerate(_listed(value, param)) for tool in _of_response(entry, f"{param}[{i}]"))


def read_chat_tools(value: Any, param: str = "tools") -> tuple[Offer | LeftOut, ...]:
    """The tools of a chat.

    Raises:
        FieldError: one of them is not legal.
    """
    return tuple(tool for i, entry in enumerate(_listed(value, param)) for tool in _of_chat(entry, f"{param}[{i}]"))


def _listed(value: Any, param: str) -> list[Any]:
    """The entries of a list, none of which has been looked at."""
    count = len(value) + brought(value) if isinstance(value, list) else 0
    if not isinstance(value, list) or count > MAX_TOOLS:
        shown = f"{count} tools" if isinstance(value, list) else show(value)
        raise FieldError(f"{param} is {shown}; legal is a list of at most {MAX_TOOLS}", param=param)
    return value


def brought(entries: Sequence[Any]) -> int:
    """How many tools entries of a list have within them."""
    lists = (entry.get("tools") for entry in entries if isinstance(entry, dict))
    return sum(len(tools) + brought(tools) for tools in lists if isinstance(tools, list))


def _kind(entry: Any, where: str) -> str:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        kind, at = (entry.get("type"), f"{where}.type") if isinstance(entry, dict) else (entry, where)
        raise FieldError(f"{at} is {show(kind)}; legal are 'function', 'custom' and other kinds of tools, by name", param=at)
    return str(entry["type"])


def _of_response(entry: Any, where: str) -> list[Offer | LeftOut]:
    kind = _kind(entry, where)
    fields = {name: value for name, value in entry.items() if name != "type"}
    if kind == "function":
        function = checked(FunctionFields, fields, where)
        return [Offer(_function(function.model_dump(exclude_none=True)), Declared(function.name))]
    if kind == "custom":
        return _custom(checked(CustomFields, fields, where), where)
    return _namespaced(checked(Namespace, entry, where), where) if kind == "namespace" else [_left_out(kind, where)]


def _of_chat(entry: Any, where: str) -> list[Offer | LeftOut]:
    kind = _kind(entry, where)
    if kind not in ("function", "custom"):
        return [_left_out(kind, where)]
    tool = checked(Tool, entry, where)
    inner = tool.custom if kind == "custom" else tool.function
    if inner is None:
        raise FieldError(f"{where}.{kind} is missing in a tool of that type", param=f"{where}.{kind}", code="missing_field")
    if isinstance(inner, CustomFields):
        return _custom(inner, f"{where}.custom")
    return [Offer(_function(inner.model_dump(exclude_unset=True)), Declared(inner.name))]


def _function(fields: Mapping[str, Any]) -> Function:
    return {"type": "function", "function": fields}


def _custom(tool: CustomFields, where: str) -> list[Offer | LeftOut]:
    """A function of one text; what that must look like is told to the model."""
    rules = ""
    if tool.format and tool.format.type == "grammar":
        grammar = tool.format.grammar or tool.format
        for name, given in grammar:
            if name in ToolRules.model_fields and given is None:
                raise FieldError(f"{where}.format has no {name} of its grammar", param=f"{where}.format", code="missing_field")
        rules = f"{INPUT} keeps to this grammar ({grammar.syntax}):\n{grammar.definition}"
    said = [tool.description or "", rules]
    text = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {"name": tool.name, "description": "\n\n".join(filter(None, said)), "parameters": text}
    why = f"the grammar of {show(tool.name)} is told to the model, and not forced on it"
    offer = Offer(_function(function), Declared(tool.name, custom=True))
    return [offer, LeftOut(f"{where}.format", why)] if rules else [offer]


def _namespaced(namespace: Namespace, where: str) -> list[Offer | LeftOut]:
    """The tools of a namespace, the first of which tells what it is."""
    tools: list[Offer | LeftOut] = []
    about = namespace.description
    for entry in read_tools(namespace.tools, f"{where}.tools"):
        if isinstance(entry, Offer) and entry.declared.namespace is None:
            function, declared = entry.function["function"], entry.declared
            said = "\n\n".join(filter(None, (about, function.get("description"))))
            function = {**function, "name": in_namespace(namespace.name, declared.name), **({"description": said} if said else {})}
            space = None if namespace.name == DEFAULT_NAMESPACE else namespace.name
            entry, about = Offer(_function(function), Declared(declared.name, space, declared.custom)), None
        tools.append(entry)
    return tools


def _left_out(kind: str, where: str) -> LeftOut:
    return LeftOut(where, f"a tool of type {show(kind)} is none of this server's, and the prompt does not have it")


def read_choice(value: Any) -> ToolChoice | str:
    """`tool_choice` of a response: a word, a tool, or the tools that are allowed. In chats all but the type is one level further in.

    Raises:
        FieldError: it has another form.
    """
    if value in (NONE, AUTO, REQUIRED) and isinstance(value, str):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "allowed_tools":
        return _allowed({**value, **value[kind]} if isinstance(value.get(kind), dict) else value)
    if kind in ("function", "custom"):
        return ToolChoice(_chosen(value, "tool_choice"))
    legal = "'none', 'auto', 'required', or an object that names a function, a custom tool or allowed_tools"
    raise FieldError(f"tool_choice is {show(value)}; legal is {legal}", param="tool_choice")


def _chosen(value: Mapping[str, Any], where: str) -> str:
    kind = str(value["type"])
    inner = value[kind] if isinstance(value.get(kind), dict) else value
    where = where if inner is value else f"{where}.{kind}"
    fields = {name: entry for name, entry in inner.items() if name != "type"}
    chosen = checked(ChosenTool, fields, where)
    return in_namespace(chosen.namespace, chosen.name)


class ChosenTool(Body):
    """The name of a function or of a custom tool."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    namespace: str | None = None


def _allowed(value: Mapping[str, Any]) -> ToolChoice:
    at, mode = "tool_choice.tools", value.get("mode")
    if mode not in (AUTO, REQUIRED):
        raise FieldError(f"tool_choice.mode is {show(mode)}; legal is 'auto' or 'required'", param="tool_choice.mode")
    entries = [(entry, f"{at}[{i}]", _kind(entry, f"{at}[{i}]")) for i, entry in enumerate(_listed(value.get("tools"), at))]
    done = [(entry, where) for entry, where, kind in entries if kind in ("function", "custom")]
    left_out = tuple(_left_out(kind, where) for _, where, kind in entries if kind not in ("function", "custom"))
    return ToolChoice(None, tuple(_chosen(entry, where) for entry, where in done), mode, left_out)
