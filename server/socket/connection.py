"""The state of one socket, without I/O: frames in, commands on its responses out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..guard.limits import MAX_FRAME_BYTES, SocketLimits
from ..requests.create_body import ResponseCreate
from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..requests.frames import JSON, Frame, decode, encode, encoder
from ..siblings.ids import new_response_id
from .messages import ClientEvent, ResponseCancel, ResponseResume, ResponseSteer, parse


@dataclass(frozen=True)
class CreateCommand:
    """Start a response on a stream of this socket."""

    response_id: str
    stream_id: str
    body: ResponseCreate


Command = CreateCommand | ResponseCancel | ResponseResume | ResponseSteer


class Connection:
    """The lanes of one socket, each of which has one response at a time and lets others wait in their order.

    A lane is named by a `stream_id`; creates without one share a lane, whose events have none. `receive` either returns a command, or
    None for a create that waits, or raises and leaves the state unchanged, so a bad frame does not cost the socket.

    Args:
        subprotocol: one of `frames.SUBPROTOCOLS`.
        max_frame_bytes: largest legal frame.
        max_streams: most responses that run or wait at once.
        new_id: makes response ids.
    """

    def __init__(
        self,
        subprotocol: str = JSON,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_streams: int = SocketLimits.max_streams,
        new_id: Callable[[], str] = new_response_id,
    ) -> None:
        self.subprotocol, self._encode = subprotocol, encoder(subprotocol)
        self._max_frame_bytes = max_frame_bytes
        self._max_streams = max_streams
        self._new_id = new_id
        self._lanes: dict[str, deque[CreateCommand | ResponseResume]] = {}
        self._lane_of: dict[str, str] = {}

    @property
    def open(self) -> Mapping[str, str]:
        """Lanes with a response: stream id to the id of the response that runs there; the lane without a name is ""."""
        return {lane: commands[0].response_id for lane, commands in self._lanes.items()}

    @property
    def count(self) -> int:
        """Responses that run or wait."""
        return sum(map(len, self._lanes.values()))

    def receive(self, frame: Frame) -> Command | None:
        """One frame as a command; None for a create that waits for its lane.

        Raises:
            ProtocolError: the frame is not a message, or asks for something that this socket's state does not allow
                (codes too_many_streams, stream_in_use, response_not_found).
        """
        return self.apply(self.parse(frame))

    def parse(self, frame: Frame) -> ClientEvent:
        """The message in a frame, whatever the state of the socket; may be called on any thread.

        Raises:
            ProtocolError: the frame is not a message.
        """
        return parse(decode(frame, self.subprotocol, self._max_frame_bytes))

    def apply(self, event: ClientEvent) -> Command | None:
        """A message as a command; None for a create that waits for its lane.

        Raises:
            ProtocolError: this socket's state does not allow it.
        """
        match event:
            case ResponseCreate():
                return self._create(event)
            case ResponseResume():
                return self._resume(event)
            case ResponseSteer():
                return event
            case ResponseCancel():
                return self._cancel(event.response_id, event.stream_id)

    def finish(self, response_id: str) -> CreateCommand | None:
        """Ends the response of a lane, whatever its end; returns the create that waited for it longest. Of an unknown response, None."""
        lane = self._lane_of.pop(response_id, None)
        if lane is None:
            return None
        commands = self._lanes[lane]
        commands.popleft()
        if not commands:
            del self._lanes[lane]
            return None
        following = commands[0]
        assert isinstance(following, CreateCommand)
        self._lane_of[following.response_id] = lane
        return following

    def encode(self, event: Mapping[str, Any]) -> Frame:
        """One server event as a frame of this socket's subprotocol."""
        return encode(event, self.subprotocol)

    def encode_bytes(self, event: Mapping[str, Any]) -> bytes:
        """One server event as the payload of a frame."""
        return self._encode(event)

    def _create(self, body: ResponseCreate) -> CreateCommand | None:
        lane = body.fields.stream_id or ""
        self._check_room(body.fields.stream_id)
        command = CreateCommand(self._new_id(), lane, body)
        return command if self._enter(lane, command) else None

    def _resume(self, event: ResponseResume) -> ResponseResume:
        lane = event.stream_id or ""
        self._check_room(event.stream_id)
        if event.response_id in self._lane_of:
            raise Refusal("stream_in_use.response", param="response_id", stream_id=event.stream_id, response=show(event.response_id))
        if lane in self._lanes:
            name, taken = _lane_name(event.stream_id), repr(self._lanes[lane][0].response_id)
            raise Refusal("stream_in_use.lane", param="stream_id", stream_id=event.stream_id, lane=name, response=taken)
        self._enter(lane, event)
        return event

    def _enter(self, lane: str, command: CreateCommand | ResponseResume) -> bool:
        """Adds a command to a lane; whether it is the only one there."""
        commands = self._lanes.setdefault(lane, deque())
        commands.append(command)
        if len(commands) > 1:
            return False
        self._lane_of[command.response_id] = lane
        return True

    def _check_room(self, stream_id: str | None) -> None:
        if self.count >= self._max_streams:
            raise Refusal("too_many_streams", param="stream_id", stream_id=stream_id, count=self.count, most=self._max_streams)

    def _cancel(self, response_id: str | None, stream_id: str | None) -> ResponseCancel:
        lane = stream_id if response_id is None else self._lane_of.get(response_id)
        if lane in self._lanes and stream_id in (None, lane):
            return ResponseCancel(response_id=self._lanes[lane][0].response_id, stream_id=lane or None)
        named = " and ".join(f"{name} {show(value)}" for name, value in (("response_id", response_id), ("stream_id", stream_id)) if value)
        param = "response_id" if response_id is not None else "stream_id"
        raise Refusal("response_not_found.socket", param=param, stream_id=stream_id, named=named, open=self._names())

    def _names(self) -> str:
        names = list(self._lanes)
        return str(names) if len(names) <= 8 else f"{names[:8]} and {len(names) - 8} more"


def _lane_name(stream_id: str | None) -> str:
    return "the lane without a stream_id" if stream_id is None else f"stream_id {stream_id!r}"
