"""Errors as OpenAI's error objects, the same over HTTP and over the websocket: what is said, with which status, and when to come back.

Messages quote what a client sent, which may be megabytes, so that every text is cut here, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...graphs.errors import ProtocolError, RequestError

MAX_MESSAGE_CHARS = 1000
MAX_NAME_CHARS = 200

STATUS_BY_CODE: Mapping[str, int] = {
    "invalid_api_key": 401,
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "response_not_found": 404,
    "body_too_large": 413,
    "unsupported_encoding": 415,
    "host_not_allowed": 421,
    "too_many_requests": 429,
    "queue_full": 503,
    "not_ready": 503,
    "starting": 503,
    "draining": 503,
    "engine_stopped": 503,
    "timeout": 504,
}
"""HTTP status of an error by its code; every other refusal is 400."""

TYPE_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""Type of an error object by its status; every other is an `invalid_request_error`."""

RETRY_AFTER_S: Mapping[int, int] = {429: 1, 503: 2}
"""After how many seconds to try again, by status."""


@dataclass(frozen=True)
class ErrorReply:
    """What a client is told.

    Attributes:
        status: of HTTP.
        code: short and machine-readable; None where HTTP's status says it all.
        param: the field at fault, if it is one.
        stream_id: the stream of a socket that the message named, where it could be read.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    stream_id: str | None = None

    def as_object(self) -> dict[str, Any]:
        """The object under "error"."""
        kind = TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        return {"type": kind, "code": _cut(self.code, MAX_NAME_CHARS), "message": self.message, "param": _cut(self.param, MAX_NAME_CHARS)}

    def headers(self) -> dict[str, str]:
        """Headers of an HTTP response with this error."""
        headers = {"Retry-After": str(RETRY_AFTER_S[self.status])} if self.status in RETRY_AFTER_S else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def error_reply(error: Exception) -> ErrorReply:
    """What to tell of an exception. Those that are neither ProtocolError nor RequestError are the server's own, and told without detail."""
    if not isinstance(error, (ProtocolError, RequestError)):
        return ErrorReply(500, "the server failed to handle this message; its log has the reason", "internal_error")
    message = _cut(str(error), MAX_MESSAGE_CHARS) or type(error).__name__
    param, stream_id = getattr(error, "param", None), getattr(error, "stream_id", None)
    return ErrorReply(STATUS_BY_CODE.get(error.code, 400), message, error.code, param, stream_id)


def failure_of(message: str | None) -> str:
    """What is said of a completion that failed, for the reason that the engine gave if it gave one."""
    return message or "the engine gave no reason"


def _cut(text: str | None, chars: int) -> str | None:
    if text is None or len(text) <= chars:
        return text
    return f"{text[:chars]}... ({len(text)} characters)"
