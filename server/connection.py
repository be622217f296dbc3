"""The state of one socket, without I/O: frames in, commands on its responses out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .create_body import ResponseCreate
from .fields import FieldError, show
from .frames import JSON, Frame, decode, encode, encode_bytes
from .limits import MAX_FRAME_BYTES
from .protocol import ClientEvent, parse

MAX_STREAMS = 256


@dataclass(frozen=True)
class CreateCommand:
    """Start a response on a stream of this socket."""

    response_id: str
    stream_id: str
    body: ResponseCreate


@dataclass(frozen=True)
class CancelCommand:
    """End a response that is open on this socket."""

    response_id: str
    stream_id: str


Command = CreateCommand | CancelCommand


def new_response_id() -> str:
    """An identifier no other response has."""
    return f"resp_{uuid.uuid4().hex}"


class Connection:
    """The open streams of one socket.

    A stream is open from `receive` of its `response.create` until `finish`; then its name is free again. `receive` either returns a
    command or raises and leaves the state unchanged, so a bad frame does not cost the socket.

    Args:
        subprotocol: one of `protocol.SUBPROTOCOLS`.
        max_frame_bytes: largest legal frame.
        max_streams: most streams open at once.
        new_id: makes response ids.
    """

    def __init__(
        self,
        subprotocol: str = JSON,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_streams: int = MAX_STREAMS,
        new_id: Callable[[], str] = new_response_id,
    ) -> None:
        self.subprotocol = subprotocol
        self._max_frame_bytes = max_frame_bytes
        self._max_streams = max_streams
        self._new_id = new_id
        self._open: dict[str, str] = {}
        self._stream_of: dict[str, str] = {}

    @property
    def open(self) -> Mapping[str, str]:
        """Open streams: stream id to response id."""
        return dict(self._open)

    def receive(self, frame: Frame) -> Command:
        """One frame as a command.

        Raises:
            ProtocolError: the frame is not a message, or asks for something that this socket's state does not allow
                (codes stream_in_use, too_many_streams, response_not_found).
        """
        return self.apply(self.parse(frame))

    def parse(self, frame: Frame) -> ClientEvent:
        """The message in a frame, whatever the state of the socket; may be called on any thread.

        Raises:
            ProtocolError: the frame is not a message.
        """
        return parse(decode(frame, self.subprotocol, self._max_frame_bytes))

    def apply(self, event: ClientEvent) -> Command:
        """A message as a command.

        Raises:
            ProtocolError: this socket's state does not allow it.
        """
        if isinstance(event, ResponseCreate):
            return self._create(event)
        return self._cancel(event.response_id, event.stream_id)

    def finish(self, response_id: str) -> None:
        """Closes the stream of a response, whatever its end; a response that is not open is left alone."""
        stream_id = self._stream_of.pop(response_id, None)
        if stream_id is not None:
            del self._open[stream_id]

    def encode(self, event: Mapping[str, Any]) -> Frame:
        """One server event as a frame of this socket's subprotocol."""
        return encode(event, self.subprotocol)

    def encode_bytes(self, event: Mapping[str, Any]) -> bytes:
        """One server event as the payload of a frame."""
        return encode_bytes(event, self.subprotocol)

    def _create(self, body: ResponseCreate) -> CreateCommand:
        stream_id = body.stream_id
        if stream_id is None:
            stream_id = next(name for name in map(str, range(len(self._open) + 1)) if name not in self._open)
        if stream_id in self._open:
            message = f"stream_id {stream_id!r} is in use by response {self._open[stream_id]!r}; legal is a name not in {self._names()}"
            raise FieldError(message, param="stream_id", code="stream_in_use", stream_id=stream_id)
        if len(self._open) >= self._max_streams:
            message = f"{len(self._open)} responses are open on this socket; the limit is {self._max_streams}"
            raise FieldError(message, param="stream_id", code="too_many_streams", stream_id=stream_id)
        response_id = self._new_id()
        self._open[stream_id], self._stream_of[response_id] = response_id, stream_id
        return CreateCommand(response_id, stream_id, body)

    def _cancel(self, response_id: str | None, stream_id: str | None) -> CancelCommand:
        open_stream = stream_id if response_id is None else self._stream_of.get(response_id)
        if open_stream in self._open and stream_id in (None, open_stream):
            return CancelCommand(self._open[open_stream], open_stream)
        named = " and ".join(f"{name} {show(value)}" for name, value in (("response_id", response_id), ("stream_id", stream_id)) if value)
        message = f"no response with {named} is open on this socket; open streams are {self._names()}"
        param = "response_id" if response_id is not None else "stream_id"
        raise FieldError(message, param=param, code="response_not_found", stream_id=stream_id)

    def _names(self) -> str:
        names = list(self._open)
        return str(names) if len(names) <= 8 else f"{names[:8]} and {len(names) - 8} more"
