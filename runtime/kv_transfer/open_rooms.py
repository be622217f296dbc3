"""The rooms of one connection, as both sides keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..delivery import Sink
from ..executor import Executor
from ..request import Request
from .messages import Message
from .room import DEFAULTS, Do, Kind, Room, RoomEvent, RoomStage, Step, Timeouts


class HandoverEngine(Protocol):
    """The part of `Engine` that this is about."""

    executor: Executor

    def submit(self, request: Request, sink: Sink) -> None:
        """See `Engine`."""
        ...

    def cancel(self, *request_ids: str) -> bool:
        """See `Engine`."""
        ...

    def landed(self, request_id: str, *, filled: bool = True) -> None:
        """See `Engine`."""
        ...


class PeerConnection(NamedTuple):
    """What rooms of a connection work with.

    Attributes:
        engine: of this server.
        send: takes messages to the other server, in order, until it is disconnected.
        call: has the thread of the rooms call a function.
        clock: monotonic seconds.
    """

    engine: HandoverEngine
    send: Callable[[Message], None]
    call: Callable[[Callable[[], None]], None]
    clock: Callable[[], float]
    timeouts: Timeouts = DEFAULTS


@dataclass
class Handover:
    """A room, and the id of its request."""

    room: Room
    request_id: str


H = TypeVar("H", bound=Handover)


class OpenRooms(Generic[H]):
    """Rooms of one connection. One thread calls all methods; what engines tell from theirs is passed on by `PeerConnection.call`."""

    def __init__(self, connection: PeerConnection) -> None:
        self._engine, self._send, self._call, self._clock, self._timeouts = connection
        self._handovers: dict[int, H] = {}
        self._numbers: dict[str, int] = {}

    @property
    def rooms(self) -> int:
        """Rooms that have neither landed nor ended."""
        return len(self._handovers)

    def disconnected(self) -> None:
        """The other server is gone, or its connection."""
        for number in list(self._handovers):
            self._step(number, Kind.DISCONNECTED)

    def tick(self) -> None:
        """Ends what has waited too long."""
        now_s = self._clock()
        for number, handover in list(self._handovers.items()):
            if handover.room.deadline_s <= now_s:
                self._step(number, Kind.TIMEOUT)

    def _open(self, number: int, handover: H) -> None:
        self._handovers[number], self._numbers[handover.request_id] = handover, number

    def _step(self, number: int, kind: Kind, reason: str = "") -> None:
        """What happens to a room, if it is open."""
        handover = self._handovers.get(number)
        if handover is None:
            return
        handover.room, todo = self._next(handover.room, RoomEvent(kind, self._clock(), reason))
        stage = handover.room.stage
        for do in todo:
            self._do(number, handover, do)
        if stage in (RoomStage.ENDED, RoomStage.LANDED):
            del self._handovers[number], self._numbers[handover.request_id]
            self._closed(number, handover)

    def _next(self, room: Room, event: RoomEvent) -> Step:
        """`room.prefill` or `room.decode`."""
        raise NotImplementedError

    def _do(self, number: int, handover: H, do: Do) -> None:
        raise NotImplementedError

    def _closed(self, number: int, handover: H) -> None:
        """A room is not open any more."""
        raise NotImplementedError
