"""A sequence of records that are made when somebody looks at one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Equal to a tuple, or to another lazy sequence, of the same records. Subclasses are immutable, so that the records are made once."""

    __slots__ = ("_made",)

    _made: tuple[T, ...]

    @abstractmethod
    def _make(self) -> tuple[T, ...]:
        """All records."""

    @property
    def made(self) -> tuple[T, ...]:
        """All records."""
        try:
            return self._made
        except AttributeError:
            # Two threads may both make them, which gives equal ones.
            self._made = self._make()
            return self._made

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        return self.made[place]

    def __iter__(self) -> Iterator[T]:
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        return self.made == tuple(other) if isinstance(other, LazySequence | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.made)

    def __repr__(self) -> str:
        return repr(self.made)
