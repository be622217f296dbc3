"""A sequence of tokens that grows at its end without being copied, though each state of it never changes.

A state is a length over a list that all states of a request share. The list only grows, so that older states stay what they were; a
state whose list has grown past it, which is none that anyone continues from, is copied when it is appended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from ..request import DecodedRow


class TokenLog(Sequence[int]):
    """Token ids, and the rows of decode steps that sampled them; equal to a tuple or another log of the same ids."""

    __slots__ = ("_items", "_length", "_rows", "_steps")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._items: list[int] = list(tokens)
        self._rows: list[DecodedRow] = []
        self._length, self._steps = len(self._items), 0

    def extended(self, tokens: Sequence[int], row: DecodedRow | None = None) -> TokenLog:
        """The log with these tokens behind it, and the row that sampled them where that is one of a decode step."""
        log, items, rows = TokenLog.__new__(TokenLog), self._items, self._rows
        if len(items) != self._length or len(rows) != self._steps:
            items, rows = items[: self._length], rows[: self._steps]
        items += tokens
        if row is not None:
            rows.append(row)
        log._items, log._rows, log._length, log._steps = items, rows, len(items), len(rows)
        return log

    @property
    def rows(self) -> Sequence[DecodedRow]:
        """Rows of decode steps so far."""
        return self._rows[: self._steps]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return tuple(self._items[start:stop:step] if step > 0 else self._items[: self._length][place])
        return self._items[range(self._length)[place]]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return self[:] == other[:] if isinstance(other, TokenLog | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self[:])

    def __repr__(self) -> str:
        return repr(self[:])
