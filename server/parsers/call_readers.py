"""Reads one tool call as it is written: arguments that are JSON, and arguments in tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import marks
from .tool_calls import CallArguments, CallBegin, CallEnd, CallPart, Tools

MAX_REFERENCES = 8
"""That are followed one after another."""

_SIGNS = re.compile(r'[\\"{}\[\]]')


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
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = _SIGNS.search(text, place)
            if found is None:
                break
            place = found.end()
            self._sign(found.group())
            if self.done:
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


class JsonReader:
    """A call whose arguments are a JSON object, sent as it is written.

    Args:
        header: matches up to the object, with the group `name`.
        name_of: the name that the group stands for; raises ValueError where it is none.
        whole: name and arguments of a call that the header does not match, such as one whose arguments come first; raises ValueError where
            it is no call.
    """

    def __init__(self, header: re.Pattern[str], name_of: Callable[[str], str], whole: Callable[[str], tuple[str, str]]) -> None:
        self._header, self._name_of, self._whole = header, name_of, whole
        self._text = ""
        self._scanner: JsonScanner | None = None

    @property
    def inside(self) -> bool:
        """See `CallReader`."""
        return _within_string(self._text) if self._scanner is None else self._scanner.in_string and not self._scanner.done

    def push(self, text: str) -> list[CallPart]:
        """See `CallReader`."""
        if self._scanner is not None:
            return self._arguments(text)
        self._text += text
        found = self._header.match(self._text)
        if found is None:
            return []
        try:
            name = self._name_of(found["name"])
        except ValueError:
            return []
        self._scanner = JsonScanner()
        return [CallBegin(name), *self._arguments(self._text[found.end() :])]

    def finish(self) -> list[CallPart]:
        """See `CallReader`."""
        if self._scanner is not None:
            return [CallEnd()]
        name, arguments = self._whole(self._text)
        return [CallBegin(name), CallArguments(arguments), CallEnd()]

    def _arguments(self, text: str) -> list[CallPart]:
        if self._scanner is None or self._scanner.done:
            return []
        taken = text[: self._scanner.take(text)]
        return [CallArguments(taken)] if taken else []


@dataclass(frozen=True)
class Tags:
    """How arguments are written in tags.

    Attributes:
        header: matches up to the first argument, with the group `name`.
        argument: matches the opening tag of an argument, with the group `key`, and `string` where the tag says whether it is a text.
        close: closing tag of an argument.
        tail: matches what is behind the last argument of a whole call.
        tail_mark: what the tail begins with; where it is written, and the end mark behind it, a closing tag before it was forgotten.
        trims: whether a line break at each end of a value belongs to the tags.
    """

    header: re.Pattern[str]
    argument: re.Pattern[str]
    close: str
    tail: re.Pattern[str]
    tail_mark: str = ""
    trims: bool = False


class TaggedReader:
    """A call whose arguments are in tags, sent as the JSON object that they stand for.

    Texts are sent as they come, other values when they are whole.
    """

    def __init__(self, tags: Tags, tools: Tools) -> None:
        self._tags, self._tools = tags, tools
        self._pending = ""
        self._name: str | None = None
        self._begun = False
        self._arguments = 0
        self._in_value = self._at_value = self._streams = False
        self._schema: Any = None

    @property
    def inside(self) -> bool:
        """See `CallReader`."""
        return self._in_value and not self._forgotten()

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

    def finish(self) -> list[CallPart]:
        """See `CallReader`."""
        parts: list[CallPart] = []
        if self._in_value and self._forgotten():
            self._pending = self._pending.replace(self._tags.tail_mark, self._tags.close + self._tags.tail_mark, 1)
            parts += self.push("")
        if self._name is None or self._in_value or not self._tags.tail.fullmatch(self._pending):
            raise ValueError("no call, or not a whole one")
        if not self._begun:
            return [CallBegin(self._name), CallArguments("{}"), CallEnd()]
        return [*parts, CallArguments("}"), CallEnd()]

    def _between(self) -> str | None:
        """What the next tag stands for; None while there is none."""
        if self._name is None:
            found = self._tags.header.match(self._pending)
            if found is None or not found["name"].strip():
                return None
            self._name = found["name"].strip()
            self._pending = self._pending[found.end() :]
        found = self._tags.argument.match(self._pending)
        if found is None:
            return None
        self._pending = self._pending[found.end() :]
        key = found["key"].strip()
        self._in_value = self._at_value = True
        string = found.groupdict().get("string")
        root = self._tools.get(self._name, {})
        self._schema = resolved(root.get("properties", {}).get(key), root)
        self._streams = is_text(self._schema) if string is None else string == "true"
        self._schema = self._schema if string is None else True
        self._arguments += 1
        return f"{'{' if self._arguments == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: {chr(34) if self._streams else ''}"

    def _value(self) -> str | None:
        """What can be said of the value with the text so far; None for nothing new."""
        if self._at_value and self._tags.trims:
            if not self._pending:
                return None
            self._pending = self._pending.removeprefix("\n")
        self._at_value = False
        place = self._pending.find(self._tags.close)
        if place >= 0:
            value, self._pending = self._pending[:place], self._pending[place + len(self._tags.close) :]
            self._in_value = False
            value = value.removesuffix("\n") if self._tags.trims else value
            return _escaped(value) + '"' if self._streams else self._typed(value)
        if not self._streams:
            return None
        end = len(self._pending) - self._held()
        value, self._pending = self._pending[:end], self._pending[end:]
        return _escaped(value) or None

    def _held(self) -> int:
        """How much at the end may not be part of the value."""
        text = self._pending
        if self._tags.tail_mark and (place := text.find(self._tags.tail_mark)) >= 0:
            held = len(text) - place
        else:
            held = max(marks.partial(text, self._tags.close), marks.partial(text, self._tags.tail_mark) if self._tags.tail_mark else 0)
        if self._tags.trims and text[: len(text) - held].endswith("\n"):
            held += 1
        return held

    def _forgotten(self) -> bool:
        """Whether a call seems to have ended without the closing tag of its last argument."""
        place = self._pending.find(self._tags.tail_mark) if self._tags.tail_mark else -1
        return place >= 0 and self._tags.tail.fullmatch(self._pending[place:]) is not None

    def _typed(self, value: str) -> str:
        if self._schema is True:
            try:
                json.loads(value)
            except (ValueError, RecursionError):
                return json.dumps(value, ensure_ascii=False)
            return value.strip()
        return json.dumps(typed(value, self._schema), ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _within_string(text: str) -> bool:
    """Whether JSON text ends within a string."""
    scanner = JsonScanner()
    scanner.take(text)
    return text.lstrip().startswith("{") and scanner.in_string


def typed(value: str, schema: Any) -> Any:
    """The value of an argument: text, unless its schema has a type other than string and the value is JSON of that type."""
    if is_text(schema):
        return value
    types = types_of(schema)
    try:
        parsed = json.loads(value.strip().lower() if types & {"boolean", "null"} and value.strip().lower() in _WORDS else value)
    except (ValueError, RecursionError):
        return value
    return parsed if types & _TYPES[type(parsed)] else value


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within `root` stands for; any other as it is."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema


def is_text(schema: Any) -> bool:
    """Whether a value of this schema is a text and nothing else."""
    types = types_of(schema)
    return not types or types == {"string"}


_WORDS = ("true", "false", "null")
_TYPES: Mapping[type, set[str]] = {
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
    str: {"string"},
}
"""Types of JSON schemas that a value of Python has."""


def types_of(schema: Any) -> set[str]:
    """Names of the types that a schema says its values have; none where it says none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else {kind for kind in kinds if isinstance(kind, str)} if isinstance(kinds, list) else set()
    for several in ("anyOf", "oneOf"):
        choices = schema.get(several)
        types |= {kind for choice in (choices if isinstance(choices, list) else ()) for kind in types_of(choice)}
    return types
