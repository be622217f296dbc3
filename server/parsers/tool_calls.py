"""Tells tool calls from the answer around them. However the text is cut into pieces, the parts add up to the same.

A call is between two marks, and is one part when it is whole. What is no legal call, or has no end, stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import marks

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by their names."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallFormat:
    """How a kind of model writes calls.

    Attributes:
        begin, end: marks around a call.
        around: marks around all calls, which have no text.
        parse: what is between the marks of a call; raises ValueError where it is no call.
    """

    begin: str
    end: str
    parse: Callable[[str, Tools], ToolCall]
    around: tuple[str, ...] = ()


class ToolCallParser:
    """One completion's calls and text."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._marks = (form.begin, *form.around)
        self._pending = ""
        self._after_mark = False
        self._in_call = False
        self._sought = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """The parts that are certain with this text."""
        self._pending += text
        return self._run(final=False)

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the text."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        more = True
        while more:
            part, more = self._call(final) if self._in_call else self._text(final)
            if part:
                parts.append(part)
        return parts

    def _text(self, final: bool) -> tuple[str, bool]:
        """The text up to the next mark, and whether there is one."""
        if self._after_mark:
            self._pending = self._pending.lstrip()
        found = marks.first(self._pending, self._marks)
        if found is None:
            end = len(self._pending) if final else marks.certain(self._pending, self._marks)
            text, self._pending = self._pending[:end], self._pending[end:]
            self._after_mark = self._after_mark and not text
            return text, False
        place, mark = found
        text, self._pending = self._pending[:place].rstrip(), self._pending[place + len(mark) :]
        self._after_mark, self._in_call, self._sought = True, mark == self._form.begin, 0
        return text, True

    def _call(self, final: bool) -> tuple[str | ToolCall, bool]:
        """The call, or its text where it is none, and whether there may be more behind it."""
        end = self._form.end
        while (place := self._pending.find(end, self._sought)) >= 0:
            body, rest = self._pending[:place], self._pending[place + len(end) :]
            self._sought = place + len(end)
            try:
                call = self._form.parse(body, self._tools)
            except ValueError:
                if _within_string(body):
                    continue
                self._leave(rest)
                self._after_mark = False
                return self._form.begin + body + end, True
            self._leave(rest)
            return call, True
        self._sought = max(self._sought, len(self._pending) - len(end) + 1)
        if not final:
            return "", False
        text = self._form.begin + self._pending
        self._leave("")
        return text, False

    def _leave(self, rest: str) -> None:
        self._pending, self._in_call = rest, False


def _within_string(text: str) -> bool:
    """Whether JSON text ends within a string, so that the mark behind it is part of an argument."""
    return text.lstrip().startswith("{") and (text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1)
