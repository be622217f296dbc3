"""Turns messages between ranks into frames of bytes on a socket, and back.

A frame is its length in 8 bytes, big-endian, and that many bytes of msgpack: `[kind, fields]`. Arrays are an extension type of
their dtype, shape and bytes. Nothing in a frame is ever executed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np

from ...graphs.errors import ProtocolError

HEADER = struct.Struct(">Q")
MOST_BYTES = 1 << 32
MOST_HELLO_BYTES = 1 << 20
ARRAY = 1


class Message(NamedTuple):
    """One message: what kind it is, and its fields."""

    kind: str
    fields: Mapping[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    """A whole frame; fields are plain values, numpy arrays, and lists and dicts of them.

    Raises:
        TypeError: on anything else.
    """
    packed: bytes = msgpack.packb([kind, fields], default=_pack)
    return HEADER.pack(len(packed)) + packed


def decode(packed: bytes) -> Message:
    """Reads what a frame holds; arrays are new and may be written.

    Raises:
        ProtocolError: when it is not a message.
    """
    try:
        kind, fields = msgpack.unpackb(packed, ext_hook=_unpack)
    except Exception as error:
        raise ProtocolError(f"{len(packed)} bytes are no message of a rank: {type(error).__name__}: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise ProtocolError(f"a rank sent a {type(kind).__name__} and a {type(fields).__name__}; legal is a kind and its fields")
    return Message(kind, fields)


class Frames:
    """Bytes as they arrive, cut into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            ProtocolError: on a frame that is too long or no message.
        """
        self._bytes += data
        found = []
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > MOST_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; legal is up to {MOST_BYTES}")
            end = HEADER.size + length
            if len(self._bytes) < end:
                break
            found.append(decode(bytes(self._bytes[HEADER.size : end])))
            del self._bytes[:end]
        return found


def receive(stream: socket.socket) -> Message:
    """Waits for one short message, no longer than the socket's timeout for each part, and reads no byte beyond it.

    Raises:
        ProtocolError: on what is no message.
        OSError: when the peer is gone or too slow.
    """
    (length,) = HEADER.unpack(_exactly(stream, HEADER.size))
    if length > MOST_HELLO_BYTES:
        raise ProtocolError(f"a first frame of {length} bytes; legal is up to {MOST_HELLO_BYTES}")
    return decode(_exactly(stream, length))


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = stream.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return bytes(data)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _unpack(code: int, data: bytes) -> Any:
    if code != ARRAY:
        raise ValueError(f"extension {code} is unknown")
    dtype, shape, content = msgpack.unpackb(data)
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
