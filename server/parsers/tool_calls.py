"""Tells tool calls from the answer around them. However the text is cut into pieces, the parts add up to the same.

A call is between two marks. Its name is told as soon as it is certain, and its arguments as they come. What is no call stays text; once
a call has been begun it stays one, whatever its arguments become.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import marks

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by their names."""


@dataclass(frozen=True)
class CallBegin:
    """A call of the tool of this name begins."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the text of the arguments, a JSON object where the model kept to the format."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call that was begun last has ended.

    Attributes:
        whole: false where the text ended within it.
    """

    whole: bool = True


CallPart = CallBegin | CallArguments | CallEnd


def new_call_id() -> str:
    """An identifier that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


class CallReader(Protocol):
    """What is between the marks of one call."""

    @property
    def inside(self) -> bool:
        """Whether the end mark, if it came here, would be part of an argument."""

    def push(self, text: str) -> Sequence[CallPart]:
        """The parts that are certain with this text."""

    @property
    def closing(self) -> str:
        """What ends the arguments so far, where the call has been begun and its end is not as it should be."""

    def finish(self) -> Sequence[CallPart]:
        """The rest; raises ValueError where it is no call, or one that is not whole."""


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments in tags: `open` makes the opening tag of a name and of whether it is a text."""

    open: Callable[[str, bool], str]
    close: str


@dataclass(frozen=True)
class CallFormat:
    """How a kind of model writes calls: for parsers, and with all blanks, as its templates show them, for grammars.

    Attributes:
        begin, end: marks around a call.
        reader: makes a reader of what is between them.
        head: what is before the arguments of a function.
        tail: what is behind them.
        before, after: around all calls; without blanks they are marks, which have no text.
        between: two calls.
        arguments: in tags; None for a JSON object.
        aliases: names that others have for it.
    """

    begin: str
    end: str
    reader: Callable[[Tools], CallReader]
    head: Callable[[str], str] = str
    tail: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    arguments: TaggedArguments | None = None
    aliases: tuple[str, ...] = ()

    @property
    def around(self) -> tuple[str, ...]:
        """The marks around all calls."""
        return tuple(mark for text in (self.before, self.after) if (mark := text.strip()))

    @property
    def first_mark(self) -> str:
        """The mark that text goes up to."""
        return (self.before or self.begin).rstrip("\n")

    @property
    def text(self) -> str:
        """All that the format writes by itself."""
        tags = self.arguments.open("", True) + self.arguments.close if self.arguments else ""
        return self.before + self.begin + self.head("") + tags + self.tail + self.end + self.after


class ToolCallParser:
    """One completion's calls and text."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._marks = (form.begin, *form.around)
        self._pending = ""
        self._after_mark = False
        self._reader: CallReader | None = None
        self._read: list[str] = []
        self._begun = False

    def push(self, text: str) -> list[str | CallPart]:
        """The parts that are certain with this text."""
        self._pending += text
        return self._run(final=False)

    def finish(self) -> list[str | CallPart]:
        """The rest, at the end of the text."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[str | CallPart]:
        parts: list[str | CallPart] = []
        more = True
        while more:
            new, more = self._text(final) if self._reader is None else self._call(self._reader, final)
            parts += new
        return parts

    def _text(self, final: bool) -> tuple[list[str | CallPart], bool]:
        """The text up to the next mark, and whether there is one."""
        if self._after_mark:
            self._pending = self._pending.lstrip()
        first = marks.first(self._pending, self._marks)
        if first is None:
            end = len(self._pending) if final else marks.certain(self._pending, self._marks)
            text, self._pending = self._pending[:end], self._pending[end:]
            self._after_mark = self._after_mark and not text
            return [text] if text else [], False
        place, mark = first
        text, self._pending = self._pending[:place].rstrip(), self._pending[place + len(mark) :]
        self._after_mark = True
        if mark == self._form.begin:
            self._reader, self._read, self._begun = self._form.reader(self._tools), [], False
        return [text] if text else [], True

    def _call(self, reader: CallReader, final: bool) -> tuple[list[str | CallPart], bool]:
        """What is certain of the call, and whether there may be more behind it."""
        end = self._form.end
        place = self._pending.find(end)
        if place < 0:
            undecided = 0 if final else marks.partial(self._pending, end)
            text, self._pending = self._pending[: len(self._pending) - undecided], self._pending[len(self._pending) - undecided :]
            parts = self._feed(reader, text)
            return [*parts, *(self._close(reader, "") if final else ())], False
        text, self._pending = self._pending[:place], self._pending[place + len(end) :]
        parts = self._feed(reader, text)
        if reader.inside:
            return [*parts, *self._feed(reader, end)], True
        return [*parts, *self._close(reader, end)], True

    def _feed(self, reader: CallReader, text: str) -> list[str | CallPart]:
        parts = reader.push(text) if text else ()
        if not self._begun:
            self._read.append(text)
            self._begun = any(isinstance(part, CallBegin) for part in parts)
        return list(parts)

    def _close(self, reader: CallReader, mark: str) -> list[str | CallPart]:
        """The end of the call, or its text where it is none; `mark` ended it."""
        self._reader = None
        try:
            parts = reader.finish() if mark or self._begun else None
        except ValueError:
            closing = [CallArguments(reader.closing)] if self._begun and mark and reader.closing else []
            parts = [*closing, CallEnd(whole=False)] if self._begun else None
        if parts is not None:
            # A call whose end mark is there is one, whatever its arguments are.
            return [CallEnd() if mark and isinstance(part, CallEnd) else part for part in parts]
        self._after_mark = False
        return [self._form.begin + "".join(self._read) + mark]
