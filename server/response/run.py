"""One response while it runs: driven by the engine's events, and read by whoever is connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.request import Event
from ..engine.service import Service
from ..requests.frames import JSON, encode_bytes
from ..requests.items import ChatMessage, Item
from ..storage.replay import KeptEvents
from ..storage.store import Reader, StoredResponse
from .events import ServerEvent
from .progress import PreparedResponse, Response

log = logging.getLogger(__name__)

NAME_EVERY_S = 1.0
"""How often a running response is put into the store again, so that it does not expire as unused."""


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
        self._core = Response(prepared, service.tokenizer)
        self._on_end = on_end
        self._readers: tuple[Reader, ...] = ()
        self._grace: asyncio.TimerHandle | None = None
        self._naming: asyncio.TimerHandle | None = None
        self._entry: StoredResponse | None = None
        self._over, self._replays = False, keeping.replays

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
            self._readers = (reader,)
        if self._keeping.owner is not None and (self._keeping.whole or self._keeping.replays):
            replay = KeptEvents(self._service.limits.max_replay_bytes) if self._keeping.replays else None
            self._entry = StoredResponse(self.response_id, self._keeping.owner, replay=replay, run=self, completions=self._completions)
            self._name()
        # The engine's events are delivered on this loop, so none can overtake these.
        self._deliver(None)

    def snapshot(self) -> dict[str, Any]:
        """The response object as it is now."""
        return self._core.snapshot()

    def join(self, reader: Reader) -> None:
        """From now on the reader gets the events."""
        self._readers += (reader,)
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def leave(self, reader: Reader) -> tuple[str, ...]:
        """The reader gets no more; returns the ids of requests to be cancelled, now that nobody waits for them."""
        self._readers = tuple(other for other in self._readers if other is not reader)
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
        """The store has dropped it: without a reader it is cancelled, as nobody can see it any more."""
        self._entry = None
        if not self._readers:
            self.cancel()

    def _abandoned(self) -> None:
        self._grace = None
        if not self._readers:
            self.cancel()

    def _deliver(self, event: Event | None) -> None:
        """Sends the server events of an engine event to the store and the readers; without one, those that open the response."""
        if self._over:
            return
        core = self._core
        try:
            events = core.begin() if event is None else core.feed(event)
            if self._prepared.stop and (stopped := core.take_stopped()):
                self._service.cancel(*stopped)
            done = core.done
            # A token may complete no character: there is nothing to keep or send then.
            if not (events or done):
                return
            if done or self._replays:
                self._record(events, done)
        except Exception as error:
            self._fail(error)
            return
        if done:
            self._close()
        for reader in self._readers:
            try:
                reader.read(events, done)
            except Exception as error:
                # It stops following the response; the others go on.
                log.exception("a reader of response %s failed", self.response_id)
                self._send_failure(reader, error)
                self._service.cancel(*self.leave(reader))

    def _send_failure(self, reader: Reader, error: Exception) -> None:
        try:
            reader.failed(error)
        except Exception:
            log.exception("a reader of response %s cannot be told that it failed", self.response_id)

    def _fail(self, error: Exception) -> None:
        """Ends the response with an error, for the store and all readers."""
        log.error("response %s failed", self.response_id, exc_info=error)
        self.cancel()
        self._close()
        self._record_failure(error)
        for reader in self._readers:
            self._send_failure(reader, error)

    def _close(self) -> None:
        self._over = True
        self.ended.set()
        if self._on_end is not None:
            self._on_end()
        for timer in (self._grace, self._naming):
            if timer is not None:
                timer.cancel()

    def _record(self, events: Sequence[ServerEvent], done: bool) -> None:
        """Has the store keep what it is to keep."""
        store, entry = self._service.store, self._kept_at_end() if done else self._entry
        if entry is None:
            return
        if entry.replay is not None:
            entry.replay.append(events)
        store.put(entry)
        if done and self._keeping.resumable and not self._keeping.whole:
            asyncio.get_running_loop().call_later(self._service.limits.resume_grace_s, store.remove, self.response_id)

    def _record_failure(self, error: Exception) -> None:
        """Keeps the failure for later requests; where even that cannot be kept, the response is forgotten."""
        store, entry = self._service.store, self._entry
        try:
            failed = self._core.fail(error)
            if entry is None:
                return
            entry.run, entry.items = None, None
            entry.body = encode_bytes(failed["response"], JSON) if self._keeping.whole else None
            if entry.replay is not None:
                # Events that were numbered may not have been kept.
                entry.replay.append([{**failed, "sequence_number": entry.replay.next}])
            store.put(entry)
        except Exception:
            log.exception("the failure of response %s cannot be kept", self.response_id)
            store.remove(self.response_id)

    def _name(self) -> None:
        """Puts it into the store, and again once a while until it has ended."""
        if self._entry is not None and not self._over:
            try:
                self._service.store.put(self._entry)
            except Exception as error:
                self._fail(error)
                return
            self._naming = asyncio.get_running_loop().call_later(NAME_EVERY_S, self._name)

    def _kept_at_end(self) -> StoredResponse | None:
        """What is left of it in the store at its end; None for nothing."""
        keeping, entry = self._keeping, self._entry
        evicted = entry is None and (keeping.whole or keeping.replays)
        if keeping.owner is None or evicted:
            return None
        body = self._core.snapshot()
        items = None if body["status"] == "failed" or self._completions > 1 else self._conversation()
        encoded = encode_bytes(body, JSON) if keeping.whole else None
        entry = entry or StoredResponse(self.response_id, keeping.owner, completions=self._completions)
        entry.items, entry.body, entry.run = items, encoded, None
        return entry

    @property
    def _completions(self) -> int:
        return len(self._prepared.requests)

    def _conversation(self) -> tuple[Item, ...]:
        before = self._prepared.items
        if before is None:
            # Token ids are what the user said, as a text is.
            prompts = [self._service.tokenizer.decode(request.prompt, skip_special=False) for request in self._prepared.requests]
            before = tuple(ChatMessage("user", prompt) for prompt in prompts)
        return (*before, *self._core.items())
