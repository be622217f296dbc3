"""Errors as Anthropic's API tells them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from ..openai.errors import error_response

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """The body of an answer, or the event that ends a stream."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_error(error: Exception) -> JSONResponse:
    """The answer to a request that failed, with the status and headers that chats have."""
    response = error_response(error)
    kept = {name: value for name, value in response.headers.items() if name not in ("content-length", "content-type")}
    told = json.loads(bytes(response.body))["error"]
    return JSONResponse(error_object(response.status_code, told["message"]), response.status_code, kept)
