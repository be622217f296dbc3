"""The prefill side of a connection: computes the prompts that a decode server asks for, and writes their pages to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ...graphs.errors import RequestError
from ..engine import Engine
from ..request import SEND, Event, FinishEvent, ParkedEvent, Request
from . import room as rooms
from .messages import Abort, Ask, Computed, Done, Failed, Gone, Message, Ready
from .pools import Peer, Pools
from .room import DEFAULTS, Do, Kind, Room, Stage, Timeouts


class _Handover(NamedTuple):
    """A room, the id of its request, what gives its place back, a router's number of it, where it is parked, and where it goes."""

    room: Room
    request_id: str
    leave: Callable[[], None]
    routed: int
    source: ParkedEvent | None = None
    target: Ready | None = None


def _stay() -> None:
    """Nothing is given back."""


class Sender:
    """Rooms of one connection. All methods are called by one thread; what engines tell from theirs is passed on by `call`.

    Attributes:
        writes, pages_written: of all rooms so far, each with a state.

    Args:
        engine: computes the prompts.
        pools: of this server.
        peer: the decode server, as its greeting described it.
        send: takes messages to the decode server, in order, until it is disconnected.
        call: has the thread of this object call a function.
        clock: monotonic seconds.
        name: unique for each connection; begins the ids of its requests.
        ended: told of each room that a router knows (`messages.Ask`) when it ends: its number, and why it was given up.
        enter: takes a place for a prompt of so many tokens, and returns what gives it back; raises RequestError where there is none.
    """

    def __init__(
        self,
        engine: Engine,
        pools: Pools,
        peer: Peer,
        send: Callable[[Message], None],
        call: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        name: str,
        timeouts: Timeouts = DEFAULTS,
        enter: Callable[[int], Callable[[], None]] = lambda _: _stay,
        ended: Callable[[int, str], None] = lambda number, reason: None,
    ) -> None:
        self._engine, self._pools, self._peer, self._send, self._call, self._clock = engine, pools, peer, send, call, clock
        self._name, self._timeouts, self._enter, self._ended = name, timeouts, enter, ended
        self._handovers: dict[int, _Handover] = {}
        self._rooms: dict[str, int] = {}
        self.writes = self.pages_written = 0

    @property
    def rooms(self) -> int:
        """Rooms that have not ended."""
        return len(self._handovers)

    @property
    def next_deadline_s(self) -> float:
        """When `tick` is due; infinity where nothing waits."""
        return min((handover.room.deadline_s for handover in self._handovers.values()), default=math.inf)

    def received(self, message: Message) -> None:
        """Handles a message of the decode server."""
        match message:
            case Ask():
                self._begin(message)
            case Ready(room=number):
                if number in self._handovers:
                    self._handovers[number] = self._handovers[number]._replace(target=message)
                    self._step(number, Kind.READY)
            case Abort(room=number) if number not in self._handovers:
                self._send(Gone(number))
            case Abort(room=number):
                self._step(number, Kind.ABORT)
            case _:
                pass

    def parked(self, event: ParkedEvent) -> bool:
        """A request is computed; returns whether it is one of this connection. Called by the engine's thread."""
        if event.request_id not in self._rooms:
            return False
        self._call(lambda: self._computed(event))
        return True

    def disconnected(self) -> None:
        """The decode server is gone, or its connection."""
        for number in list(self._handovers):
            self._step(number, Kind.DISCONNECTED)

    def tick(self) -> None:
        """Ends what has waited too long."""
        now_s = self._clock()
        for number, handover in list(self._handovers.items()):
            if handover.room.deadline_s <= now_s:
                self._step(number, Kind.TIMEOUT)

    def _begin(self, ask: Ask) -> None:
        if ask.room in self._handovers:
            # The room goes on; its other half is a mistake of a client that chose the number.
            return
        request_id = f"{self._name}-{ask.room}"
        try:
            leave = self._enter(len(ask.tokens))
        except RequestError as error:
            self._send(Failed(ask.room, str(error)))
            self._tell(ask.routed, str(error))
            return
        self._handovers[ask.room] = _Handover(rooms.begin_prefill(self._clock(), self._timeouts), request_id, leave, ask.routed)
        self._rooms[request_id] = ask.room
        try:
            request = Request(
                request_id,
                tuple(ask.tokens),
                1,
                handover=SEND,
                cache_salt=ask.cache_salt,
                tenant=ask.tenant,
                priority=ask.priority,
            )
            self._engine.submit(request, lambda event: self._engine_event(ask.room, event))
        except (RequestError, TypeError) as error:
            self._step(ask.room, Kind.NOT_PREFILLED, str(error))

    def _engine_event(self, number: int, event: Event) -> None:
        if isinstance(event, FinishEvent) and event.reason != "cancelled":
            self._call(lambda: self._step(number, Kind.NOT_PREFILLED, event.message or event.reason))

    def _computed(self, event: ParkedEvent) -> None:
        number = self._rooms.get(event.request_id)
        if number is not None:
            self._handovers[number] = self._handovers[number]._replace(source=event)
            self._step(number, Kind.PREFILLED)

    def _step(self, number: int, kind: Kind, reason: str = "") -> None:
        handover = self._handovers.get(number)
        if handover is None:
            return
        room, todo = rooms.prefill(handover.room, rooms.Event(kind, self._clock(), reason), self._timeouts)
        self._handovers[number] = handover = handover._replace(room=room)
        for do in todo:
            self._do(number, handover, do)
        if kind is Kind.WRITTEN and handover.target is not None:
            self.writes += 1
            self.pages_written += len(handover.target.pages) - handover.target.known
        if room.stage is Stage.ENDED:
            del self._handovers[number], self._rooms[handover.request_id]
            handover.leave()
            self._tell(handover.routed, room.reason)

    def _tell(self, routed: int, reason: str) -> None:
        if routed:
            self._ended(routed, reason)

    def _do(self, number: int, handover: _Handover, do: Do) -> None:
        match do:
            case Do.SEND_COMPUTED:
                assert handover.source is not None
                self._send(Computed(number, handover.source.known * self._engine.executor.limits.page_size))
            case Do.SEND_DONE:
                self._send(Done(number))
            case Do.SEND_FAILED:
                self._send(Failed(number, handover.room.reason))
            case Do.SEND_GONE:
                self._send(Gone(number))
            case Do.STOP | Do.FREE:
                self._engine.cancel(handover.request_id)
            case Do.WRITE:
                self._write(number, handover)
            case _:
                raise AssertionError(do)

    def _write(self, number: int, handover: _Handover) -> None:
        assert handover.source is not None
        assert handover.target is not None

        def written(reason: str) -> None:
            self._call(lambda: self._step(number, Kind.NOT_WRITTEN if reason else Kind.WRITTEN, reason))

        self._pools.write(handover.source, self._peer, handover.target, written)
