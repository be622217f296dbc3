"""An assistant's message out of a model's text: reasoning, then the answer with its tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from ..requests.items import without_halves
from .reasoning import Content, Reasoned, Reasoning, ReasoningParser, Unclosed
from .tool_calls import CallArguments, CallBegin, CallPart, ToolCallParser

Part = Reasoning | Content | CallPart


class MessageParser:
    """One completion; without a parser for something, that is part of the answer."""

    def __init__(self, reasoning: ReasoningParser | None = None, tool_calls: ToolCallParser | None = None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with this text."""
        return list(self._with_calls(self._reasoning.push(text) if self._reasoning else [Content(text)]))

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as one can tell."""
        return self._reasoning is not None and self._reasoning.inside

    def finish(self) -> list[Part]:
        """The rest, at the end of the text."""
        parts = list(self._with_calls(self._reasoning.finish() if self._reasoning else []))
        return [*parts, *_parts(self._tool_calls.finish())] if self._tool_calls else parts

    def _with_calls(self, parts: Iterable[Reasoned]) -> Iterable[Part]:
        for part in parts:
            if self._tool_calls and isinstance(part, Content):
                yield from _parts(self._tool_calls.push(part.text))
            elif self._tool_calls and isinstance(part, Unclosed):
                found = _parts([*self._tool_calls.push(part.text), *self._tool_calls.finish()])
                yield from found if any(isinstance(each, CallBegin) for each in found) else [Reasoning(part.text)]
            elif part.text:
                yield Reasoning(part.text) if isinstance(part, Unclosed) else part


def _parts(found: Iterable[str | CallPart]) -> list[Part]:
    """The parts; names and arguments may come out of escapes, and no half of a surrogate pair can be sent."""
    return [Content(part) if isinstance(part, str) else _sendable(part) for part in found]


def _sendable(part: CallPart) -> CallPart:
    match part:
        case CallBegin(name, call_id):
            return CallBegin(without_halves(name), call_id and without_halves(call_id))
        case CallArguments(text):
            return CallArguments(without_halves(text))
        case _:
            return part
