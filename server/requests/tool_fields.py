"""The fields that are about tools and reasoning, as OpenAI's chats and its Responses have them.

The prompt has functions alone. A custom tool is a function of one text there, and a function of a namespace has both names in its own; who
declared them gets calls as declared. What no prompt can have, such as a tool of the provider, is left out (`left_out`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from .bodies import HINT, Body, Ignored
from .left_out import LeftOut

NONE, AUTO, REQUIRED = "none", "auto", "required"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
INPUT = "input"
"""The one argument of a custom tool's function."""

Function = Mapping[str, Any]
"""A tool in the form of chats, which templates know."""


@dataclass(frozen=True)
class Declared:
    """What a client calls a function of the prompt.

    Attributes:
        custom: whether it is a custom tool, whose calls have one text.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class Offer:
    """A tool as a prompt has it, and as the client declared it."""

    function: Function
    declared: Declared

    @property
    def name(self) -> str:
        """In the prompt."""
        return str(self.function["function"]["name"])


@dataclass(frozen=True)
class ToolChoice:
    """A `tool_choice` that names tools.

    Attributes:
        named: the one that has to be called.
        allowed: those that may be called; None for all.
        mode: where they are listed: whether one of them has to be called.
        left_out: those that are listed and not in the prompt.
    """

    named: str | None = None
    allowed: tuple[str, ...] | None = None
    mode: str | None = None
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class ToolUse:
    """Tools of a request, and what is to become of them.

    Attributes:
        tools: as `tools` of OpenAI's chats has them.
        choice: "none", "auto" or "required".
        named: the function that has to be called, where choice is "required"; None for any.
        parallel: whether a reply may have several calls.
        allowed: names of the tools that may be called; None for all.
        declared: what the client calls functions that are none to it, by their names in the prompt.
    """

    tools: tuple[Function, ...] = ()
    choice: str = AUTO
    named: str | None = None
    parallel: bool = True
    allowed: tuple[str, ...] | None = None
    declared: Mapping[str, Declared] = field(default_factory=dict)

    @classmethod
    def of(cls, offers: Sequence[Offer], choice: ToolChoice | str | None, parallel: bool) -> ToolUse:
        """From the fields of a request; of several tools of a name the last one counts."""
        by_name = {offer.name: offer for offer in offers}
        declared = {name: offer.declared for name, offer in by_name.items() if offer.declared != Declared(name)}
        tools = tuple(offer.function for offer in by_name.values())
        if isinstance(choice, ToolChoice):
            return cls(tools, choice.mode or REQUIRED, choice.named, parallel, choice.allowed, declared)
        return cls(tools, choice or AUTO, None, parallel, None, declared)

    @property
    def offered(self) -> tuple[Function, ...]:
        """The tools that the prompt has: what is not to be called is not in it."""
        if self.choice == NONE or self.allowed is None:
            return () if self.choice == NONE else self.tools
        names = set(self.allowed)
        return tuple(tool for tool in self.tools if tool["function"]["name"] in names)

    @property
    def constrains(self) -> bool:
        """Whether calls have to be of a form that the model might not write by itself."""
        forms = self.choice == REQUIRED or not self.parallel or any(tool["function"].get("strict") for tool in self.offered)
        return bool(self.offered) and forms

    @property
    def callable(self) -> tuple[Function, ...]:
        """The tools that may be called."""
        return tuple(tool["function"] for tool in self.offered if self.named in (None, tool["function"]["name"]))


class ReasoningField(Body):
    """`reasoning`: all of it is told.

    Attributes:
        effort: a variable of the chat template; None leaves it to that.
        summary: how it would be summed up; it is told in full instead.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Any, Ignored(HINT)] = None
