"""A room is one handover of a request from a prefill server to a decode server; both servers keep a record of it.

Everything here is a pure function over frozen records: `prefill` and `decode` take a record and an event, and return the next record and
what its server has to do. Messages may be lost, repeated or late, either server or the connection may end at any time, and timers fire
(`Room.deadline_s`). What always holds:

    A page or slot of the decode server is given to somebody else only when no write to it can be in flight: after an answer of the
    prefill server that says so (DONE, FAILED, GONE), or when its access was revoked (`write_access`), whatever its process does then.
    A page of the prefill server stays while a write reads it.
    The request ends once, on the decode server: it runs there, is computed anew, or ends with a reason.

A prefill server computes all tokens of the prompt but the last; the decode server runs that one. So nothing that sampling makes exists
before a room has landed. The decode server gets pages only when the prompt is computed, so that no page waits for a prompt.

             prefill server                                   decode server
    ASK -->  COMPUTING  (the engine runs the prompt)          ASKED
             HELD       (pages are kept)        COMPUTED -->  WAITING    (for pages)
             WRITING    (the engine writes)     <-- READY     RECEIVING
             ENDED      (pages are free)        DONE -->      LANDED     (the scheduler has it)

    ABORT in WRITING leads to DRAINING until the writes that were begun have ended, on the other side to FENCED until that is known, and
    where it is not said in time, or there is nobody left to say it, to REVOKING.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple


class Timeouts(NamedTuple):
    """Seconds; the defaults are those of published launch scripts.

    Attributes:
        asked: how long a decode server waits until a prompt is computed.
        held: how long a prefill server keeps a computed prompt for a decode server that has no pages for it.
        receiving: how long a transfer may take.
        fence: how long an aborted transfer may go on before access is revoked.
    """

    asked: float = 300.0
    held: float = 300.0
    receiving: float = 300.0
    fence: float = 30.0


DEFAULTS = Timeouts()


class RoomStage(enum.Enum):
    """Where a room is."""

    # Of a prefill server.
    COMPUTING = "the prompt is being computed"
    HELD = "the prompt is computed, and its pages are kept"
    WRITING = "pages are being written"
    DRAINING = "the handover is given up, and writes are in flight"
    # Of a decode server.
    ASKED = "a prefill server was asked"
    WAITING = "the prompt is computed, and pages are missing"
    RECEIVING = "pages are being received"
    FENCED = "the handover is given up, and writes may be in flight"
    REVOKING = "the prefill server does not say whether writes are in flight, and its access is taken back"
    LANDED = "the scheduler has the request"
    # Of both.
    ENDED = "nothing is held"


class Kind(enum.Enum):
    """What happens to a room: messages of the other server, results of its own, and time."""

    # Messages to the prefill server.
    READY = "ready"
    ABORT = "abort"
    # Messages to the decode server.
    COMPUTED = "computed"
    DONE = "done"
    FAILED = "failed"
    GONE = "gone"
    # Results of the own engine, scheduler or transfer engine.
    PREFILLED = "prefilled"
    NOT_PREFILLED = "not prefilled"
    RESERVED = "reserved"
    WRITTEN = "written"
    NOT_WRITTEN = "not written"
    REVOKED = "revoked"
    # The own client left; the connection to the other server ended; the deadline is over.
    CANCELLED = "cancelled"
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"


class RoomEvent(NamedTuple):
    """Attributes:
    at_s: when it was noticed, of a monotonic clock.
    reason: of FAILED, NOT_PREFILLED and NOT_WRITTEN.
    """

    kind: Kind
    at_s: float
    reason: str = ""


class Do(enum.Enum):
    """What a server has to do after an event."""

    # Messages; FAIL has the room's reason.
    SEND_ABORT = "send abort"
    SEND_READY = "send ready"
    SEND_COMPUTED = "send computed"
    SEND_DONE = "send done"
    SEND_FAILED = "send failed"
    SEND_GONE = "send gone"
    # To the own engine: stop computing, write, write nothing that was not begun, free what is held.
    STOP = "stop"
    WRITE = "write"
    STOP_WRITING = "stop writing"
    FREE = "free"
    # Of a decode server: get pages, give them to the scheduler, take access to them back. And once for each request: what becomes of it.
    RESERVE = "reserve"
    RUN = "run"
    REVOKE = "revoke"
    GIVE_UP = "give up"


class Room(NamedTuple):
    """One server's record.

    Attributes:
        stage: where it is.
        deadline_s: when TIMEOUT is due; infinity for never.
        connected: of a prefill server, whether the connection to the other one stands since the room began.
        reason: why it was given up; empty where it was not.
    """

    stage: RoomStage
    deadline_s: float = math.inf
    connected: bool = True
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether pages or slots of this server belong to the room."""
        return self.stage in _HOLDING


_HOLDING = {RoomStage.HELD, RoomStage.WRITING, RoomStage.DRAINING, RoomStage.RECEIVING, RoomStage.FENCED, RoomStage.REVOKING}

Step = tuple[Room, tuple[Do, ...]]
_ENDED = Room(RoomStage.ENDED)


def begin_prefill(now_s: float, timeouts: Timeouts) -> Room:
    """A prefill server takes an ASK."""
    return Room(RoomStage.COMPUTING, now_s + timeouts.asked)


def begin_decode(now_s: float, timeouts: Timeouts) -> Room:
    """A decode server sends an ASK."""
    return Room(RoomStage.ASKED, now_s + timeouts.asked)


