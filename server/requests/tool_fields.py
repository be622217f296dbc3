"""The fields of a response that are about tools and reasoning: `tools`, `tool_choice`, `parallel_tool_calls`, `reasoning`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .fields import FieldError, boolean, optional, refuse_unknown, show, string

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
NONE, AUTO, REQUIRED = "none", "auto", "required"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request, and what is to become of them.

    Attributes:
        tools: as `tools` of OpenAI's chats has them.
        choice: "none", "auto" or "required".
        named: the function that has to be called, where choice is "required"; None for any.
        parallel: whether a reply may have several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = AUTO
    named: str | None = None
    parallel: bool = True

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the prompt has: what is not to be called is not in it."""
        return () if self.choice == NONE else self.tools

    @property
    def constrains(self) -> bool:
        """Whether calls have to be of a form that the model might not write by itself."""
        forms = self.choice == REQUIRED or not self.parallel or any(tool["function"].get("strict") for tool in self.tools)
        return bool(self.offered) and forms

    @property
    def callable(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that may be called."""
        return tuple(tool["function"] for tool in self.offered if self.named in (None, tool["function"]["name"]))


def read_tools(body: Mapping[str, Any]) -> ToolUse:
    """The tools of a body, and what is to become of them.

    Raises:
        FieldError: one of the fields is not legal.
    """
    tools = body.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise FieldError(f"tools is {show(tools)}; legal is a list of at most {MAX_TOOLS} functions", param="tools")
    parallel = optional(body, "parallel_tool_calls", boolean)
    choice, named = _choice(body.get("tool_choice", AUTO))
    return ToolUse(tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)), choice, named, parallel is not False)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """A function in the form of chats, which templates know."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise FieldError(f"{where} is {show(tool)}; legal is an object with type 'function'", param=where)
    refuse_unknown(tool, ("type", "name", "description", "parameters", "strict"), where)
    tool = {name: value for name, value in tool.items() if value is not None}
    name = f"{where}.name"
    if optional({name: tool.get("name")}, name, string(MAX_NAME_CHARS)) is None:
        raise FieldError(f"{name} is missing; legal is a string that is not empty", param=name)
    if not isinstance(tool.get("parameters", {}), dict):
        raise FieldError(
            f"{where}.parameters is {show(tool['parameters'])}; legal is a JSON schema, an object", param=f"{where}.parameters"
        )
    if not isinstance(tool.get("description", ""), str):
        raise FieldError(f"{where}.description is {show(tool['description'])}; legal is a string", param=f"{where}.description")
    optional({f"{where}.strict": tool["strict"]} if "strict" in tool else {}, f"{where}.strict", boolean)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(value: Any) -> tuple[str, str | None]:
    if value in (NONE, AUTO, REQUIRED) and isinstance(value, str):
        return value, None
    if isinstance(value, dict) and value.get("type") == "function" and set(value) == {"type", "name"} and isinstance(value["name"], str):
        return REQUIRED, value["name"]
    legal = """"none", "auto", "required" or {"type": "function", "name": ...}"""
    raise FieldError(f"tool_choice is {show(value)}; legal is {legal}", param="tool_choice")


def read_effort(body: Mapping[str, Any]) -> str | None:
    """`reasoning.effort`; None where the chat template decides.

    Raises:
        FieldError: `reasoning` is not legal.
    """
    value = body.get("reasoning", {})
    if not isinstance(value, dict):
        raise FieldError(f"reasoning is {show(value)}; legal is an object", param="reasoning")
    fields = {name: entry for name, entry in value.items() if entry is not None}
    refuse_unknown(fields, ("effort", "summary"), "reasoning")
    if fields.get("summary") not in (None, "auto"):
        message = f"reasoning.summary is {show(fields['summary'])}; reasoning is told in full, legal is 'auto' or absent"
        raise FieldError(message, param="reasoning.summary")
    effort = fields.get("effort")
    if effort not in (None, *EFFORTS):
        raise FieldError(f"reasoning.effort is {show(effort)}; legal are {list(EFFORTS)}", param="reasoning.effort")
    return effort


def read_variables(value: Any, name: str) -> dict[str, Any]:
    """`chat_template_kwargs`: variables of the chat template."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise FieldError(f"{name} is {show(value)}; legal is an object", param=name)
    return value
