"""How a model converses: its chat template, and how what it writes is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter

from ...graphs.errors import RequestError, SpecError
from ..grammar.compiler import REPLY
from ..parsers import call_formats, reasoning
from ..parsers.message import MessageParser
from ..parsers.tool_calls import ToolCallParser
from ..requests.structured_output import OutputFormat
from ..requests.tool_fields import ToolUse
from .call_ids import with_ids
from .reply_grammar import INSIDE, MAYBE, Reply, check_choice
from .reply_grammar import NONE as NOT_AT_ALL
from .template import Chat, ChatTemplate, Message
from .tool_declarations import declared

AUTO, NONE = "auto", "none"

SYSTEM, DEVELOPER, USER, ASSISTANT = "system", "developer", "user", "assistant"
BETWEEN = "\n\n"
"""Two messages of the system that are one."""

_ANY_OBJECT = TypeAdapter(dict[str, Any])

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates are told whether to think: Qwen's and DeepSeek's."""

SPELLED = ("regex", "choice", "grammar")
"""Kinds of structured output that say every character."""


@dataclass(frozen=True)
class ChatFormat:
    """How a model converses.

    Attributes:
        template: None where the model has none.
        reasoning: name of the parser of reasoning (`parsers.reasoning.PARSERS`); None leaves it in the answer.
        tool_calls: name of the format of tool calls (`parsers.call_formats.FORMATS`); None leaves them in the answer.
    """

    template: ChatTemplate | None = None
    reasoning: str | None = None
    tool_calls: str | None = None

    @staticmethod
    def of(template: ChatTemplate | None, reasoning_parser: str = AUTO, tool_call_parser: str = AUTO) -> ChatFormat:
        """With parsers as a user names them: `auto` takes what the template shows, `none` none.

        Raises:
            SpecError: there is no parser of that name.
        """
        text = template.text if template else ""
        thinking, calls = reasoning.choose(text), call_formats.choose(text)
        if reasoning_parser != AUTO:
            thinking = _named(reasoning_parser, reasoning.PARSERS, reasoning.ALIASES)
        if tool_call_parser != AUTO:
            calls = _named(tool_call_parser, call_formats.FORMATS, call_formats.ALIASES)
        return ChatFormat(template, thinking, calls)

    def render(self, chat: Chat) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: there is no template, or it refuses the conversation.
        """
        if self.template is None:
            raise RequestError(
                f"the model has no chat template, which {len(chat.messages)} messages need; legal are a prompt at /v1/completions, or "
                "a server started with --chat-template FILE",
                param="messages",
                code="chat_template_missing",
            )
        messages = list(chat.messages)
        if "developer" not in self.template.text:
            # OpenAI's newer name of a role that most templates know by the older one.
            messages = [{**message, "role": SYSTEM} if message["role"] == DEVELOPER else message for message in messages]
        if self.tool_calls and (ids := call_formats.FORMATS[self.tool_calls].ids):
            messages = with_ids(messages, ids)
        chat = declared(replace(chat, messages=_placed(messages, self.template)), self.template, self.tool_calls)
        try:
            return self.template.render(chat)
        except RequestError as error:
            shown = [_with_objects(message) for message in chat.messages]
            if error.code != "chat_template_error" or shown == chat.messages:
                raise
            # It may show no arguments but objects, as those of a call that was cut are none.
            return self.template.render(replace(chat, messages=shown))

    def variables(self, given: Mapping[str, Any], effort: str | None, param: str) -> dict[str, Any]:
        """Variables of the template, with the effort of reasoning under the name that the template has for it.

        Args:
            param: the field of the effort, for errors.

        Raises:
            RequestError: the template has no such setting.
        """
        if effort is None:
            return dict(given)
        if self.template is None or "reasoning_effort" in self.template.text:
            return {"reasoning_effort": effort, **given}
        switch = next((name for name in SWITCHES if name in self.template.variables), None)
        if switch is not None:
            # All that it can do about an effort is to think or not.
            return {switch: effort != "none", **given}
        message = f"{param} is {effort!r}, and the model's chat template has no such setting; legal is absent"
        raise RequestError(message, param=param, code="unsupported_value")

    def reply(self, prompt: str, use: ToolUse, wanted: OutputFormat | None, *, so_far: str = "") -> OutputFormat | None:
        """What the reply to a prompt must be, reasoning and calls included; None leaves it free.

        Args:
            wanted: what its text must be.
            so_far: the message of the assistant that the prompt ends within; blank where it ends before one.

        Raises:
            RequestError: calls are wanted that nothing can make.
        """
        check_choice(use, self.tool_calls)
        if wanted is None and not use.constrains:
            return None
        begins = self._begins(prompt, so_far, wanted)
        calls = self.tool_calls if use.offered else None
        if wanted is not None and begins == NOT_AT_ALL and calls is None:
            return wanted
        return OutputFormat(REPLY, Reply(begins, use, calls, wanted), wanted.param if wanted else "tool_choice")

    def _begins(self, prompt: str, so_far: str, wanted: OutputFormat | None) -> str:
        """How a reply begins, as far as the message so far tells, or where that is blank the prompt's end."""
        if self.reasoning is None:
            return NOT_AT_ALL
        if so_far.strip():
            # A form that spells the mark is one of all that is left of the message.
            whole = wanted is not None and wanted.kind in SPELLED and reasoning.CLOSE in str(wanted.value)
            return INSIDE if reasoning.ReasoningParser(False, so_far).inside and not whole else NOT_AT_ALL
        if prompt.rstrip().endswith(reasoning.CLOSE):
            return NOT_AT_ALL
        return INSIDE if reasoning.begins_inside(self.reasoning, prompt) else MAYBE

    def marks(self, *, tools: bool) -> tuple[str, ...]:
        """Marks that parsers look for in the text, those of tool calls only where tools are offered."""
        thinking = (reasoning.OPEN, reasoning.CLOSE) if self.reasoning else ()
        if not tools or self.tool_calls is None:
            return thinking
        form = call_formats.FORMATS[self.tool_calls]
        return (*thinking, *form.marks)

    def parser(
        self, prompt: str, tools: Sequence[Mapping[str, Any]] = (), *, separate_reasoning: bool = True, so_far: str = ""
    ) -> MessageParser:
        """A parser of one completion of a prompt that offers tools, given as in a request; `so_far` as in `reply`."""
        separates = separate_reasoning and self.reasoning is not None
        form = call_formats.FORMATS[self.tool_calls] if tools and self.tool_calls is not None else None
        schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
        calls = partial(ToolCallParser, form, schemas) if form else None
        marks, ends = (form.openings, calls if form.ends_reasoning else None) if form else ((), None)
        thinking = reasoning.reasoning_parser(str(self.reasoning), prompt, so_far, marks, ends) if separates else None
        return MessageParser(thinking, calls() if calls else None)


