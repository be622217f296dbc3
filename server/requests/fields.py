"""Errors of single fields, which name the field, its value and what is legal."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ...graphs.errors import RequestError

MAX_PARAM_CHARS = 128
MAX_SHOWN_CHARS = 200
MAX_SHOWN_KEYS = 100
LONG_NUMBER = 10**100


class FieldError(RequestError):
    """Raised when a message is well formed but one of its fields is not legal.

    Args:
        param: the illegal field.
        stream_id: the stream that the message names, where it could be read.
    """

    def __init__(self, message: str, *, param: str, code: str = "invalid_field", stream_id: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.stream_id = stream_id


def refuse_unknown(body: Mapping[str, Any], legal: Sequence[str], what: str) -> None:
    """Raises FieldError when `body` has a field that is not legal; `what` names the message."""
    for name in body:
        if name not in legal:
            meant = near(name, legal)
            message = f"{what} has no field {show(name)}; {meant}{' ' * bool(meant)}legal fields are {list(legal)}"
            raise FieldError(message, param=name[:MAX_PARAM_CHARS], code="unknown_field")


def near(name: str, legal: Sequence[str]) -> str:
    """The name that one is nearest to, as a question; "" where it is like none."""
    nearest = difflib.get_close_matches(name[:MAX_PARAM_CHARS], legal, 1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def show(value: Any) -> str:
    """A value as an error message shows it, shortened; of a large object only its size, because `reprlib` sorts its keys."""
    if isinstance(value, dict) and len(value) > MAX_SHOWN_KEYS:
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and abs(value) >= LONG_NUMBER:
        return "a number of hundreds of digits"
    shown = reprlib.repr(value)
    # reprlib shortens each level of nested lists, which is still long.
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:MAX_SHOWN_CHARS]}..."
