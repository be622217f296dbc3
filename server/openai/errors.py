"""What went wrong with a request, as the answer to it."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from ..door import error_response as response_of
from ..errors import ErrorReply, error_reply

log = logging.getLogger(__name__)


class EngineFailure(Exception):
    """A completion failed; its text is fit to be shown to the client."""


class EngineTimeout(EngineFailure):
    """A completion ran out of time."""


def server_error(message: str, code: str = "internal_error") -> dict[str, Any]:
    """The object of an error that is not the client's."""
    return ErrorReply(500, message, code).as_object()


def error_response(error: Exception) -> JSONResponse:
    """The answer to a request that failed; what is the server's own fault is logged."""
    if isinstance(error, EngineTimeout):
        return response_of(ErrorReply(504, str(error), "timeout"))
    if isinstance(error, EngineFailure):
        return response_of(ErrorReply(500, str(error), "internal_error"))
    reply = error_reply(error)
    if reply.status == 500:
        log.error("a request failed", exc_info=error)
    return response_of(reply)
