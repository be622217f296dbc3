"""Who has which rows of a dp group's pool of pictures: rows by picture, shared by the requests that still need them.

A request that is admitted gets rows for every picture of which it has tokens to compute, so that nobody waits for rows between its chunks
and holds others meanwhile. An encode step fills them, once for all who need them; a request gives a picture up with the launch of the
chunk that reads the last of its rows, and with its end. Rows that nobody needs stay for later requests, and the least recently used ones
go first where others lack some.

Steps run in the order of their launches, so rows count as filled once the step that fills them is launched, and may be another picture's
once the last step that reads them is. Until the result of an encode step is known its rows stay, and with them the names of all who have
read them: where it is no number they all fail.

The order of calls decides everything: no clock, no random number, no address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..picture_spans import PictureInput, Places, Span, position_offset, positions
from ..request import Request
from .pools import OwnershipError

Key = tuple[bytes, int, int]
"""A picture: its digest, and rows and columns of tokens."""


def key_of(picture: PictureInput) -> Key:
    """What is equal for pictures whose rows are equal."""
    return picture.digest, picture.span.rows, picture.span.columns


def to_read(pictures: Iterable[PictureInput], start: int) -> list[PictureInput]:
    """Those of a request's pictures that tokens from `start` on have rows of, the first of each key."""
    first: dict[Key, PictureInput] = {}
    for picture in pictures:
        if picture.span.end > start:
            first.setdefault(key_of(picture), picture)
    return list(first.values())


class Entry:
    """A picture that has rows.

    Attributes:
        rows: of the pool, in the order of its tokens.
        users: requests that have tokens of it to compute.
        readers: requests that have none left, but have read rows of which nobody knows yet whether they are finite.
        launched: the encode step that fills them was.
        known: it has ended, and they are finite.
        forgotten: they are not, so that nobody finds them.
    """

    __slots__ = ("forgotten", "known", "launched", "readers", "rows", "users")

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        self.users: dict[str, None] = {}
        self.readers: dict[str, None] = {}
        self.launched = self.known = self.forgotten = False


class Failure(NamedTuple):
    """A picture that could not be encoded, and the requests that read it or were going to."""

    key: Key
    owners: tuple[str, ...]


