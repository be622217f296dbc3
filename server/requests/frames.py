"""Frames of the websocket: one object in a text frame of JSON or a binary frame of msgpack.

JSON is subprotocol `npucompile.json`, also used when the client offers none; msgpack is `npucompile.msgpack`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...graphs.errors import ProtocolError
from ..requests.fields import show

JSON = "npucompile.json"
MSGPACK = "npucompile.msgpack"
SUBPROTOCOLS = (JSON, MSGPACK)

Frame = str | bytes


def choose_subprotocol(offered: Sequence[str]) -> str | None:
    """Picks the first offered subprotocol that the server supports; None when none was offered, which means JSON.

    Raises:
        ProtocolError: the client offered only unsupported ones.
    """
    for name in offered:
        if name in SUBPROTOCOLS:
            return name
    if offered:
        message = f"subprotocols {show(list(offered))} are not spoken here; legal are {list(SUBPROTOCOLS)}"
        raise ProtocolError(message, code="unsupported_subprotocol")
    return None


_ENCODE: Mapping[str, Callable[[Any], bytes]] = {JSON: msgspec.json.Encoder().encode, MSGPACK: msgspec.msgpack.Encoder().encode}
_MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)
_MAYBE_INFINITE = re.compile(rb"\xca[\x7f\xff][\x80-\xff]|\xcb[\x7f\xff][\xf0-\xff]")
"""Floats of msgpack whose exponent has all bits set; other bytes may look so."""

MAX_REASON_CHARS = 200
_HALF_PAIR = re.compile(r"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|[c-fC-F])")


def encoder(subprotocol: str) -> Callable[[Any], bytes]:
    """`encode_bytes` of a subprotocol."""
    return _ENCODE[subprotocol]


def encode_bytes(event: Mapping[str, Any], subprotocol: str) -> bytes:
    """One event as the payload of a frame. What is no number becomes null in JSON, which has none."""
    return _ENCODE[subprotocol](event)


def encode(event: Mapping[str, Any], subprotocol: str) -> Frame:
    """One event as a frame: str for JSON, bytes for msgpack."""
    payload = encode_bytes(event, subprotocol)
    return payload if subprotocol == MSGPACK else payload.decode()


def decode(frame: Frame, subprotocol: str, max_frame_bytes: int) -> dict[str, Any]:
    """Parses one frame into an object.

    Raises:
        ProtocolError: frame_too_large, wrong_frame_kind, invalid_utf8, invalid_json, invalid_msgpack or not_an_object.
    """
    data = frame if isinstance(frame, bytes) else _utf8(frame)
    if len(data) > max_frame_bytes:
        raise ProtocolError(f"frame of {len(data)} bytes; the limit is {max_frame_bytes} bytes", code="frame_too_large")
    if subprotocol == MSGPACK:
        if isinstance(frame, str):
            raise ProtocolError(f"text frame on subprotocol {MSGPACK}; legal are binary frames", code="wrong_frame_kind")
        value = _decode_msgpack(data)
    else:
        value = decode_json(data, "frame")
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ProtocolError(f"message is {show(value)}; legal is an object with text keys", code="not_an_object")
    return value


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"message holds a lone surrogate at {error.start}; legal is UTF-8 text", code="invalid_utf8") from None


def decode_json(data: bytes | bytearray, what: str) -> Any:
    """The JSON of a client, without what no answer could hold: half surrogate pairs, NaN and infinities.

    Args:
        what: that holds it, for errors.

    Raises:
        ProtocolError: it is none (codes invalid_utf8, invalid_json).
    """
    try:
        return msgspec.json.decode(data)
    except _MALFORMED as error:
        try:
            text = data.decode()
        except UnicodeDecodeError as reason:
            raise ProtocolError(f"{what} is not UTF-8: {reason.reason} at {reason.start}", code="invalid_utf8") from None
        if _HALF_PAIR.search(text):
            raise ProtocolError(f"{what} holds half of a surrogate pair; legal is UTF-8 text", code="invalid_utf8") from None
        raise ProtocolError(f"{what} is not JSON: {str(error)[:MAX_REASON_CHARS]}", code="invalid_json") from None


def _decode_msgpack(data: bytes) -> Any:
    try:
        value = msgspec.msgpack.decode(data)
    except _MALFORMED as error:
        raise ProtocolError(f"frame is not msgpack: {str(error) or type(error).__name__}", code="invalid_msgpack") from None
    # Looked for in the bytes first, which are a tenth of the time.
    if _MAYBE_INFINITE.search(data) and not _finite(value):
        raise ProtocolError("frame holds NaN or an infinity; legal are finite numbers", code="invalid_msgpack")
    return value


def _finite(value: Any) -> bool:
    """Whether all numbers in a decoded message are."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, list) else not isinstance(value, float) or math.isfinite(value)
