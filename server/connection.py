"""The state of one socket, without I/O: frames in, commands on its responses out."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..graphs.errors import ProtocolError
from .fields import FieldError
from .protocol import JSON, Frame, ResponseCreate, decode, encode, parse

MAX_FRAME_BYTES = 4 * 2**20
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
        event = parse(decode(frame, self.subprotocol, self._max_frame_bytes))
        if isinstance(event, ResponseCreate):
            return self._create(event)
        return self._cancel(event.response_id, event.stream_id)

    def finish(self, response_id: str) -> None:
        """Closes the stream of a response, whatever its end; a response that is not open is left alone."""
        for stream_id, open_id in self._open.items():
            if open_id == response_id:
                del self._open[stream_id]
                return

    def encode(self, event: Mapping[str, Any]) -> Frame:
        """One server event as a frame of this socket's subprotocol."""
        return encode(event, self.subprotocol)

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
        self._open[stream_id] = response_id
        return CreateCommand(response_id, stream_id, body)

    def _cancel(self, response_id: str | None, stream_id: str | None) -> CancelCommand:
        for open_stream, open_id in self._open.items():
            if response_id in (None, open_id) and stream_id in (None, open_stream):
                return CancelCommand(open_id, open_stream)
        named = " and ".join(f"{name} {value!r}" for name, value in (("response_id", response_id), ("stream_id", stream_id)) if value)
        message = f"no response with {named} is open on this socket; open streams are {self._names()}"
        param = "response_id" if response_id is not None else "stream_id"
        raise FieldError(message, param=param, code="response_not_found", stream_id=stream_id)

    def _names(self) -> str:
        names = list(self._open)
        return str(names) if len(names) <= 8 else f"{names[:8]} and {len(names) - 8} more"


def refusal(error: ProtocolError) -> tuple[str | None, str | None]:
    """The field and the stream that an error names, or None."""
    return (error.param, error.stream_id) if isinstance(error, FieldError) else (None, None)