def prefill(room: Room, event: RoomEvent, timeouts: Timeouts) -> Step:
    """The next record of a prefill server, and what it has to do, in this order."""
    kind = event.kind
    match room.stage:
        case RoomStage.COMPUTING:
            if kind is Kind.PREFILLED:
                return Room(RoomStage.HELD, event.at_s + timeouts.held), (Do.SEND_COMPUTED,)
            if kind is Kind.NOT_PREFILLED:
                return _failed(event.reason), (Do.SEND_FAILED,)
            return _leave(room, event, (Do.STOP,))
        case RoomStage.HELD:
            if kind is Kind.READY:
                return Room(RoomStage.WRITING), (Do.WRITE,)
            return _leave(room, event, (Do.FREE,))
        case RoomStage.WRITING:
            if kind is Kind.WRITTEN:
                return _ENDED, (Do.FREE, Do.SEND_DONE)
            if kind is Kind.NOT_WRITTEN:
                return _failed(event.reason), (Do.FREE, Do.SEND_FAILED)
            if kind in (Kind.ABORT, Kind.CANCELLED, Kind.DISCONNECTED):
                return Room(RoomStage.DRAINING, connected=kind is not Kind.DISCONNECTED, reason=kind.value), (Do.STOP_WRITING,)
            return room, ()
        case RoomStage.DRAINING:
            if kind in (Kind.WRITTEN, Kind.NOT_WRITTEN):
                return _failed(room.reason), (Do.FREE, *((Do.SEND_GONE,) if room.connected else ()))
            return room._replace(connected=room.connected and kind is not Kind.DISCONNECTED), ()
        case _:
            # The first answer may have been lost.
            return room, ((Do.SEND_GONE,) if kind is Kind.ABORT else ())


def _leave(room: Room, event: RoomEvent, undo: tuple[Do, ...]) -> Step:
    """A prefill server that writes nothing gives a room up, where the event says so."""
    match event.kind:
        case Kind.ABORT:
            return _failed("abort"), (*undo, Do.SEND_GONE)
        case Kind.CANCELLED:
            return _failed("cancelled"), (*undo, Do.SEND_FAILED)
        case Kind.TIMEOUT:
            return _failed(f"timeout: {room.stage.value}"), (*undo, Do.SEND_FAILED)
        case Kind.DISCONNECTED:
            return _failed("disconnected"), undo
        case _:
            return room, ()


def decode(room: Room, event: RoomEvent, timeouts: Timeouts) -> Step:
    """The next record of a decode server, and what it has to do, in this order."""
    kind = event.kind
    match room.stage:
        case RoomStage.ASKED | RoomStage.WAITING:
            return _before_pages(room, event, timeouts)
        case RoomStage.RECEIVING:
            return _receiving(room, event, timeouts)
        case RoomStage.FENCED | RoomStage.REVOKING:
            if kind in (Kind.GONE, Kind.DONE, Kind.FAILED, Kind.REVOKED):
                return _failed(room.reason), (Do.FREE,)
            if kind in (Kind.DISCONNECTED, Kind.TIMEOUT) and room.stage is RoomStage.FENCED:
                return Room(RoomStage.REVOKING, reason=room.reason), (Do.REVOKE,)
            return room, ()
        case _:
            # Pages that came too late.
            return room, ((Do.FREE,) if kind is Kind.RESERVED else ())


def _before_pages(room: Room, event: RoomEvent, timeouts: Timeouts) -> Step:
    match event.kind:
        case Kind.COMPUTED if room.stage is RoomStage.ASKED:
            return Room(RoomStage.WAITING, event.at_s + timeouts.held), (Do.RESERVE,)
        case Kind.RESERVED if room.stage is RoomStage.WAITING:
            return Room(RoomStage.RECEIVING, event.at_s + timeouts.receiving), (Do.SEND_READY,)
        case Kind.FAILED:
            return _failed(event.reason), (Do.GIVE_UP,)
        case Kind.GONE | Kind.DONE:
            return _failed("the prefill server has given the room up"), (Do.GIVE_UP,)
        case Kind.DISCONNECTED:
            return _failed("disconnected"), (Do.GIVE_UP,)
        case Kind.CANCELLED | Kind.TIMEOUT:
            reason = "cancelled" if event.kind is Kind.CANCELLED else f"timeout: {room.stage.value}"
            return _failed(reason), (Do.SEND_ABORT, Do.GIVE_UP)
        case _:
            return room, ()


def _receiving(room: Room, event: RoomEvent, timeouts: Timeouts) -> Step:
    match event.kind:
        case Kind.DONE:
            return Room(RoomStage.LANDED), (Do.RUN,)
        case Kind.FAILED | Kind.GONE:
            # Sent when the last write has ended.
            return _failed(event.reason or "the prefill server has given the room up"), (Do.FREE, Do.GIVE_UP)
        case Kind.CANCELLED | Kind.TIMEOUT:
            reason = "cancelled" if event.kind is Kind.CANCELLED else f"timeout: {room.stage.value}"
            return Room(RoomStage.FENCED, event.at_s + timeouts.fence, reason=reason), (Do.SEND_ABORT, Do.GIVE_UP)
        case Kind.DISCONNECTED:
            return Room(RoomStage.REVOKING, reason="disconnected"), (Do.REVOKE, Do.GIVE_UP)
        case _:
            return room, ()


def _failed(reason: str) -> Room:
    return Room(RoomStage.ENDED, reason=reason)
