"""server/openai/errors.py: what went wrong, as the answer to a request."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.openai.errors import EngineFailure, EngineTimeout, error_response


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("m", code="body_too_large"), 413, "body_too_large"),
        (EngineFailure("m"), 500, "internal_error"),
        (EngineTimeout("m"), 504, "timeout"),
    ],
)
def test_an_error_has_a_status_and_an_object(error, status, code):
    answer = error_response(error)
    assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (status, code)
