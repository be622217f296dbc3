"""Reads one tool call whose arguments are a JSON object, as it is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from .tool_calls import CallArguments, CallBegin, CallEnd, CallPart

_SIGNS = re.compile(r'[\\"{}\[\]]')
_NOT_FINITE = re.compile(r"-?\b(?:NaN|Infinity)\b")
_WORD_AT_END = re.compile(r"-?[A-Za-z]{0,8}$")


class JsonScanner:
    """Finds the end of a JSON object in text that comes in pieces.

    Attributes:
        done: the object has ended.
        in_string: the text so far ends within a string.
    """

    def __init__(self) -> None:
        self.done = self.in_string = False
        self._escaped = False
        self._depth = 0

    def take(self, text: str) -> int:
        """How many characters of the text belong to the object."""
        place = 0
        while place < len(text) and not self.done:
            place = self.section(text, place)
        return place

    def section(self, text: str, start: int) -> int:
        """The end of what begins at `start`: of a string, of what is before one, of the object, or of the text."""
        place = start
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            sign = _SIGNS.search(text, place)
            if sign is None:
                break
            place = sign.end()
            was_in_string = self.in_string
            self._sign(sign.group())
            if self.done or self.in_string != was_in_string:
                return place
        return len(text)

    def _sign(self, sign: str) -> None:
        if self.in_string:
            self._escaped = sign == "\\"
            self.in_string = sign != '"'
        elif sign == '"':
            self.in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


Whole = Callable[[str], list[tuple[str, str]]]


class JsonReader:
    """A call whose arguments are a JSON object, sent as it is written; numbers that JSON does not have are sent as texts.

    Args:
        header: matches up to the object, with the group `name`.
        name_of: the name that the group stands for; raises ValueError where it is none.
        whole: names and arguments of calls that the header does not match, such as one whose arguments come first; raises ValueError where
            it is none.
        tails: what closes the call behind the object, as far as it is there.
        begun: what the mark of the call has of a JSON object that is the whole call; "" where it has none.
    """

    def __init__(self, header: re.Pattern[str], name_of: Callable[[str], str], whole: Whole, *tails: str, begun: str = "") -> None:
        self._header, self._name_of, self._whole, self._tails = header, name_of, whole, tails
        self._text, self._after = begun, ""
        self._scanner: JsonScanner | None = None
        self._call = JsonScanner() if begun else None
        self._word = ""
        self.failed = False
        if self._call:
            self._call.take(begun)

    closing = ""

    @property
    def rest(self) -> str:
        """See `CallReader`."""
        after = self._after.lstrip()
        for tail in self._tails:
            if tail.startswith(after):
                return ""
            after = after.removeprefix(tail).lstrip()
        return after

    @property
    def inside(self) -> bool:
        """See `CallReader`."""
        return _within_string(self._text) if self._scanner is None else self._scanner.in_string and not self._scanner.done

    def push(self, text: str) -> list[CallPart]:
        """See `CallReader`."""
        if self._scanner is not None:
            return self._arguments(text)
        end = self._call.take(text) if self._call else len(text)
        self._text, self._after = self._text + text[:end], self._after + text[end:]
        header = self._header.match(self._text)
        try:
            name = self._name_of(header["name"]) if header else None
        except ValueError:
            name = None
        if header is None or name is None:
            self.failed = self._call is not None and self._call.done and not self._is_call()
            return []
        self._scanner = JsonScanner()
        behind, self._after = self._text[header.end() :] + self._after, ""
        return [CallBegin(name, header.groupdict().get("id")), *self._arguments(behind)]

    def _is_call(self) -> bool:
        try:
            return bool(self._whole(self._text))
        except ValueError:
            return False

    def finish(self) -> list[CallPart]:
        """See `CallReader`."""
        if self._scanner is not None:
            rest: list[CallPart] = [CallArguments(self._finite())] if self._word else []
            return [*rest, CallEnd(self._scanner.done)]
        calls = self._whole(self._text)
        return [part for name, arguments in calls for part in (CallBegin(name), CallArguments(arguments), CallEnd())]

    def _arguments(self, text: str) -> list[CallPart]:
        scanner, written, place = self._scanner, "", 0
        while scanner is not None and not scanner.done and place < len(text):
            start, in_string = place, scanner.in_string
            place = scanner.section(text, start)
            if in_string:
                written += text[start:place]
                continue
            self._word += text[start:place]
            if scanner.in_string or scanner.done:
                written += self._finite()
            else:
                # Of a word at the end there may be more to come.
                written += self._finite(_WORD_AT_END.search(self._word))
        self._after += text[place:]
        return [CallArguments(written)] if written else []

    def _finite(self, held: re.Match[str] | None = None) -> str:
        """What waits outside of strings, up to a word that is held back."""
        end = len(self._word) if held is None else held.start()
        text, self._word = self._word[:end], self._word[end:]
        return _NOT_FINITE.sub(r'"\g<0>"', text)


def _within_string(text: str) -> bool:
    """Whether JSON text ends within a string."""
    scanner = JsonScanner()
    scanner.take(text)
    return text.lstrip().startswith("{") and scanner.in_string


def read_json(text: str) -> Any:
    """The value of a JSON text that any reader of JSON can read again: numbers that JSON does not have are texts.

    Raises:
        ValueError: it is no JSON, or too deep.
    """
    try:
        value = json.loads(text, parse_constant=str, parse_float=_float)
        json.dumps(value)
    except RecursionError:
        raise ValueError("too deep") from None
    return value


def _float(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text
