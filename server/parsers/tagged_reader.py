"""Reads one tool call whose arguments are in tags, as it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import marks
from .json_reader import JsonScanner, read_json
from .schemas import Schemas, Values, type_of
from .tool_calls import CallArguments, CallBegin, CallEnd, CallPart, NoCall, Tools


@dataclass(frozen=True)
class Tags:
    """How arguments are written in tags.

    Attributes:
        header: matches up to the first argument, with the group `name`.
        argument: matches the opening tag of an argument, with the group `key`, and `string` where the tag says whether it is a text.
        argument_mark, argument_end: what that tag begins and ends with.
        close: closing tag of an argument.
        tail_mark: what is behind the last argument of a whole call; "" for nothing.
        header_mark: what the header begins with, where that is a mark.
        block: marks before and behind a call.
        trims: whether a line break at each end of a value belongs to the tags.
    """

    header: re.Pattern[str]
    argument: re.Pattern[str]
    argument_mark: str
    close: str
    block: tuple[str, str]
    tail_mark: str = ""
    header_mark: str = ""
    argument_end: str = ">"
    trims: bool = False

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Marks at which a value may end: its own, or another before which that was forgotten."""
        return tuple(filter(None, (self.close, self.argument_mark, self.tail_mark, self.block[1])))

    @cached_property
    def stop(self) -> re.Pattern[str]:
        """Matches one of them."""
        return re.compile("|".join(map(re.escape, self.stops)))

    def may_be_argument(self, text: str) -> bool:
        """Whether a text may be the beginning of an opening tag."""
        begun = text.startswith(self.argument_mark) and self.argument_end not in text and not (self.trims and "\n" in text)
        return begun or self.argument_mark.startswith(text)