def _placed(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """The messages with those of the system where the template has a place for them: those that come first are one, and later ones are
    the user's, where it would refuse them or leave them out."""
    leading = list(takewhile(lambda message: message["role"] in (SYSTEM, DEVELOPER), messages))
    others = [
        {**message, "role": USER}
        if message["role"] in (SYSTEM, DEVELOPER) and not template.takes(USER, ASSISTANT, message["role"])
        else message
        for message in messages[len(leading) :]
    ]
    if len(leading) < 2 or all(template.takes(leading[0]["role"], message["role"]) for message in leading[1:]):
        return [*leading, *others]
    contents = [message["content"] for message in leading]
    if all(isinstance(content, str) for content in contents):
        whole: Any = BETWEEN.join(contents)
    else:
        parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
        whole = [*parts[0], *(part for more in parts[1:] for part in ({"type": "text", "text": BETWEEN}, *more))]
    return [{**leading[0], "content": whole}, *others]


def _with_objects(message: Message) -> Message:
    """The message with an object for arguments that are none: what of them is whole, or else the text."""
    if not any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", ())):
        return message
    return {**message, "tool_calls": [{**call, "function": _with_object(call["function"])} for call in message["tool_calls"]]}


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": _ANY_OBJECT.validate_json(arguments, experimental_allow_partial="trailing-strings")}
    except ValueError:
        return {**function, "arguments": {"arguments": arguments}}


def _named(name: str, legal: Mapping[str, object], aliases: Mapping[str, str]) -> str | None:
    if name == NONE:
        return None
    name = aliases.get(name, name)
    if name not in legal:
        raise SpecError(f"there is no parser {name!r}; legal are {', '.join((AUTO, NONE, *legal, *aliases))}")
    return name
