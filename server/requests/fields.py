"""Validation of single message fields, with errors that name field, value and legal values.

A reader takes a value and the field's name. Null fields have been dropped before: they count as absent.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ...graphs.errors import ProtocolError

MAX_PARAM_CHARS = 128
MAX_SHOWN_CHARS = 200
MAX_SHOWN_KEYS = 100
LONG_NUMBER = 10**100
MAX_ID_DIGITS = 10

T = TypeVar("T")


class FieldError(ProtocolError):
    """Raised when a message is well formed but one of its fields is not legal.

    Args:
        param: the illegal field.
        stream_id: the stream that the message names, where it could be read.
    """

    def __init__(self, message: str, *, param: str, code: str = "invalid_field", stream_id: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param
        self.stream_id = stream_id


def refuse_unknown(body: Mapping[str, Any], legal: Sequence[str], what: str) -> None:
    """Raises FieldError when `body` has a field that is not legal; `what` names the message."""
    for name in body:
        if name not in legal:
            message = f"{what} has no field {show(name)}; legal fields are {list(legal)}"
            raise FieldError(message, param=name[:MAX_PARAM_CHARS], code="unknown_field")


def optional(body: Mapping[str, Any], name: str, read: Callable[[Any, str], T]) -> T | None:
    """The field, validated by `read`, or None where it is absent."""
    return read(body[name], name) if name in body else None


def string(max_chars: int | None = None) -> Callable[[Any, str], str]:
    """A reader of strings of at least one character."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str) or not value:
            raise FieldError(f"{name} is {show(value)}; legal is a string that is not empty", param=name)
        if max_chars is not None and len(value) > max_chars:
            raise FieldError(f"{name} has {len(value)} characters; legal are at most {max_chars}", param=name)
        return value

    return read


def integer(low: int, high: int | None = None) -> Callable[[Any, str], int]:
    """A reader of integers from `low` to `high`; True and 2.0 are refused."""
    legal = f"of at least {low}" if high is None else f"from {low} to {high}"

    def read(value: Any, name: str) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise FieldError(f"{name} is {show(value)}; legal is an integer {legal}", param=name)
        return value

    return read


def boolean(value: Any, name: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise FieldError(f"{name} is {show(value)}; legal is true or false", param=name)
    return value


def choices(legal: Sequence[str]) -> Callable[[Any, str], frozenset[str]]:
    """A reader of lists of strings from `legal`, in any order."""

    def read(value: Any, name: str) -> frozenset[str]:
        if not isinstance(value, list):
            raise FieldError(f"{name} is {show(value)}; legal is a list of strings from {list(legal)}", param=name)
        for choice in value:
            if choice not in legal:
                raise FieldError(f"{name} holds {show(choice)}; legal are {list(legal)}", param=name)
        return frozenset(value)

    return read


def strings(most: int, max_chars: int, *, alone: bool = False) -> Callable[[Any, str], tuple[str, ...]]:
    """A reader of lists of at most `most` strings of 1 to `max_chars` characters; with `alone` of a single string too."""
    legal = f"{'a string, or ' if alone else ''}a list of at most {most}, of 1 to {max_chars} characters each"

    def read(value: Any, name: str) -> tuple[str, ...]:
        found = [value] if alone and isinstance(value, str) else value
        if not isinstance(found, list) or len(found) > most:
            raise FieldError(f"{name} is {show(value)}; legal is {legal}", param=name)
        for text in found:
            if not isinstance(text, str) or not 1 <= len(text) <= max_chars:
                raise FieldError(f"{name} holds {show(text)}; legal is {legal}", param=name)
        return tuple(found)

    return read


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """A list of at least one token id, in ascending order and each once."""
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise FieldError(f"{name} is {show(value)}; legal is a list of at least one token id", param=name)
    return tuple(sorted(set(value)))


def number(value: Any, name: str) -> float:
    """A number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(f"{name} is {show(value)}; legal is a number", param=name)
    return value


def logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    """An object of token ids, which JSON has as strings, and what is added to their logits; by token id."""
    if not isinstance(value, dict) or not all(isinstance(token, int) or (token.isascii() and token.isdecimal()) for token in value):
        raise FieldError(f"{name} is {show(value)}; legal is an object with token ids as names", param=name)
    # A number of thousands of digits would take long to read.
    long = next((token for token in value if len(str(token)) > MAX_ID_DIGITS), None)
    if long is not None:
        raise FieldError(f"{name} has the token id {show(long)}; legal are at most {MAX_ID_DIGITS} digits", param=name)
    return tuple(sorted((int(token), number(bias, name)) for token, bias in value.items()))


def show(value: Any) -> str:
    """A value as an error message shows it, shortened; of a large object only its size, because `reprlib` sorts its keys."""
    if isinstance(value, dict) and len(value) > MAX_SHOWN_KEYS:
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and abs(value) >= LONG_NUMBER:
        return "a number of hundreds of digits"
    shown = reprlib.repr(value)
    # reprlib shortens each level of nested lists, which is still long.
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