class PictureLedger:
    """Rows of one dp group's pool. `KVCacheManager` alone changes it; the scheduler reads it between changes.

    Args:
        num_rows: of the pool, the null row included.
        drafts: whether the graphs draft: a chunk then reads the row in the place of the token behind it, too.

    Attributes:
        queries: rows that admitted requests needed.
        hits: those of them that were there, or on their way.
        evictions: pictures whose rows went to others.
        encoded: pictures that were encoded.
    """

    def __init__(self, num_rows: int, *, drafts: bool) -> None:
        self.num_rows, self.drafts = num_rows, drafts
        self.queries = self.hits = self.evictions = self.encoded = 0
        self._free = list(range(num_rows - 1, 0, -1))
        self._entries: dict[Key, Entry] = {}
        # What nobody needs and is known, least recently used first.
        self._unused: OrderedDict[Key, int] = OrderedDict()
        self._num_unused = 0
        # Of each request what it has not given up, and the positions of its prompt's tokens.
        self._owned: dict[str, dict[Key, Entry]] = {}
        self._positions: dict[str, npt.NDArray[np.int32]] = {}

    # What the scheduler reads.

    @property
    def num_pinned(self) -> int:
        """Rows that requests need, or whose encode step has not ended."""
        return self.num_rows - 1 - self.num_available

    @property
    def num_available(self) -> int:
        """Rows that are free, or would be if pictures that nobody needs were forgotten."""
        return len(self._free) + self._num_unused

    @property
    def num_cached(self) -> int:
        """Rows of pictures that nobody needs."""
        return self._num_unused

    def has_rows(self, picture: PictureInput) -> bool:
        """Whether a step that is launched now can read a picture's rows."""
        entry = self._entries.get(key_of(picture))
        return entry is not None and entry.launched

    def is_pinned(self, key: Key) -> bool:
        """Whether a picture has rows that stay."""
        return key in self._entries and key not in self._unused

    def known_rows(self, request: Request, start: int) -> int:
        """How many tokens of a prompt from `start` on stand for rows that are there, or on their way."""
        known = (picture.span for picture in request.pictures if key_of(picture) in self._entries)
        return sum(max(0, span.end - max(span.first, start)) for span in known)

    def lacking(self, request: Request, start: int, count: int) -> list[PictureInput]:
        """The pictures that a chunk of so many tokens from `start` on reads and that have no rows yet, in order, one of each key."""
        end = start + count + self.drafts
        pictures = to_read(request.pictures, start)
        return [picture for picture in pictures if picture.span.first < end and not self.has_rows(picture)]

    # Changes.

    def enter(self, admitted: Sequence[tuple[Request, int]]) -> None:
        """Gives requests that are admitted, each with the tokens that are computed already, the rows that they need.

        Raises:
            OwnershipError: there are fewer; `PictureRoom` says so before.
        """
        # What is there stays, before anything goes to make room.
        for request, start in admitted:
            for picture in to_read(request.pictures, start):
                self.queries += _count(picture.span)
                if entry := self._entries.get(key_of(picture)):
                    self.hits += _count(picture.span)
                    self._use(request.id, key_of(picture), entry)
        for request, start in admitted:
            if request.pictures:
                self._positions[request.id] = positions(len(request.prompt), [picture.span for picture in request.pictures])
            for picture in to_read(request.pictures, start):
                key = key_of(picture)
                if key in self._owned.get(request.id, ()):
                    continue
                if key in self._entries:
                    # Another one that is admitted with it has the same.
                    self.hits += _count(picture.span)
                else:
                    self._entries[key] = Entry(self._allocate(_count(picture.span), request.id))
                self._use(request.id, key, self._entries[key])

    def launched(self, pictures: Iterable[PictureInput]) -> list[tuple[int, ...]]:
        """The rows that a step which is about to be launched fills with these pictures."""
        entries = [self._entries[key_of(picture)] for picture in pictures]
        for entry in entries:
            entry.launched = True
        return [entry.rows for entry in entries]

    def finished(self, pictures: Iterable[PictureInput], finite: Iterable[bool]) -> list[Failure]:
        """The oldest encode step in flight has ended. Returns the pictures whose rows are no numbers, which are forgotten."""
        failures = []
        for picture, good in zip(pictures, finite, strict=True):
            key = key_of(picture)
            entry = self._entries[key]
            owners = (*entry.users, *entry.readers)
            entry.known, entry.forgotten = good, not good
            self.encoded += good
            for owner in entry.readers:
                del self._owned[owner][key]
            entry.readers.clear()
            if not good:
                del self._entries[key]
                failures.append(Failure(key, owners))
            self._settle(key, entry)
        return failures

    def places(self, request: Request, start: int, count: int) -> Places | None:
        """Where a chunk stands of a request that was admitted; None of one without pictures.

        A chunk gives up the pictures of which it reads the last rows.

        Raises:
            OwnershipError: a picture has no rows that can be read.
        """
        if not request.pictures:
            return None
        end, known = start + count, self._positions[request.id]
        # Behind the prompt, where a request that lost its pages computes its output again, all is text.
        behind = np.arange(max(start, len(known)), end, dtype=np.int32) + position_offset(picture.span for picture in request.pictures)
        own = np.concatenate([known[start:end], np.repeat(behind[:, None].astype(np.int32), 3, 1)])
        rows = [0] * (count + 1)
        for picture in request.pictures:
            first, last = max(picture.span.first, start), min(picture.span.end, end + self.drafts)
            if first >= last:
                continue
            entry = self._owned.get(request.id, {}).get(key_of(picture))
            if entry is None or not entry.launched:
                raise OwnershipError(f"{request.id!r} reads the picture at {picture.span.first} from {first} to {last}, which has no rows")
            rows[first - start : last - start] = entry.rows[first - picture.span.first : last - picture.span.first]
        self._read(request, end)
        return Places(own, rows)

    def leave(self, owner: str) -> None:
        """A request ends or loses its pages; one that never entered changes nothing."""
        self._positions.pop(owner, None)
        for key, entry in self._owned.pop(owner, {}).items():
            entry.users.pop(owner, None)
            entry.readers.pop(owner, None)
            self._settle(key, entry)

    def flush(self) -> None:
        """Forgets the pictures that nobody needs."""
        while self._unused:
            self._evict()

    def check(self, running: Collection[str]) -> None:
        """Counts every row once more.

        Raises:
            OwnershipError: a row is lost or is of two pictures, or a picture of somebody who is not running.
        """
        owned = {id(entry): entry for entries in self._owned.values() for entry in entries.values()}
        entries = [*owned.values(), *(entry for entry in self._entries.values() if id(entry) not in owned)]
        rows = sorted([*self._free, *(row for entry in entries for row in entry.rows)])
        if rows != list(range(1, self.num_rows)):
            raise OwnershipError(f"rows of pictures that are free or owned are {rows}; legal is each from 1 to {self.num_rows - 1} once")
        unused = {key: len(entry.rows) for key, entry in self._entries.items() if entry.known and not entry.users}
        if unused != dict(self._unused) or self._num_unused != sum(unused.values()):
            raise OwnershipError(f"{self._num_unused} rows of {len(self._unused)} pictures are unused; by pictures it is {unused}")
        users = {name for entry in entries for name in (*entry.users, *entry.readers)}
        lost = [key for key, entry in self._entries.items() if not (entry.users or entry.launched)]
        if lost or not users <= set(running) or not self._positions.keys() <= set(running):
            raise OwnershipError(f"rows are of {sorted(users)}, and {len(lost)} pictures of nobody; running are {sorted(running)}")

    def _use(self, owner: str, key: Key, entry: Entry) -> None:
        if key in self._unused:
            self._num_unused -= self._unused.pop(key)
        entry.users[owner] = None
        self._owned.setdefault(owner, {})[key] = entry

    def _read(self, request: Request, end: int) -> None:
        """Gives up what a request reads no more once so many of its tokens are computed."""
        owned = self._owned.get(request.id, {})
        needed = {key_of(picture) for picture in to_read(request.pictures, end)}
        for key, entry in list(owned.items()):
            if key not in needed and request.id in entry.users:
                del entry.users[request.id]
                if entry.known:
                    del owned[key]
                else:
                    entry.readers[request.id] = None
                self._settle(key, entry)

    def _settle(self, key: Key, entry: Entry) -> None:
        """What becomes of rows that nobody needs."""
        if entry.users or (entry.launched and not (entry.known or entry.forgotten)):
            return
        if entry.known:
            if key not in self._unused:
                self._unused[key] = len(entry.rows)
                self._num_unused += len(entry.rows)
            return
        # Nothing is in them, or no numbers.
        self._free.extend(reversed(entry.rows))
        entry.rows = ()
        if not entry.forgotten:
            del self._entries[key]

    def _allocate(self, count: int, owner: str) -> tuple[int, ...]:
        if count > self.num_available:
            raise OwnershipError(f"{owner!r} asks for {count} rows of a picture; legal is 0 to the {self.num_available} that can be had")
        while len(self._free) < count:
            self._evict()
            self.evictions += 1
        return tuple(self._free.pop() for _ in range(count))

    def _evict(self) -> None:
        key, count = self._unused.popitem(last=False)
        self._num_unused -= count
        self._free.extend(reversed(self._entries.pop(key).rows))


class PictureRoom:
    """Rows that a step can give to requests that it admits.

    Args:
        ledger: None where no pictures are taken.
    """

    def __init__(self, ledger: PictureLedger | None) -> None:
        self._ledger, self._new = ledger, set[Key]()
        self._left = ledger.num_available if ledger is not None else 0

    def takes(self, request: Request, start: int) -> bool:
        """Whether one more request gets its rows, of which so many tokens are computed, beside those before it; takes them if so."""
        if self._ledger is None or not request.pictures:
            return True
        pictures = {key_of(picture): _count(picture.span) for picture in to_read(request.pictures, start)}
        new = {key: count for key, count in pictures.items() if key not in self._new and not self._ledger.is_pinned(key)}
        if sum(new.values()) > self._left:
            return False
        self._left -= sum(new.values())
        self._new |= new.keys()
        return True


def _count(span: Span) -> int:
    return span.rows * span.columns
