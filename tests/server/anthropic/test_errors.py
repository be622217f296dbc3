"""server/anthropic/errors.py: errors have the kinds of their API, and the statuses and headers that chats have."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.anthropic.errors import error_object, message_error
from npucompile.server.openai.errors import EngineTimeout, error_response
from npucompile.server.requests.error_objects import Refusal


@pytest.mark.parametrize("error", [RequestError("no", param="x"), Refusal("draining"), EngineTimeout("late"), ValueError("a defect")])
def test_status_and_headers_are_those_of_chats(error: Exception) -> None:
    theirs, ours = error_response(error), message_error(error)
    assert ours.status_code == theirs.status_code
    assert ours.headers.get("retry-after") == theirs.headers.get("retry-after")
    body = json.loads(bytes(ours.body))
    assert body["error"]["message"] == json.loads(bytes(theirs.body))["error"]["message"]
    assert body["type"] == "error"


def test_kinds_follow_the_status() -> None:
    kinds = [error_object(status, "")["error"]["type"] for status in (400, 401, 404, 422, 429, 500, 503, 504)]
    assert kinds == [
        "invalid_request_error", "authentication_error", "not_found_error", "invalid_request_error", "rate_limit_error", "api_error",
        "overloaded_error", "timeout_error",
    ]  # fmt: skip
