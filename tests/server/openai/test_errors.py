"""server/openai/errors.py: what went wrong, as the answer to a request."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import ProtocolError, RequestError
from npucompile.server.openai.errors import EngineFailure, error_response


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("m", param="p"), 400, "invalid_request_error", "invalid_request_error"),
        (ProtocolError("m", code="x"), 400, "invalid_request_error", "x"),
        (RequestError("m", code="model_not_found"), 404, "invalid_request_error", "model_not_found"),
        (RequestError("m", code="body_too_large"), 413, "invalid_request_error", "body_too_large"),
        (RequestError("m", code="not_ready"), 503, "server_error", "not_ready"),
        (EngineFailure("m"), 500, "server_error", "internal_error"),
    ],
)
def test_an_error_has_a_status_and_an_object(error, status, kind, code):
    answer = error_response(error)
    body = json.loads(answer.body)["error"]
    assert (answer.status_code, body["type"], body["code"], body["param"]) == (status, kind, code, getattr(error, "param", None))


def test_the_servers_own_fault_is_logged_and_told_without_detail(caplog):
    answer = error_response(ValueError("a secret"))
    assert answer.status_code == 500
    assert b"secret" not in answer.body
    assert "secret" in caplog.text
