"""Finds marks in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def first(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The place of the earliest mark in a text, and the mark; of several that begin there, the longest. None where there is none."""
    places = [(text.find(mark), -len(mark), mark) for mark in marks]
    place, _, mark = min((entry for entry in places if entry[0] >= 0), default=(-1, 0, ""))
    return None if place < 0 else (place, mark)


def certain(text: str, marks: Sequence[str]) -> int:
    """How many characters of a text without marks come before whatever may be the beginning of one, and before blanks at the end.

    What comes next decides about both: blanks before a mark belong to it.
    """
    longest = max(map(len, marks))
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


def partial(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
