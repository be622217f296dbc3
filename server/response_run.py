"""One response while it runs: driven by the engine's events, and read by whoever is connected."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..runtime.request import Event
from .events import ServerEvent
from .frames import JSON, encode_bytes
from .items import Item
from .replay import Replay
from .response_store import StoredResponse

if TYPE_CHECKING:
    from .response import PreparedResponse
    from .service import Service

log = logging.getLogger(__name__)

NAME_EVERY_S = 1.0
"""How often the store hears of a response that runs and of which nothing grows there."""


class Reader(Protocol):
    """Somebody who follows a response."""

    def read(self, events: Sequence[ServerEvent], done: bool) -> None:
        """Its next events; `done` with the last of them."""

    def failed(self, error: Exception) -> None:
        """The server failed to make its events, and it is over."""


@dataclass(frozen=True)
class Keeping:
    """What outlives a response or its connection.

    Attributes:
        owner: see `StoredResponse`; None keeps nothing.
        whole: whether the response object is kept, or the conversation alone.
        resumable: whether its events are kept, and it goes on for a while when nobody reads it.
        background: whether it goes on to its end when nobody reads it.
    """

    owner: str | None = None
    whole: bool = False
    resumable: bool = False
    background: bool = False

    @property
    def replays(self) -> bool:
        """Whether events are kept."""
        return self.resumable or self.background


class ResponseRun:
    """Every method runs on the event loop.

    Args:
        prepared: the response.
        keeping: what is kept of it.
        on_end: called once, when it has ended.

    Attributes:
        ended: set when the response has.
    """

    def __init__(self, service: Service, prepared: PreparedResponse, keeping: Keeping, on_end: Callable[[], object] | None = None) -> None:
        self.response_id = prepared.info.response_id
        self.ended = asyncio.Event()
        self._service = service
        self._prepared = prepared
        self._keeping = keeping
        self._core = service.response(prepared)
        self._on_end = on_end
        self._readers: list[Reader] = []
        self._grace: asyncio.TimerHandle | None = None
        self._entry: StoredResponse | None = None
        self._named_s = -math.inf

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the engine's requests that have not ended."""
        return self._core.live

    def start(self, reader: Reader | None, client: str = "") -> None:
        """Submits its requests, which are this client's; then the reader gets its first events.

        Raises:
            RequestError: the engine refuses them; nothing runs then.
        """
        self._service.submit(self._prepared.requests, self._deliver, client)
        if reader is not None:
            self._readers.append(reader)
        if self._keeping.owner is not None and (self._keeping.whole or self._keeping.replays):
            replay = Replay(self._service.limits.max_replay_bytes) if self._keeping.replays else None
            self._entry = StoredResponse(self.response_id, self._keeping.owner, replay=replay, run=self)
        # The engine's events are delivered on this loop, so none can overtake these.
        events = self._core.begin()
        if self._core.done:
            self._close()
        self._emit(events)

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        return self._core.snapshot()

    def join(self, reader: Reader) -> None:
        """From now on the reader gets the events."""
        self._readers.append(reader)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self, reader: Reader) -> tuple[str, ...]:
        """The reader gets no more; returns the ids of requests to be cancelled, now that nobody waits for them."""
        if reader in self._readers:
            self._readers.remove(reader)
        if self._readers or self.ended.is_set() or (self._keeping.background and self._entry is not None):
            return ()
        if self._keeping.resumable and self._entry is not None:
            grace_s = self._service.limits.resume_grace_s
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._abandoned)
            return ()
        if not self._keeping.whole:
            # Its conversation was its socket's, which has gone: what it ends with later would be kept for nobody.
            self._keeping = Keeping()
        return self.live

    def cancel(self) -> None:
        """Ends it, whoever reads it."""
        self._service.cancel(*self.live)

    def unkept(self) -> None:
        """It is not kept any more: without a reader nobody can ever see it."""
        self._entry = None
        if not self._readers:
            self.cancel()

    def _abandoned(self) -> None:
        self._grace = None
        if not self._readers:
            self.cancel()

    def _deliver(self, event: Event) -> None:
        if self.ended.is_set():
            return
        try:
            events = self._core.feed(event)
            if stopped := self._core.take_stopped():
                self._service.cancel(*stopped)
        except Exception as error:
            log.exception("response %s failed", self.response_id)
            self.cancel()
            self._close()
            self._service.store.remove(self.response_id)
            for reader in list(self._readers):
                reader.failed(error)
            return
        done = self._core.done
        if done:
            self._close()
        self._emit(events)

    def _close(self) -> None:
        self.ended.set()
        if self._on_end is not None:
            self._on_end()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _emit(self, events: Sequence[ServerEvent]) -> None:
        done = self.ended.is_set()
        if not events and not done:
            # A token that completes no character: a reader takes nothing for the end.
            return
        if self._entry is not None and self._entry.replay is not None:
            self._entry.replay.append(events)
        if done:
            self._keep()
        elif self._entry is not None and self._is_due(self._entry):
            self._service.store.put(self._entry)
        for reader in list(self._readers):
            reader.read(events, done)

    def _is_due(self, entry: StoredResponse) -> bool:
        """Whether the store counts it anew: events that are kept have grown, or it would be taken for one that nobody uses. Each time
        costs as much as encoding an event."""
        now_s = time.monotonic()
        if entry.replay is None and now_s - self._named_s < NAME_EVERY_S:
            return False
        self._named_s = now_s
        return True

    def _keep(self) -> None:
        """What is left of it in the store at its end."""
        keeping, store, entry = self._keeping, self._service.store, self._entry
        if keeping.owner is None:
            return
        evicted = entry is None and (keeping.whole or keeping.replays)
        if evicted:
            return
        entry = entry or StoredResponse(self.response_id, keeping.owner)
        entry.run = None
        body = self._core.snapshot()
        entry.items = None if body["status"] == "failed" else self._conversation()
        entry.body = encode_bytes(body, JSON) if keeping.whole else None
        store.put(entry)
        if keeping.resumable and not keeping.whole:
            asyncio.get_running_loop().call_later(self._service.limits.resume_grace_s, store.remove, self.response_id)

    def _conversation(self) -> tuple[Item, ...]:
        return (*self._prepared.items, *self._core.items())
