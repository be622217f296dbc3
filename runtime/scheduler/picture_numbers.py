"""Numbers that stand for pictures in the keys of prefixes, where the tokens in the places of all pictures are the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

from ..picture_spans import PictureInput
from .picture_ledger import Key, key_of

MOST_PICTURES = 1 << 16
"""Pictures whose numbers are remembered. One that comes again after so many others gets a new one, and finds no prefixes of before."""


class PictureNumbers:
    """Gives each picture a number that is no token's, and that no other picture gets while the process lives.

    A picture has the same number of rows wherever it is, so one number for all of them says where it begins and ends. They are of 31 bits:
    ten new pictures a second last six years.

    Args:
        vocab_size: V; numbers are V and above.
    """

    def __init__(self, vocab_size: int) -> None:
        self._next = count(vocab_size)
        self._known: OrderedDict[Key, int] = OrderedDict()

    def of(self, pictures: Iterable[PictureInput]) -> tuple[int, ...]:
        """The numbers of these pictures, in order."""
        return tuple(self._number(key_of(picture)) for picture in pictures)

    def _number(self, key: Key) -> int:
        if (number := self._known.get(key)) is None:
            number = self._known[key] = next(self._next)
            if len(self._known) > MOST_PICTURES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return number


def with_numbers(tokens: tuple[int, ...], start: int, pictures: Sequence[PictureInput], numbers: Sequence[int]) -> tuple[int, ...]:
    """Tokens of a prompt from `start` on, with the numbers of pictures in the places of their rows."""
    end = start + len(tokens)
    within = [(p.span, number) for p, number in zip(pictures, numbers, strict=True) if p.span.first < end and p.span.end > start]
    if not within:
        return tokens
    changed = list(tokens)
    for span, number in within:
        first, last = max(span.first, start) - start, min(span.end, end) - start
        changed[first:last] = [number] * (last - first)
    return tuple(changed)
