"""Responses that later requests may name: to continue their conversation, to read them again, or to resume their streams."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..requests.items import Item, pictures_of, size_bytes
from ..requests.pictures import PictureBytes
from .replay import KeptEvents

ENTRY_BYTES = 1024
"""What a response is counted for beside its texts."""


class Reader(Protocol):
    """Somebody who follows a response."""

    def read(self, events: Sequence[dict[str, Any]], done: bool) -> None:
        """Its next events; `done` with the last of them."""

    def failed(self, error: Exception) -> None:
        """The server failed to make its events, and it is over."""


class Followed(Protocol):
    """A response that has not ended, to one who follows it, perhaps from another door."""

    def leave(self, reader: Reader) -> tuple[str, ...]:
        """The reader gets no more; returns the ids of requests to be cancelled, now that nobody waits for them."""

    def cancel(self) -> None:
        """Ends it, whoever reads it."""


class RunningResponse(Followed, Protocol):
    """A response that has not ended, where it runs."""

    ended: asyncio.Event

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""

    def join(self, reader: Reader) -> None:
        """From now on the reader gets the events."""

    def unkept(self) -> None:
        """It is not kept any more: without a reader nobody can ever see it."""


@dataclass
class StoredResponse:
    """One response.

    Attributes:
        owner: who may name it: the digest of a key, "" for anybody who knows its id, or a token of one socket.
        items: the conversation up to its end; None while it runs, and where it cannot be continued.
        body: the response object at its end, as JSON; None while it runs, and where only its conversation is kept.
        replay: its events; None where it cannot be resumed.
        run: what drives it; None once it has ended.
        completions: of its prompt; of several none goes on.
    """

    response_id: str
    owner: str
    items: tuple[Item, ...] | None = None
    body: bytes | None = None
    replay: KeptEvents | None = None
    run: RunningResponse | None = None
    completions: int = 1

    @property
    def size_bytes(self) -> int:
        """About what it takes beside its pictures."""
        texts = 0 if self.items is None else size_bytes(self.items)
        return ENTRY_BYTES + texts + len(self.body or b"") + (self.replay.size_bytes if self.replay else 0)

    @property
    def pictures(self) -> frozenset[PictureBytes]:
        """The pictures of its conversation; equal ones are one (`pictures.reader`)."""
        return frozenset(part.file for part in pictures_of(self.items or ()) if part.file is not None)


class ResponseStore:
    """Bounded in bytes and in time: what was not named for the longest time goes first. Used on the event loop alone.

    Args:
        max_bytes: of all responses; 0 keeps none.
        max_age_s: since a response was named or has grown.
        clock: monotonic seconds.
    """

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._entries: OrderedDict[str, tuple[StoredResponse, int, float, frozenset[PictureBytes]]] = OrderedDict()
        # Each counts once, however many conversations have it.
        self._pictures: Counter[PictureBytes] = Counter()
        self.size_bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Keeps a response, or counts anew one that has changed; others may go for it, and it too if it is larger than all may be."""
        self.remove(entry.response_id)
        size = entry.size_bytes
        pictures = entry.pictures
        self._entries[entry.response_id] = (entry, size, self._clock(), pictures)
        self.size_bytes += size + sum(len(file.data) for file in pictures if not self._pictures[file])
        self._pictures.update(pictures)
        self._expire()
        while self.size_bytes > self._max_bytes:
            self._evict(next(iter(self._entries)))

    def find(self, response_id: str, owners: Collection[str]) -> StoredResponse | None:
        """A response that one of these owners may name."""
        self._expire()
        entry = self._entries[response_id][0] if response_id in self._entries else None
        if entry is None or entry.owner not in owners:
            return None
        self.put(entry)
        return entry

    def named(self, response_id: str, owners: Collection[str]) -> StoredResponse:
        """The same.

        Raises:
            RequestError: there is none, or none that they may name.
        """
        entry = self.find(response_id, owners)
        if entry is None:
            raise Refusal("response_not_found", param="response_id", response=show(response_id))
        return entry

    def conversation(self, response_id: str, owners: Collection[str]) -> tuple[Item, ...]:
        """The items of the conversation up to the end of a response.

        Raises:
            RequestError: it is not kept, has not ended, has failed, or has several outputs; the client sends the whole input then.
        """
        entry = self.find(response_id, owners)
        if entry is not None and entry.completions > 1:
            shown, count = show(response_id), entry.completions
            raise Refusal("unsupported_value.outputs", param="previous_response_id", response=shown, count=count)
        if entry is None or entry.items is None:
            why = "is not known here" if entry is None else "has not ended" if entry.run else "has failed"
            raise Refusal("previous_response_not_found", param="previous_response_id", response=show(response_id), why=why)
        return entry.items

    def remove(self, response_id: str) -> None:
        """Forgets a response; one that is not kept is left alone."""
        if response_id in self._entries:
            _, size, _, pictures = self._entries.pop(response_id)
            self._pictures.subtract(pictures)
            gone = [file for file in pictures if not self._pictures[file]]
            for file in gone:
                del self._pictures[file]
            self.size_bytes -= size + sum(len(file.data) for file in gone)

    def forget(self, owner: str) -> None:
        """Forgets all responses of an owner."""
        for response_id in [name for name, (entry, *_) in self._entries.items() if entry.owner == owner]:
            self.remove(response_id)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._entries and (first := next(iter(self._entries.values())))[2] < oldest_s:
            self._evict(first[0].response_id)

    def _evict(self, response_id: str) -> None:
        entry = self._entries[response_id][0]
        self.remove(response_id)
        if entry.run is not None:
            entry.run.unkept()
