"""Tells tool calls from the answer around them. However the text is cut into pieces, the parts add up to the same.

A call is between two marks. Its name is told as soon as it is certain, and its arguments as they come. What is no call stays text; once
a call has been begun it stays one, whatever its arguments become. Models forget marks: several calls may be between two, and one that
begins like no text may have none. Nothing that was written is lost but marks: it is a call or it is text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from . import marks

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of tools, by their names."""


@dataclass(frozen=True)
class CallBegin:
    """A call of the tool of this name begins; `call_id` is what the model wrote as its id, None where it wrote none."""

    name: str
    call_id: str | None = None


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


class NoCall(ValueError):
    """What was written is no call, or not a whole one.

    Attributes:
        parts: of it that had not been told.
    """

    def __init__(self, parts: Sequence[CallPart]) -> None:
        super().__init__("no call, or not a whole one")
        self.parts = parts


class CallReader(Protocol):
    """What is between the marks of one call."""

    @property
    def rest(self) -> str:
        """What was written behind the call, once that is over."""

    @property
    def failed(self) -> bool:
        """Whether it is certain that this is no call."""

    @property
    def inside(self) -> bool:
        """Whether the end mark, if it came here, would be part of an argument."""

    def push(self, text: str) -> Sequence[CallPart]:
        """The parts that are certain with this text."""

    @property
    def closing(self) -> str:
        """What ends the arguments so far, where the call has been begun and its end is not as it should be."""

    def finish(self) -> Sequence[CallPart]:
        """The rest; raises ValueError where it is no call, or one that is not whole. From then on `rest` is certain."""


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments in tags: `open` makes the opening tag of a name and of whether it is a text."""

    open: Callable[[str, bool], str]
    close: str


@dataclass(frozen=True)
class CallIds:
    """Ids of calls that the templates of a format show or check.

    Attributes:
        legal: matches one.
        make: one of the name and number of a call in its conversation.
    """

    legal: re.Pattern[str]
    make: Callable[[str, int], str]


@dataclass(frozen=True)
class CallFormat:
    """How a kind of model writes calls: for parsers, and with all blanks, as its templates show them, for grammars.

    Attributes:
        begin, end: marks around a call; no end where the arguments end it.
        reader: makes a reader of what is between them.
        shown: texts that a chat template of the format has.
        head: what is before the arguments of a function.
        numbered: what is between its number in the conversation and the arguments, where it has one behind the head.
        tail: what is behind them.
        before, after: around all calls; without blanks they are marks, which have no text.
        brackets: around all calls behind one mark; None where each has its own.
        comma: what is between calls behind one mark, where models write a list of them.
        between: two calls.
        arguments: in tags; None for a JSON object.
        bare: what a call without marks begins with, and the name of a tool behind that; "" where none is one.
        name_end: what is behind that name. Without `bare`, the mark of a call outside of all calls is one only before such a name.
        others: what models write for `begin` too.
        ignored: marks that say nothing.
        ends_reasoning: whether reasoning ends where a call begins.
        ids: None where any are legal.
        aliases: names that others have for it.
    """

    begin: str
    end: str
    reader: Callable[[Tools], CallReader]
    shown: tuple[str, ...] = ()
    head: Callable[[str], str] = str
    numbered: str = ""
    tail: str = ""
    before: str = ""
    after: str = ""
    brackets: tuple[str, str] | None = None
    comma: str = ""
    between: str = ""
    arguments: TaggedArguments | None = None
    bare: str = ""
    name_end: str = ""
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    ends_reasoning: bool = False
    ids: CallIds | None = None
    aliases: tuple[str, ...] = ()

    @property
    def around(self) -> tuple[str, ...]:
        """The marks around all calls."""
        return tuple(mark for text in (self.before, self.after) if (mark := text.strip()))

    @property
    def begins(self) -> tuple[str, ...]:
        """What a call begins with."""
        return (self.begin, *self.others)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, of which those that are special tokens have to be in the text."""
        return tuple(filter(None, (self.begin, self.end, *self.around, *self.ignored, self.numbered)))

    @property
    def openings(self) -> tuple[str, ...]:
        """Marks that a call may begin with."""
        return tuple(filter(None, (self.begin, self.before.strip(), self.bare)))

    @property
    def first_mark(self) -> str:
        """The mark that text goes up to."""
        return (self.before or self.begin).rstrip("\n")

    @property
    def text(self) -> str:
        """All that the format writes by itself."""
        tags = self.arguments.open("", True) + self.arguments.close if self.arguments else ""
        return self.before + self.begin + self.head("") + self.numbered + tags + self.tail + self.end + self.after


