"""The decode side of a connection: asks a prefill server for prompts, and gives their pages to the scheduler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...graphs.errors import RequestError
from ..delivery import Sink
from ..request import RECEIVE, ParkedEvent, Request
from . import room as rooms
from .landed_requests import LandedRequests
from .messages import Abort, Ask, Computed, Declined, Done, Failed, Gone, Message, Ready, Renew, Renewed, Sessions
from .open_rooms import Handover, OpenRooms, PeerConnection
from .room import Do, Kind, Room, RoomStage
from .write_access import WriteAccess

OK = 200
"""The status of a request of which nothing is to be computed."""

FIRST = -(2**31)
"""The priority of a request that was running: before all others."""

CANCELLED = Kind.CANCELLED.value
"""Why a room is given up whose client has left."""


@dataclass
class _Handover(Handover):
    """Attributes:
    tokens, routed: what is asked for (`messages.Ask`).
    asked_s: when it was asked for first.
    target: where it is parked.
    again: it had landed before.
    submitted: the engine has it.
    told: `failed` was called.
    """

    request: Request
    sink: Sink
    failed: Callable[[str], None]
    tokens: Sequence[int]
    asked_s: float
    routed: int = 0
    target: ParkedEvent | None = None
    again: bool = False
    submitted: bool = False
    told: bool = False


class Receiver(OpenRooms[_Handover]):
    """`OpenRooms` of a decode server.

    Args:
        number: draws the number of a room.
        landed: takes the requests whose pages have arrived.
        access: to the pools of this server.

    Attributes:
        connected: whether the prefill server can be asked.
    """

    def __init__(self, connection: PeerConnection, number: Callable[[], int], landed: LandedRequests, access: WriteAccess) -> None:
        super().__init__(connection)
        self._number, self._landed, self._access = number, landed, access
        self.connected = True

    @property
    def withheld(self) -> int:
        """Rooms whose pages nobody may use until the access of a prefill server that does not answer is taken back."""
        return sum(handover.room.stage is RoomStage.REVOKING for handover in self._handovers.values())

    def asks(self, request_id: str) -> bool:
        """Whether a request has an open room."""
        return request_id in self._numbers

    def ask(self, request: Request, sink: Sink, failed: Callable[[str], None], routed: int = 0) -> None:
        """Asks for a prompt; one of a single token begins at once, as nothing is to be computed before it.

        Args:
            sink: gets the request's events once it has landed, from the engine's thread. Its times count from now on.
            failed: called instead where it is not handed over, with the reason; the request may then be computed elsewhere.
            routed: see `messages.Ask`.
        """
        if len(request.prompt) - request.num_scored == 1:
            try:
                self._landed.submit(request, sink)
            except RequestError as error:
                failed(str(error))
            if routed:
                self.decline(routed, OK, "")
            return
        # Tokens that are scored are computed by decode steps, one after the other.
        tokens = request.prompt[: len(request.prompt) - request.num_scored]
        self._ask(_Handover(self._begun(), request.id, request, sink, failed, tokens, self._clock(), routed), request.priority)

    def ask_again(self, request: Request, sink: Sink, failed: Callable[[str], None], parked: ParkedEvent) -> None:
        """Asks for all tokens of a request that had landed, has lost its pages, and is parked again. Where nobody hands them over the
        engine computes them, if it can, and `failed` is told of a client that has left alone."""
        handover = _Handover(self._begun(), request.id, request, sink, failed, parked.token_ids, self._clock(), target=parked)
        handover.again = handover.submitted = True
        self._ask(handover, FIRST)
        self._withdraw_waiting()

    def cancel(self, request_id: str) -> bool:
        """The client of a request has left; returns whether a room of it was open. One that has landed is the engine's alone."""
        number = self._numbers.get(request_id)
        if number is None:
            return False
        handover = self._handovers[number]
        self._step(number, Kind.CANCELLED)
        if handover.room.stage in (RoomStage.FENCED, RoomStage.REVOKING):
            self._give_up(handover, CANCELLED)
        return True

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
            case Renew(at_s=at_s):
                self._send(Renewed(at_s))
            case _:
                pass

    def parked(self, event: ParkedEvent) -> bool:
        """A request has its pages; returns whether it is one of this connection. Called by the engine's thread."""
        if event.request_id not in self._numbers:
            return False
        self._call(lambda: self._reserved(event))
        return True

    def disconnected(self) -> None:
        """The prefill server is gone, or its connection."""
        self.connected = False
        super().disconnected()

    def tick(self) -> None:
        """Ends what has waited too long, and takes access back."""
        super().tick()
        self._access.tick()

    def reopened(self, sessions: list[str]) -> None:
        """The pools of this server are reached by other sessions from now on."""
        self._send(Sessions(sessions))

    def decline(self, routed: int, status: int, reason: str) -> None:
        """Says that a request of a router is not asked for."""
        self._send(Declined(routed, status, reason))

    def _begun(self) -> Room:
        return rooms.begin_decode(self._clock(), self._timeouts)

    def _ask(self, handover: _Handover, priority: int) -> None:
        number, request = self._number(), handover.request
        self._open(number, handover)
        self._send(Ask(number, list(handover.tokens), request.cache_salt, request.tenant, priority, handover.routed))
        if not self.connected:
            self._step(number, Kind.DISCONNECTED)

    def _reserved(self, event: ParkedEvent) -> None:
        # One that was given up while the engine looked for pages is cancelled already.
        if (number := self._numbers.get(event.request_id)) is not None:
            self._handovers[number].target = event
            self._step(number, Kind.RESERVED)
            self._withdraw_waiting()

    def _reserve(self, number: int, handover: _Handover) -> None:
        if handover.target is not None:
            self._step(number, Kind.RESERVED)
            return
        if not handover.submitted:
            self._submit(number, handover)
        self._withdraw_waiting()

    def _withdraw_waiting(self) -> None:
        """Has computed prompts that wait for pages computed again later, where others have pages and wait until they are computed.

        Each server would otherwise wait for what the other one holds: this one for a place where prompts are computed, of which those
        that are computed have all, and they for pages.
        """
        if not any(handover.target and handover.room.stage is RoomStage.ASKED for handover in self._handovers.values()):
            return
        for number, handover in list(self._handovers.items()):
            if handover.room.stage is RoomStage.WAITING and not handover.target:
                del self._handovers[number]
                self._send(Abort(number, again=True))
                handover.room = self._begun()
                self._ask(handover, handover.request.priority)

    def _next(self, room: Room, event: rooms.RoomEvent) -> rooms.Step:
        return rooms.decode(room, event, self._timeouts)

    def _do(self, number: int, handover: _Handover, do: Do) -> None:
        match do:
            case Do.SEND_ABORT:
                self._send(Abort(number))
            case Do.SEND_READY:
                self._access.grant((self, number), functools.partial(self._ready, number, handover))
            case Do.REVOKE:
                self._access.revoke((self, number), functools.partial(self._step, number, Kind.REVOKED))
            case Do.RESERVE:
                self._reserve(number, handover)
            case Do.RUN:
                self._landed.landed(handover.request, handover.sink, self._clock() - handover.asked_s)
            case Do.GIVE_UP:
                if not (handover.again and self._landed.local) or handover.room.reason == CANCELLED:
                    self._give_up(handover, handover.room.reason)
            case Do.FREE:
                # With the request, which is cancelled when the room ends.
                pass
            case _:
                raise AssertionError(do)

    def _ready(self, number: int, handover: _Handover) -> None:
        target = handover.target
        assert target is not None
        self._send(Ready(number, target.group, list(target.pages), target.known, target.slot))

    def _give_up(self, handover: _Handover, reason: str) -> None:
        if not handover.told:
            handover.told = True
            handover.failed(reason)

    def _closed(self, number: int, handover: _Handover) -> None:
        self._access.release((self, number))
        if handover.room.stage is RoomStage.ENDED and handover.submitted:
            # No write to its pages is in flight.
            if handover.told:
                self._engine.cancel(handover.request_id)
            else:
                self._landed.compute_here(handover.request, handover.sink)

    def _submit(self, number: int, handover: _Handover) -> None:
        handover.submitted = True
        try:
            waited_ms = 1e3 * (self._clock() - handover.asked_s)
            self._engine.submit(replace(handover.request, handover=RECEIVE, waited_ms=waited_ms), self._landed)
        except RequestError as error:
            handover.submitted = False
            self._step(number, Kind.FAILED, str(error))
            self._send(Abort(number))
