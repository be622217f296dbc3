"""The fields that are about tools and reasoning, as OpenAI's chats and its Responses have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from .bodies import Body

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
NONE, AUTO, REQUIRED = "none", "auto", "required"
Choice = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


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

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], choice: object, named: str | None, parallel: bool) -> ToolUse:
        """From the fields of a request; `named` is the function that `choice` names, where it is no text."""
        word = choice if isinstance(choice, str) else AUTO if named is None else REQUIRED
        return cls(tuple(tools), word, named, parallel)

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


class FunctionName(Body):
    """The name of a function."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Function(FunctionName):
    """What a tool is."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function


class FunctionTool(Function):
    """A tool of a response."""

    type: Literal["function"]

    def for_chats(self) -> dict[str, Any]:
        """In the form of chats, which templates know."""
        return {"type": "function", "function": {name: value for name, value in self if name != "type" and value is not None}}


class NamedChoice(Body):
    """A `tool_choice` of a chat that names a function."""

    type: Literal["function"]
    function: FunctionName


class NamedFunction(FunctionName):
    """A `tool_choice` of a response that names a function."""

    type: Literal["function"]


class Reasoning(Body):
    """`reasoning`: all of it is told.

    Attributes:
        effort: a variable of the chat template; None leaves it to that.
    """

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
