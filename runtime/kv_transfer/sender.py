"""The prefill side of a connection: computes the prompts that a decode server asks for, and writes their pages to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...graphs.errors import RequestError
from ..distributed.control_plane import error_text
from ..request import SEND, Event, FinishEvent, ParkedEvent, Request
from . import room as rooms
from .lease import LEASE_S, RENEW_S, clock_s
from .messages import Abort, Ask, Computed, Done, Failed, Gone, Message, Ready, Renew, Renewed, Sessions
from .open_rooms import Handover, OpenRooms, PeerConnection
from .pools import Peer, Pools
from .room import Do, Kind, Room


def _stay() -> None:
    """Nothing is given back, and nothing ends."""


@dataclass
class _Handover(Handover):
    """What gives its place back, a router's number of it, where it is parked, where it goes, and what ends its writes."""

    leave: Callable[[], None]
    routed: int
    source: ParkedEvent | None = None
    target: Ready | None = None
    stop_writing: Callable[[], None] = _stay


class Sender(OpenRooms[_Handover]):
    """`OpenRooms` of a prefill server.

    Attributes:
        writes, pages_written: of all rooms so far, each with a state.

    Args:
        pools: of this server.
        peer: the decode server, as its greeting described it.
        name: unique for each connection; begins the ids of its requests.
        ended: told of each room that a router knows (`messages.Ask`) when it ends: its number, and why it was given up.
        enter: takes a place for a prompt of so many tokens, and returns what gives it back; raises RequestError where there is none.
    """

    def __init__(
        self,
        connection: PeerConnection,
        pools: Pools,
        peer: Peer,
        name: str,
        enter: Callable[[int], Callable[[], None]] = lambda _: _stay,
        ended: Callable[[int, str], None] = lambda number, reason: None,
    ) -> None:
        super().__init__(connection)
        self._pools, self._peer, self._name, self._enter, self._ended = pools, peer, name, enter, ended
        self._lease, self._asked_s = pools.lease(), -math.inf
        # Rooms that are to be written once there is a lease.
        self._leaseless: dict[int, _Handover] = {}
        self.writes = self.pages_written = 0

    def tick(self) -> None:
        """Ends what has waited too long, and renews the lease."""
        super().tick()
        if any(handover.room.holds for handover in self._handovers.values()):
            self._renew()

    def received(self, message: Message) -> None:
        """Handles a message of the decode server."""
        match message:
            case Ask():
                self._begin(message)
            case Ready(room=number):
                if number in self._handovers:
                    self._handovers[number].target = message
                    self._step(number, Kind.READY)
            case Abort(room=number) if number not in self._handovers:
                self._send(Gone(number))
            case Abort(room=number, again=again):
                if again:
                    self._handovers[number].routed = 0
                self._step(number, Kind.ABORT)
            case Sessions(sessions=sessions):
                self._peer = self._peer._replace(sessions=sessions)
            case Renewed(at_s=at_s):
                # Of a time that this server has asked with; what comes later is no answer.
                self._lease.extend(min(at_s, self._asked_s) + LEASE_S)
                leaseless, self._leaseless = self._leaseless, {}
                for number, handover in leaseless.items():
                    self._write(number, handover)
            case _:
                pass

    def refused(self, number: int, reason: str) -> None:
        """A message of the decode server about a room is none that can be read; the room ends."""
        if number in self._handovers:
            self._step(number, Kind.CANCELLED)
        else:
            self._send(Failed(number, reason))

    def parked(self, event: ParkedEvent) -> bool:
        """A request is computed; returns whether it is one of this connection. Called by the engine's thread."""
        if event.request_id not in self._numbers:
            return False
        self._call(lambda: self._computed(event))
        return True

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
        self._open(ask.room, _Handover(rooms.begin_prefill(self._clock(), self._timeouts), request_id, leave, ask.routed))
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
        except Exception as error:
            # Whatever is wrong with a request ends that one.
            self._step(ask.room, Kind.NOT_PREFILLED, error_text(error))

    def _engine_event(self, number: int, event: Event) -> None:
        if isinstance(event, FinishEvent) and event.reason != "cancelled":
            self._call(lambda: self._step(number, Kind.NOT_PREFILLED, event.message or event.reason))

    def _computed(self, event: ParkedEvent) -> None:
        number = self._numbers.get(event.request_id)
        if number is not None:
            self._handovers[number].source = event
            self._step(number, Kind.PREFILLED)

    def _next(self, room: Room, event: rooms.RoomEvent) -> rooms.Step:
        return rooms.prefill(room, event, self._timeouts)

    def _closed(self, number: int, handover: _Handover) -> None:
        handover.leave()
        self._tell(handover.routed, handover.room.reason)

    def _tell(self, routed: int, reason: str) -> None:
        if routed:
            self._ended(routed, reason)

    def _do(self, number: int, handover: _Handover, do: Do) -> None:
        match do:
            case Do.SEND_COMPUTED:
                assert handover.source is not None
                self._send(Computed(number, handover.source.known * self._engine.executor.limits.page_size))
                self._renew()
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
            case Do.STOP_WRITING:
                handover.stop_writing()
            case _:
                raise AssertionError(do)

    def _write(self, number: int, handover: _Handover) -> None:
        source, target = handover.source, handover.target
        assert source is not None
        assert target is not None
        if self._lease.over:
            self._leaseless[number], handover.stop_writing = handover, lambda: self._without_lease(number)
            return

        def ended(reason: str) -> None:
            if not reason:
                self.writes += 1
                self.pages_written += len(target.pages) - target.known
            self._step(number, Kind.NOT_WRITTEN if reason else Kind.WRITTEN, reason)

        handover.stop_writing = self._pools.write(source, self._peer, target, self._lease, lambda reason: self._call(lambda: ended(reason)))

    def _without_lease(self, number: int) -> None:
        """A room of which nothing was written is given up."""
        if self._leaseless.pop(number, None):
            self._call(lambda: self._step(number, Kind.NOT_WRITTEN, "the decode server did not renew the lease"))

    def _renew(self) -> None:
        if (now_s := clock_s()) - self._asked_s >= RENEW_S:
            self._asked_s = now_s
            self._send(Renew(now_s))
