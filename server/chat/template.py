"""Chat templates: the Jinja text that turns messages into a prompt, rendered as transformers renders it.

A template comes from a checkpoint, so it runs in Jinja's immutable sandbox, and sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ...graphs.errors import ModelError, RequestError

OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "dict", "namespace"})
"""Names that a request may not set through `chat_template_kwargs`."""

CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the message ends that is to be continued; as in transformers, so that templates that trim act the same."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """What a chat template is rendered with.

    Attributes:
        messages: objects with role and content, and where they have them tool_calls, tool_call_id, reasoning_content.
        tools: objects of the request's `tools`; None where it has none.
        add_generation_prompt: end with what begins the assistant's turn.
        continue_final_message: end within the last message, so that the model continues it.
        variables: of the template, from `chat_template_kwargs`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template.

    Args:
        text: Jinja.
        special_tokens: variables of the template, such as bos_token.
        now: the time that `strftime_now` formats.

    Attributes:
        text: Jinja.
        variables: that it looks up.

    Raises:
        ModelError: the text is not a template.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens or {})
        self._takes: dict[tuple[str, ...], bool] = {}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not Jinja: line {error.lineno}: {error.message}") from None
        self.variables = frozenset(find_undeclared_variables(environment.parse(text)))

    def takes(self, *roles: str) -> bool:
        """Whether a conversation may begin with messages of these roles, all of which the prompt shows."""
        if roles not in self._takes:
            messages = [{"role": role, "content": f"message {place}."} for place, role in enumerate(roles)]
            try:
                text = self.render(Chat([*messages, {"role": "user", "content": "so"}]))
            except RequestError:
                text = ""
            self._takes[roles] = all(message["content"] in text for message in messages)
        return self._takes[roles]

    def render(self, chat: Chat) -> str:
        """The prompt of a conversation.

        Raises:
            RequestError: the template refuses the conversation, or cannot render it.
        """
        taken = sorted(name for name in chat.variables if name in OWN_NAMES or name.startswith("_"))
        if taken:
            message = f"chat_template_kwargs sets {taken[0][:64]!r}; legal are variables of the template other than {sorted(OWN_NAMES)}"
            raise RequestError(message, param="chat_template_kwargs")
        messages = [_with_reasoning(message) for message in chat.messages]
        if chat.continue_final_message:
            messages[-1] = _to_continue(messages[-1])
        values = {
            **self._special_tokens,
            **chat.variables,
            "messages": messages,
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._template.render(values)
        except RecursionError:
            raise _refused("it recurses too deep") from None
        except Exception as error:  # A template can raise anything that Python's operators raise on the client's values.
            raise _refused(str(error) or type(error).__name__) from None
        return _until_continued(text, str(chat.messages[-1]["content"])) if chat.continue_final_message else text


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Reasoning under each name that templates read it by, as transformers passes it."""
    reasoning = next((message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_continue(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), str):
        raise RequestError("continue_final_message is true, but the last message has no text to continue", param="continue_final_message")
    return {**message, "content": message["content"] + CONTINUE}


def _until_continued(text: str, content: str) -> str:
    where = text.rfind(CONTINUE.strip())
    if where < 0 or content.strip() not in text:
        message = "continue_final_message is true, but the chat template leaves parts of the last message out"
        raise RequestError(message, param="continue_final_message")
    # A template that trims messages has trimmed the tag, and would have trimmed what is before it.
    return text[:where] if text.startswith(CONTINUE, where) else text[:where].rstrip()


def _refused(why: str) -> RequestError:
    return RequestError(f"the chat template refuses these messages: {why[:500]}", param="messages", code="chat_template_error")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` without the attributes of a class, which lead out of the sandbox."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)


class _Namespace(Namespace):
    """`namespace` without names that Python uses itself."""

    def __init__(*values: Any, **named: Any) -> None:
        self, *rest = values
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training and renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()
