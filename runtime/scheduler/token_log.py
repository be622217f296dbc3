"""A sequence of tokens that grows at its end without being copied, though each state of it never changes.

A state is a length over a list that all states of a request share. The list only grows, so that older states stay what they were; a
state whose list has grown past it, which is none that anyone continues from, is copied when it is appended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload


class TokenLog(Sequence[int]):
    """Token ids; equal to a tuple or another log of the same ids."""

    __slots__ = ("_items", "_length")

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._items: list[int] = list(tokens)
        self._length = len(self._items)

    def extended(self, tokens: Sequence[int]) -> TokenLog:
        """The log with these tokens behind it."""
        log = TokenLog.__new__(TokenLog)
        log._items = self._items if len(self._items) == self._length else self._items[: self._length]
        log._items.extend(tokens)
        log._length = self._length + len(tokens)
        return log

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
