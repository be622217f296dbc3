"""What went wrong with a request, as the answer to it."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import JSONResponse

from ...graphs.errors import RequestError
from ...runtime.constraint import DEAD_END, TOO_COMPLEX
from ..engine.output_stream import CompletionEnd
from ..guard.door import error_response as response_of
from ..requests.error_objects import STATUS_BY_CODE, ErrorReply, error_reply, failure_of

log = logging.getLogger(__name__)


class EngineFailure(Exception):
    """A completion failed; its text is fit to be shown to the client."""


class EngineTimeout(EngineFailure):
    """A completion ran out of time."""


def failure(end: CompletionEnd) -> Exception:
    """What a completion raises that ended with reason "error": what is the request's own has a code."""
    message = failure_of(end.message)
    return RequestError(message, code=end.code) if end.code else EngineFailure(message)


def failure_object(message: str, code: str | None = None) -> dict[str, Any]:
    """The object of an error that ended a stream."""
    status = 400 if code in (DEAD_END, TOO_COMPLEX) else STATUS_BY_CODE.get(code or "", 500)
    return ErrorReply(status, message, code or "internal_error").as_object()


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
