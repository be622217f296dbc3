"""One HTTP request's completions while they run: what the engine has made and the client has not got yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ...runtime.request import Event, Request, TokenEvent
from ..engine.service import Service

MAX_WAITING = 2**16
"""Tokens, each with those whose log probabilities are listed beside it, that may wait for a client that reads slowly; some 100 bytes
each."""


Out = TypeVar("Out")


class Core(Protocol[Out]):
    """Completions without I/O: `Generation`, or `Response`."""

    @property
    def done(self) -> bool: ...
    @property
    def live(self) -> tuple[str, ...]: ...
    def feed(self, event: Event) -> list[Out]: ...
    def take_stopped(self) -> tuple[str, ...]: ...


class TooSlow(Exception):
    """More waited for the client than may."""


class Inbox(Generic[Out]):
    """What has come for one HTTP request and was not taken yet; every method runs on the event loop.

    Args:
        service: whose events come.

    Attributes:
        ended: set when no more comes.
        overflow: set when too much waits; it gets no more then.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.ended = asyncio.Event()
        self.overflow = asyncio.Event()
        self._waiting: list[Out] = []
        self._size = 0
        self._filled = asyncio.Event()
        self._at_once: Callable[[list[Out]], None] | None = None
        self._error: Exception | None = None

    async def take(self, at_once: Callable[[list[Out]], None] | None = None) -> list[Out]:
        """What has come since the last call, at least something; nothing when all has been taken, or after `wake`.

        Args:
            at_once: is given what comes of a step while this waits, which it still does then: to wake a task for each stream and step
                takes longer than what the task does.

        Raises:
            TooSlow: too much had come.
            Exception: the server failed to make more.
        """
        if not self.ended.is_set():
            self._at_once = at_once
            try:
                await self._filled.wait()
            finally:
                self._at_once = None
        if self.overflow.is_set():
            raise TooSlow
        if self._error is not None and not self._waiting:
            raise self._error
        self._filled.clear()
        outputs, self._waiting, self._size = self._waiting, [], 0
        return outputs

    def wake(self) -> None:
        """Whoever waits in `take` waits no more."""
        self._filled.set()

    def failed(self, error: Exception) -> None:
        """No more comes; who takes what has come is told why."""
        self._error = error
        self.ended.set()
        self._filled.set()

    def _add(self, outputs: list[Out], size: int, most: int | None) -> bool:
        """Adds outputs that are counted for `size`, and drops all if more than `most` wait then; whether they were kept."""
        if not outputs:
            return True
        if self._at_once is None:
            self._filled.set()
        elif not self._waiting:
            # Behind the other events of the step: the end comes in the frame of the last text.
            self._service.soon(self._hand_over)
        self._waiting += outputs
        self._size += size
        if most is not None and self._size > most:
            self._waiting = []
            self.overflow.set()
            return False
        return True

    def _hand_over(self) -> None:
        if self._at_once is not None and self._waiting and not self._filled.is_set():
            outputs, self._waiting, self._size = self._waiting, [], 0
            self._at_once(outputs)


class Live(Inbox[Out]):
    """Completions from their submission to their ends.

    Args:
        requests: of the engine.
        core: what turns their events into outputs.
        on_end: called once, when all completions have ended.
        max_waiting: see MAX_WAITING; None sets no bound, where the client gets all at the end.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[Request],
        core: Core[Out],
        on_end: Callable[[], object],
        max_waiting: int | None = MAX_WAITING,
    ) -> None:
        super().__init__(service)
        self._requests = tuple(requests)
        self._core = core
        self._on_end = on_end
        self._max_waiting = max_waiting

    def start(self, client: str = "") -> None:
        """Submits the requests, which are this client's.

        Raises:
            RequestError: the engine refuses one; none runs then.
        """
        self._service.submit(self._requests, self._deliver, client)

    def cancel(self) -> None:
        """Ends what still runs."""
        self._service.cancel(*self._core.live)

    def _deliver(self, event: Event) -> None:
        if self.ended.is_set():
            return
        try:
            outputs = self._core.feed(event)
            self._service.cancel(*self._core.take_stopped())
        except Exception as error:
            self.cancel()
            self._on_end()
            self.failed(error)
            return
        if self._core.done:
            self._on_end()
        if self.overflow.is_set():
            return
        if not self._add(outputs, _size(event), self._max_waiting):
            self.cancel()
            return
        if self._core.done:
            self.ended.set()
            self.wake()


def _size(event: Event) -> int:
    if not isinstance(event, TokenEvent):
        return 0
    return sum(1 + len(entry.top) for entry in event.logprobs) or len(event.token_ids)