class TaggedReader:
    """A call whose arguments are in tags, sent as the JSON object that they stand for.

    Texts are sent as they come, other values when they are whole. A value whose closing tag was forgotten ends before the next argument,
    and before the end of the call; a closing tag within a text, or within a string of JSON, is part of it unless another tag follows.
    """

    def __init__(self, tags: Tags, tools: Tools) -> None:
        self._tags, self._tools = tags, tools
        self._pending = ""
        self._name: str | None = None
        self._keys: set[str] = set()
        self._given: list[str] = []
        self._begun = self._over = self._final = False
        self._in_value = self._at_value = self._streams = False
        self._values = Values()
        self._searched = self._scanned = 0
        self._json = JsonScanner()
        self.failed = False

    @property
    def inside(self) -> bool:
        """See `CallReader`."""
        held = self._pending[self._searched :].rstrip()
        return self._in_value and not (held and held in (self._tags.close, self._tags.tail_mark))

    @property
    def rest(self) -> str:
        """See `CallReader`."""
        return self._pending if self._over else ""

    def push(self, text: str) -> list[CallPart]:
        """See `CallReader`."""
        self._pending += text
        written: list[str] = []
        while (step := self._value() if self._in_value else self._between()) is not None:
            written.append(step)
        begin: list[CallPart] = []
        if written and not self._begun:
            self._begun = True
            begin = [CallBegin(str(self._name))]
        arguments = "".join(written)
        return [*begin, CallArguments(arguments)] if arguments else begin

    @property
    def closing(self) -> str:
        """See `CallReader`."""
        return "" if self._in_value else "}"

    def finish(self) -> list[CallPart]:
        """See `CallReader`."""
        self._final = True
        parts = self.push("")
        if self._in_value and not self._streams and self._pending:
            # A value that was cut is told as it was written.
            parts.append(CallArguments(self._pending))
        if self._name is None or self._in_value or self.failed or not (self._over or not self._tags.tail_mark):
            raise NoCall(parts)
        if not self._begun:
            return [CallBegin(self._name), CallArguments("{}"), CallEnd()]
        return [*parts, CallArguments("}"), CallEnd()]

    def _between(self) -> str | None:
        """What the next tag stands for; None while there is none."""
        if self._over or self.failed or (self._name is None and not self._named()):
            return None
        text = self._pending.lstrip()
        argument = self._tags.argument.match(text)
        if argument is not None:
            self._pending = text[argument.end() :]
            return self._opened(argument)
        if self._tags.tail_mark and text.startswith(self._tags.tail_mark):
            self._over, self._pending = True, text[len(self._tags.tail_mark) :]
        elif text and (self._final or not (self._tags.may_be_argument(text) or self._tags.tail_mark.startswith(text))):
            # What is no tag is behind the call, or there is none.
            self._over, self.failed = bool(self._given), not self._given
        return None

    def _named(self) -> bool:
        header = self._tags.header.match(self._pending)
        if header is None and self._final:
            # The name of a tool alone is a call without arguments, where the first of them would end it.
            header = self._tags.header.match(self._pending + self._tags.argument_mark)
            header = header if header and header["name"] in self._tools else None
        if header is None or not header["name"].strip():
            return False
        self._name = header["name"].strip()
        self._pending = self._pending[header.end() :]
        self._keys = {key for shape in Schemas(self._tools.get(self._name)).shapes() for key in shape.properties}
        return True

    def _opened(self, argument: re.Match[str]) -> str:
        """What an opening tag stands for."""
        key = argument["key"].strip()
        self._in_value = self._at_value = True
        self._searched = self._scanned = 0
        self._json = JsonScanner()
        string = argument.groupdict().get("string")
        # A tag that says that it holds JSON may hold any.
        self._values = Schemas(self._tools.get(str(self._name))).argument(key) if string is None else Values()
        self._streams = self._values.is_text if string is None else string == "true"
        self._given.append(key)
        return f"{'{' if len(self._given) == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: {chr(34) if self._streams else ''}"

    def _value(self) -> str | None:
        """What can be said of the value with the text so far; None for nothing new."""
        if self._at_value and self._tags.trims:
            if not self._pending:
                return None
            self._pending = self._pending.removeprefix("\n")
        self._at_value = False
        end = self._end()
        if end is not None:
            value, self._pending = self._pending[: end[0]], self._pending[end[1] :]
            self._in_value = False
            value = value.removesuffix("\n") if self._tags.trims else value
            return _escaped(value) + '"' if self._streams else json.dumps(typed(value, self._values), ensure_ascii=False)
        if not self._streams:
            return None
        held = self._tags.trims and not self._final and self._pending[: self._searched].endswith("\n")
        certain = self._searched - held
        value, self._pending = self._pending[:certain], self._pending[certain:]
        self._searched -= certain
        return _escaped(value) or None

    def _end(self) -> tuple[int, int] | None:
        """Where the value ends, and where what follows it begins. Where that is not certain, `_searched` is up to where it goes on."""
        place = self._searched
        while (found := self._tags.stop.search(self._pending, place)) is not None:
            closes = found.group() == self._tags.close
            ends = self._closes(found) if closes else self._ends_before(found)
            if ends is not False:
                self._searched = found.start()
                return (found.start(), found.end() if closes else found.start()) if ends else None
            place = found.end()
        held = 0 if self._final else max(marks.partial(self._pending, mark) for mark in self._tags.stops)
        self._searched = max(place, len(self._pending) - held)
        return None

    def _closes(self, close: re.Match[str]) -> bool | None:
        """Whether a closing tag ends its value; None where what follows decides."""
        if not self._streams:
            self._json.take(self._pending[self._scanned : close.start()])
            self._scanned = close.start()
            if not self._json.in_string:
                return True
        follows = self._pending[close.end() :].lstrip()
        others = tuple(filter(None, (self._tags.tail_mark, *self._tags.block)))
        if follows.startswith(others) or self._tags.argument.match(follows) is not None or (self._final and not follows):
            return True
        more = self._tags.may_be_argument(follows) or any(other.startswith(follows) for other in others)
        return None if more and not self._final else False

    def _ends_before(self, mark: re.Match[str]) -> bool | None:
        """Whether a value ends before another mark than its own; None where what follows decides."""
        text = self._pending[mark.start() :]
        if mark.group() == self._tags.argument_mark:
            argument = self._tags.argument.match(text)
            if argument is None:
                return None if self._tags.may_be_argument(text) and not self._final else False
            key = argument["key"].strip()
            return key not in self._given and (not self._keys or key in self._keys)
        begin, end = self._tags.block
        legal = [begin, end, *filter(None, (self._tags.header_mark,))] if mark.group() == self._tags.tail_mark else [begin]
        follows = text[len(mark.group()) :].lstrip()
        if any(map(follows.startswith, legal)) or (self._final and not follows):
            return True
        return None if not self._final and any(other.startswith(follows) for other in legal) else False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(value: str, values: Values) -> Any:
    """The value of an argument in tags: what it is as JSON, or as Python shows values, where that is legal; else text."""
    if values.is_text:
        return value
    parsed = _parsed(value, values)
    fits = type_of(parsed) in values.types and (values.allows(parsed) or not values.allows(value))
    return parsed if fits else value


_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"""\\.|"(?:[^"\\]|\\.)*"|'(?P<text>(?:[^'\\]|\\.)*)'|\b(?P<word>True|False|None)\b""", re.DOTALL)
_ESCAPE = re.compile(r"""\\(?P<quote>')|\\x(?P<byte>[0-9a-fA-F]{2})|\\.|(?P<bare>")""", re.DOTALL)


def _parsed(value: str, values: Values) -> Any:
    word = value.strip().lower()
    if word in _WORDS and type_of(_WORDS[word]) in values.types:
        return _WORDS[word]
    try:
        return read_json(value)
    except ValueError:
        pass
    try:
        return read_json(_PYTHON.sub(_from_python, value)) if values.types & {"array", "object"} else value
    except ValueError:
        return value


def _from_python(found: re.Match[str]) -> str:
    """JSON for a text or word of Python."""
    if found["word"]:
        return _OF_PYTHON[found["word"]]
    return found.group() if found["text"] is None else f'"{_ESCAPE.sub(_escape_of_json, found["text"])}"'


def _escape_of_json(found: re.Match[str]) -> str:
    if found["quote"]:
        return "'"
    return f"\\u00{found['byte']}" if found["byte"] else '\\"' if found["bare"] else found.group()
