"""How a model converses: its chat template, and how what it writes is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...graphs.errors import RequestError, SpecError
from ..grammar.compiler import REPLY
from ..parsers import call_formats, reasoning
from ..parsers.message import MessageParser
from ..parsers.tool_calls import ToolCallParser
from ..requests.fields import show
from ..requests.structured_output import OutputFormat
from ..requests.tool_fields import ToolUse
from .reply_grammar import INSIDE, MAYBE, Reply, check_choice
from .reply_grammar import NONE as NOT_AT_ALL
from .template import Chat, ChatTemplate

AUTO, NONE = "auto", "none"

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
        if "developer" not in self.template.text:
            # OpenAI's newer name of a role that most templates know by the older one.
            messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in chat.messages]
            chat = replace(chat, messages=messages)
        try:
            return self.template.render(chat)
        except RequestError as error:
            raise _about_cut_calls(chat, error) from None

    def variables(self, given: Mapping[str, Any], effort: str | None, param: str) -> dict[str, Any]:
        """Variables of the template, with the effort of reasoning under the name that the template has for it.

        Args:
            param: the field of the effort, for errors.

        Raises:
            RequestError: the template has no such setting.
        """
        if effort is None:
            return dict(given)
        text = self.template.text if self.template else ""
        if self.template is None or "reasoning_effort" in text:
            return {"reasoning_effort": effort, **given}
        if effort == "none" and "enable_thinking" in text:
            return {"enable_thinking": False, **given}
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
        return (*thinking, form.begin, form.end, *form.around)

    def parser(
        self, prompt: str, tools: Sequence[Mapping[str, Any]] = (), *, separate_reasoning: bool = True, so_far: str = ""
    ) -> MessageParser:
        """A parser of one completion of a prompt that offers tools, given as in a request; `so_far` as in `reply`."""
        separates = separate_reasoning and self.reasoning is not None
        thinking = reasoning.reasoning_parser(str(self.reasoning), prompt, so_far) if separates else None
        if not tools or self.tool_calls is None:
            return MessageParser(thinking)
        schemas = {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}
        return MessageParser(thinking, ToolCallParser(call_formats.FORMATS[self.tool_calls], schemas))


def _about_cut_calls(chat: Chat, error: RequestError) -> RequestError:
    """The error of a template, which where a call has no object of arguments is that it can show no text in its place."""
    cut = [
        (f"messages[{i}].tool_calls[{j}]", call["function"]["arguments"])
        for i, message in enumerate(chat.messages)
        for j, call in enumerate(message.get("tool_calls", ()))
        if isinstance(call["function"]["arguments"], str)
    ]
    if error.code != "chat_template_error" or not cut:
        return error
    where, arguments = cut[0]
    why = f"{where} of the conversation has the arguments {show(arguments)}, which are no JSON, as those of a call that was cut"
    message = f"{why}, and the chat template shows none but objects; legal is the whole conversation without that call ({error})"
    return RequestError(message, param=error.param, code=error.code)


def _named(name: str, legal: Mapping[str, object], aliases: Mapping[str, str]) -> str | None:
    if name == NONE:
        return None
    name = aliases.get(name, name)
    if name not in legal:
        raise SpecError(f"there is no parser {name!r}; legal are {', '.join((AUTO, NONE, *legal, *aliases))}")
    return name
