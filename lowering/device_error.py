"""Errors of a device's runtime by name: torch_npu, torchair and HCCL raise RuntimeError for everything, with a number in the text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..graphs.errors import LoweringError

OUT_OF_MEMORY = "out of memory"
_CODES = (r"error code(?: is|:)?\s*(\d{6})\b", r"(?<![\w.])([1235]\d{5})(?![\w.]\w)", r"\b(E[A-Z0-9]\d{4})\b")
"""ACL's number, anywhere or behind the words, and the codes of CANN's components, as in EZ9999."""
_NEXT = "Next: "


@dataclass(frozen=True)
class KnownError:
    """What some codes mean; read from `device_errors.json`.

    Attributes:
        codes: of the runtime, HCCL or GE; those in lower case are words of a text that has no code.
        meaning: for who has the device before him.
        next: the command to type.
        source: who says so.
        like: a text that devices give, with `{code}` where there are several.
    """

    codes: tuple[str, ...]
    meaning: str
    next: str
    source: str
    like: str


class DeviceError(LoweringError):
    """Raised when the runtime of a device fails; says what is known of it.

    Attributes:
        code: see `code_of`.
    """

    def __init__(self, what: str, text: str) -> None:
        self.code = code_of(text)
        super().__init__(with_way_out(f"{what} failed: {text}"))


@functools.cache
def known_errors() -> tuple[KnownError, ...]:
    """All of them."""
    rows = json.loads(Path(__file__).with_name("device_errors.json").read_text(encoding="utf-8"))
    return tuple(KnownError(**{**row, "codes": tuple(row["codes"])}) for row in rows)


def code_of(text: str) -> str:
    """The runtime's error code in the text of an error, as `507015` or `EZ9999`; "out of memory"; "" where it has none."""
    return next(_codes(text), "")


def known(text: str) -> tuple[str, KnownError] | None:
    """The first code in a text that means something, and what."""
    rows = {code: row for row in known_errors() for code in row.codes}
    return next(((code, rows[code]) for code in _codes(text) if code in rows), None)


def with_way_out(text: str) -> str:
    """The text of an error with what its code means, and the command to type next."""
    found = None if _NEXT in text else known(text)
    return text if found is None else f"{text} ({found[0]}: {found[1].meaning}. {_NEXT}{found[1].next})"


def _codes(text: str) -> Iterator[str]:
    """Words in place of codes first, and inner errors last, which say that another one happened."""
    yield from (code for row in known_errors() for code in row.codes if code.islower() and code in text.lower())
    numbers = [match[1] for code in _CODES for match in re.finditer(code, text)]
    yield from sorted(numbers, key=lambda number: number.endswith("9999"))


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raises what the runtime raises within as a `DeviceError`.

    Args:
        what: the call, as `a step on npu:0`.
    """
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(what, str(error)) from error
