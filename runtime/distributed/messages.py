"""The messages between ranks, and their frames on a socket.

A frame is its length in 8 bytes, big-endian, and that many bytes of msgpack: `[kind, fields]`. Arrays are an extension type of
their dtype, shape and bytes. Decoding a frame never executes anything in it.
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
MAX_FRAME_BYTES = 1 << 32
MAX_HELLO_BYTES = 1 << 20
ARRAY_CODE = 1
"""Msgpack extension type of arrays."""


class RankMessage(NamedTuple):
    """One message: its kind and its fields."""

    kind: str
    fields: Mapping[str, Any]


def encode(kind: str, **fields: Any) -> bytes:
    """A frame; fields are plain values, numpy arrays, and lists and dicts of them.

    Raises:
        TypeError: on anything else.
    """
    packed: bytes = msgpack.packb([kind, fields], default=_pack)
    return HEADER.pack(len(packed)) + packed


def decode(packed: bytes) -> RankMessage:
    """The message of a frame, without its header; arrays are new and writable.

    Raises:
        ProtocolError: the bytes are not a message.
    """
    try:
        kind, fields = msgpack.unpackb(packed, ext_hook=_unpack)
    except Exception as error:
        raise ProtocolError(f"{len(packed)} bytes are no message of a rank: {type(error).__name__}: {error}") from None
    if not isinstance(kind, str) or not isinstance(fields, dict):
        raise ProtocolError(f"a rank sent a {type(kind).__name__} and a {type(fields).__name__}; legal is a kind and its fields")
    return RankMessage(kind, fields)


class FrameDecoder:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[RankMessage]:
        """The messages that these bytes complete.

        Raises:
            ProtocolError: a frame is too long or not a message.
        """
        self._bytes += data
        messages = []
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; legal is up to {MAX_FRAME_BYTES}")
            end = HEADER.size + length
            if len(self._bytes) < end:
                break
            messages.append(decode(bytes(self._bytes[HEADER.size : end])))
            del self._bytes[:end]
        return messages


def receive(stream: socket.socket) -> RankMessage:
    """Waits for one short message and reads no byte beyond it. The socket's timeout bounds the wait for each part.

    Raises:
        ProtocolError: the bytes are not a message.
        OSError: the peer is gone or too slow.
    """
    (length,) = HEADER.unpack(_read_exactly(stream, HEADER.size))
    if length > MAX_HELLO_BYTES:
        raise ProtocolError(f"a first frame of {length} bytes; legal is up to {MAX_HELLO_BYTES}")
    return decode(_read_exactly(stream, length))


def _read_exactly(stream: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = stream.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        data += part
    return bytes(data)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY_CODE, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent between ranks")


def _unpack(code: int, data: bytes) -> Any:
    if code != ARRAY_CODE:
        raise ValueError(f"extension {code} is unknown")
    dtype, shape, content = msgpack.unpackb(data)
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
