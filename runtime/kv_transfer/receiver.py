"""The decode side of a connection: asks a prefill server for prompts, and gives their pages to the scheduler."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...graphs.errors import RequestError
from ..delivery import BatchSink, Sink
from ..engine import Engine
from ..request import RECEIVE, Event, FinishEvent, ParkedEvent, Request
from . import room as rooms
from .messages import Abort, Ask, Computed, Declined, Done, Failed, Gone, Message, Ready
from .room import DEFAULTS, Do, Kind, Room, Stage, Timeouts

OK = 200
"""The status of a request of which nothing is to be computed."""


class _Handover(NamedTuple):
    """A room of a request, when it was asked for first, and where it is parked; submitted means that the engine has the request."""

    room: Room
    request: Request
    sink: Sink
    failed: Callable[[str], None]
    asked_s: float
    target: ParkedEvent | None = None
    submitted: bool = False


class Receiver(BatchSink):
    """Rooms of one connection. All methods are called by one thread; what the engine tells from its own is passed on by `call`.

    Args:
        engine: runs what has landed.
        send: takes messages to the prefill server, in order, until it is disconnected.
        call: has the thread of this object call a function.
        clock: monotonic seconds.
        number: draws the number of a room.
        landed: told of each request that lands, with the seconds since it was asked for.
        lost: told of a request that had landed, has lost its pages to others, and has some again: its arguments are those of `ask_again`.

    Attributes:
        connected: whether the prefill server can be asked.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Message], None],
        call: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        number: Callable[[], int],
        timeouts: Timeouts = DEFAULTS,
        lost: Callable[[Request, Sink, Callable[[str], None], ParkedEvent], None] | None = None,
        landed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._engine, self._send, self._call, self._clock, self._number = engine, send, call, clock, number
        self._timeouts, self._handovers = timeouts, dict[int, _Handover]()
        self._rooms: dict[str, int] = {}
        self._lost, self._tell_landed = lost or self.ask_again, landed
        # Those that the engine has: they may lose their pages, and are asked for again.
        self._landed: dict[str, _Handover] = {}
        self.connected = True

    @property
    def rooms(self) -> int:
        """Rooms that have neither landed nor ended."""
        return len(self._handovers)

    @property
    def withheld(self) -> int:
        """See the class."""
        return sum(handover.room.stage is Stage.WITHHELD for handover in self._handovers.values())

    @property
    def busy(self) -> bool:
        """Whether rooms have not ended, or requests run that may lose their pages."""
        return bool(self._handovers or self._landed)

    def asks(self, request_id: str) -> bool:
        """Whether a request has an open room."""
        return request_id in self._rooms

    @property
    def next_deadline_s(self) -> float:
        """When `tick` is due; infinity where nothing waits."""
        return min((handover.room.deadline_s for handover in self._handovers.values()), default=math.inf)

    def ask(self, request: Request, sink: Sink, failed: Callable[[str], None], routed: int = 0) -> None:
        """Asks for a prompt; one of a single token begins at once, as nothing is to be computed before it.

        Args:
            sink: gets the request's events once it has landed, from the engine's thread. Its times count from now on.
            failed: called instead where it is not handed over, with the reason; the request may then be computed elsewhere.
            routed: see `messages.Ask`.
        """
        handover = _Handover(rooms.begin_decode(self._clock(), self._timeouts), request, sink, failed, self._clock())
        if len(request.prompt) - request.num_scored == 1:
            self._landed[request.id] = handover
            try:
                self._engine.submit(replace(request, handover=RECEIVE), self)
            except RequestError as error:
                del self._landed[request.id]
                failed(str(error))
            if routed:
                self.decline(routed, OK, "")
            return
        # Tokens that are scored are computed by decode steps, one after the other.
        self._ask(handover, request.prompt[: len(request.prompt) - request.num_scored], routed)

    def ask_again(self, request: Request, sink: Sink, failed: Callable[[str], None], parked: ParkedEvent) -> None:
        """Asks for all tokens of a request that had landed, has lost its pages, and is parked again."""
        room = rooms.begin_decode(self._clock(), self._timeouts)
        self._ask(_Handover(room, request, sink, failed, self._clock(), parked, submitted=True), parked.token_ids)

    def deliver(self, events: Sequence[Event]) -> None:
        """Passes events of the engine on; called by its thread. Of a request that was given up the client has been told by `failed`."""
        by_sink: dict[int, tuple[Sink, list[Event]]] = {}
        for event in events:
            handover = self._landed.get(event.request_id)
            if handover is not None:
                by_sink.setdefault(id(handover.sink), (handover.sink, []))[1].append(event)
                if isinstance(event, FinishEvent):
                    self._landed.pop(event.request_id, None)
            elif isinstance(event, FinishEvent) and event.reason != "cancelled":
                # It waited for pages too long.
                self._call(functools.partial(self._cancelled, event.request_id))
        for sink, own in by_sink.values():
            if isinstance(sink, BatchSink):
                sink.deliver(own)
            else:
                for event in own:
                    sink(event)

    def cancel(self, request_id: str) -> bool:
        """The client of a request has left; returns whether a room of it was open. One that has landed is the engine's alone."""
        number = self._rooms.get(request_id)
        if number is not None:
            self._step(number, Kind.CANCELLED)
        return number is not None

    def received(self, message: Message) -> None:
        """Handles a message of the prefill server."""
        match message:
            case Computed(room=number):
                self._step(number, Kind.COMPUTED)
            case Done(room=number):
                self._step(number, Kind.DONE)
            case Failed(room=number, reason=reason):
                self._step(number, Kind.FAILED, reason)
            case Gone(room=number):
                self._step(number, Kind.GONE)
            case _:
                pass

    def parked(self, event: ParkedEvent) -> bool:
        """A request has its pages; returns whether it is one of this connection. Called by the engine's thread."""
        if event.request_id not in self._rooms and event.request_id not in self._landed:
            return False
        self._call(lambda: self._reserved(event))
        return True

    def disconnected(self) -> None:
        """The prefill server is gone, or its connection."""
        self.connected = False
        for number in list(self._handovers):
            self._step(number, Kind.DISCONNECTED)

    def tick(self) -> None:
        """Ends what has waited too long."""
        now_s = self._clock()
        for number, handover in list(self._handovers.items()):
            if handover.room.deadline_s <= now_s:
                self._step(number, Kind.TIMEOUT)

    def decline(self, routed: int, status: int, reason: str) -> None:
        """Says that a request of a router is not asked for."""
        self._send(Declined(routed, status, reason))

    def _ask(self, handover: _Handover, tokens: Sequence[int], routed: int = 0) -> None:
        number, request = self._number(), handover.request
        self._handovers[number], self._rooms[request.id] = handover, number
        self._send(Ask(number, list(tokens), request.cache_salt, request.tenant, request.priority, routed))
        if not self.connected:
            self._step(number, Kind.DISCONNECTED)

    def _reserved(self, event: ParkedEvent) -> None:
        number = self._rooms.get(event.request_id)
        if number is not None:
            self._handovers[number] = self._handovers[number]._replace(target=event)
            self._step(number, Kind.RESERVED)
        elif len(event.token_ids) == 1:
            self._engine.landed(event.request_id)
        elif landed := self._landed.pop(event.request_id, None):
            self._lost(landed.request, landed.sink, landed.failed, event)
        # Else it was given up while the engine looked for pages, and is cancelled already.

    def _step(self, number: int, kind: Kind, reason: str = "") -> None:
        handover = self._handovers.get(number)
        if handover is None:
            return
        room, todo = rooms.decode(handover.room, rooms.Event(kind, self._clock(), reason), self._timeouts)
        self._handovers[number] = handover._replace(room=room)
        for do in todo:
            self._do(number, self._handovers[number], do)
        if room.stage in (Stage.ENDED, Stage.LANDED):
            ended = self._handovers.pop(number)
            del self._rooms[ended.request.id]
            if room.stage is Stage.ENDED and ended.submitted:
                self._engine.cancel(ended.request.id)

    def _do(self, number: int, handover: _Handover, do: Do) -> None:
        match do:
            case Do.SEND_ABORT:
                self._send(Abort(number))
            case Do.SEND_READY:
                target = handover.target
                assert target is not None
                self._send(Ready(number, target.group, list(target.pages), target.known, target.slot))
            case Do.RESERVE if handover.submitted:
                self._step(number, Kind.RESERVED)
            case Do.RESERVE:
                self._submit(number, handover)
            case Do.RUN:
                self._landed[handover.request.id] = handover
                self._tell_landed(self._clock() - handover.asked_s)
                self._engine.landed(handover.request.id)
            case Do.GIVE_UP:
                handover.failed(handover.room.reason)
            case Do.FREE | Do.WITHHOLD:
                # Freed with the request, which is cancelled when the room ends; withheld until then.
                pass
            case _:
                raise AssertionError(do)

    def _submit(self, number: int, handover: _Handover) -> None:
        self._handovers[number] = handover._replace(submitted=True)
        try:
            waited_ms = 1e3 * (self._clock() - handover.asked_s)
            self._engine.submit(replace(handover.request, handover=RECEIVE, waited_ms=waited_ms), self)
        except RequestError as error:
            self._handovers[number] = handover
            self._step(number, Kind.FAILED, str(error))
            self._send(Abort(number))

    def _cancelled(self, request_id: str) -> None:
        self.cancel(request_id)