class ToolCallParser:
    """One completion's calls and text."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._marks = (*form.begins, *form.around, *form.ignored, *filter(None, (form.bare,)))
        self._pending = ""
        self._after_mark = self._among_calls = False
        self._reader: CallReader | None = None
        self._mark, self._block = "", False
        self._read: list[str] = []
        self._begun = False
        self._ids: set[str] = set()

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
        form = self._form
        needs_name = mark == form.bare or (form.name_end and not form.bare and not self._among_calls and mark in form.begins)
        named = self._named(place + len(mark), final) if needs_name else True
        if named is False:
            place += len(mark)
            text, self._pending, self._after_mark = self._pending[:place], self._pending[place:], False
            return [text], True
        text = self._pending[:place].rstrip()
        if named is None:
            self._pending, self._after_mark = self._pending[len(text) :], self._after_mark and not text
            return [text] if text else [], False
        blanks, self._pending = self._pending[len(text) : place], self._pending[place + len(mark) :]
        self._after_mark = True
        if mark in form.begins:
            self._begin(blanks + mark if needs_name else mark, block=bool(form.end))
        elif mark == form.bare:
            self._pending = mark + self._pending
            self._begin(blanks, block=False)
        elif mark in form.around:
            self._among_calls = mark == form.before.strip()
        return [text] if text else [], True

    def _named(self, place: int, final: bool) -> bool | None:
        """Whether a tool is named at a place; None while that is not certain."""
        name, end, _ = self._pending[place:].partition(self._form.name_end)
        if not end and not final and "\n" not in name and any(tool.startswith(name.strip()) for tool in self._tools):
            return None
        return bool(end) and name.strip() in self._tools

    def _begin(self, mark: str, *, block: bool) -> None:
        """A call may begin here, behind its mark, or within a block that another has begun; without marks, behind blanks."""
        self._reader, self._mark, self._block, self._read, self._begun = self._form.reader(self._tools), mark, block, [], False

    def _call(self, reader: CallReader, final: bool) -> tuple[list[str | CallPart], bool]:
        """What is certain of the call, and whether there may be more behind it."""
        end = self._form.end
        place = self._pending.find(end) if end else -1
        cut = place if place >= 0 else len(self._pending) - (0 if final else marks.partial(self._pending, end))
        text, self._pending = self._pending[:cut], self._pending[cut:]
        parts = self._feed(reader, text)
        if reader.failed and not self._block:
            # Text that begins like a call.
            bare = self._form.bare
            self._pending = "".join(self._read)[len(bare) :] + self._pending
            self._reader, self._after_mark = None, False
            return [self._mark + bare], True
        if self._is_behind(reader.rest, final or place >= 0):
            return [*parts, *self._close(reader, whole=True, block=self._block)], True
        if place < 0:
            return [*parts, *(self._close(reader) if final else ())], bool(final and self._pending)
        self._pending = self._pending[len(end) :]
        if reader.inside:
            return [*parts, *self._feed(reader, end)], True
        return [*parts, *self._close(reader, end, whole=True)], True

    def _is_behind(self, rest: str, certain: bool) -> bool:
        """Whether something is written behind a call, before the end of its block; a mark that has begun may not be it."""
        rest = rest.lstrip()
        known = (self._form.begin, self._form.end, *self._form.around)
        return bool(rest) and (certain or not any(mark != rest and mark.startswith(rest) for mark in known))

    def _feed(self, reader: CallReader, text: str) -> list[str | CallPart]:
        parts = reader.push(text) if text else ()
        if not self._begun:
            self._read.append(text)
            self._begun = any(isinstance(part, CallBegin) for part in parts)
        return list(map(self._with_own_id, parts))

    def _with_own_id(self, part: CallPart) -> CallPart:
        """The part, without an id that another call has."""
        if not isinstance(part, CallBegin) or part.call_id is None:
            return part
        known = part.call_id in self._ids
        self._ids.add(part.call_id)
        return replace(part, call_id=None) if known else part

    def _close(self, reader: CallReader, mark: str = "", *, whole: bool = False, block: bool = False) -> list[str | CallPart]:
        """The end of the call, or its text where it is none.

        Args:
            mark: that ended it.
            whole: whether it has an end, whatever its arguments are.
            block: whether another call may follow before the end mark.
        """
        self._reader = None
        try:
            parts = list(reader.finish()) if whole or self._begun or not self._block else None
        except ValueError as error:
            untold = list(error.parts) if isinstance(error, NoCall) else []
            closing = [CallArguments(reader.closing)] if whole and reader.closing else []
            parts = [*untold, *closing, CallEnd(whole=False)] if self._begun else None
        if parts is None:
            self._after_mark = False
            text = "".join(self._read).strip() if self._block and not self._mark else f"{self._mark}{''.join(self._read)}{mark}"
            return [text] if text else []
        self._go_on(reader.rest.lstrip(), block)
        return [CallEnd() if whole and isinstance(part, CallEnd) else part for part in parts]

    def _go_on(self, rest: str, block: bool) -> None:
        """What is behind a call is another one where its block has not ended, or text."""
        form = self._form
        goes_on = block and rest and not rest.startswith((form.end, *form.around))
        if goes_on or (form.comma and rest.startswith(form.comma)):
            mark = form.begin if rest.startswith(form.begin) else ""
            rest = rest.removeprefix(mark)
            self._begin(mark, block=block)
        self._pending = rest.removeprefix(form.end) + self._pending
