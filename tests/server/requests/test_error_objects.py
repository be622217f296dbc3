"""server/requests/error_objects.py: every exception as an OpenAI error object of bounded size."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ProtocolError, RequestError
from npucompile.server.requests.error_objects import REFUSALS, STATUS_BY_CODE, Refusal, error_reply
from npucompile.server.requests.fields import FieldError


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x", param="top_k"), 400, "invalid_request_error"),
        (ProtocolError("x", code="invalid_json"), 400, "invalid_request_error"),
        (FieldError("x", param="stop", stream_id="a"), 400, "invalid_request_error"),
        (RequestError("x", code="invalid_api_key"), 401, "authentication_error"),
        (RequestError("x", code="origin_not_allowed"), 403, "permission_error"),
        (RequestError("x", code="model_not_found"), 404, "invalid_request_error"),
        (RequestError("x", code="too_many_requests"), 429, "rate_limit_error"),
        (RequestError("x", code="queue_full"), 503, "server_error"),
        (RequestError("x", code="engine_stopped"), 503, "server_error"),
        (KeyError("a secret"), 500, "server_error"),
    ],
)
def test_status_and_type(error, status, kind):
    reply = error_reply(error)
    assert (reply.status, reply.as_object()["type"]) == (status, kind)
    assert set(reply.as_object()) == {"type", "code", "message", "param"}
    assert "a secret" not in reply.message
    assert reply.param == getattr(error, "param", None)
    assert reply.stream_id == getattr(error, "stream_id", None)
    assert ("Retry-After" in reply.headers()) == (status in (429, 503))
    assert ("WWW-Authenticate" in reply.headers()) == (status == 401)


@given(st.text(min_size=1), st.integers(1, 10**6), st.sampled_from(sorted(STATUS_BY_CODE)))
def test_whatever_is_quoted_is_cut(text, times, code):
    long = text * times
    shown = error_reply(RequestError(long, param=long, code=code)).as_object()
    assert all(value is None or len(value) < 1100 for value in shown.values())


SERVER = Path(__file__).resolve().parents[3] / "server"


def raised() -> list[tuple[str, set[str]]]:
    """Of each place that raises a Refusal the name of its sentence, and the names of the values."""
    calls = [
        node
        for file in SERVER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    refusals = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Refusal"]
    others = {"param", "stream_id"}
    return [(ast.literal_eval(call.args[0]), {str(keyword.arg) for keyword in call.keywords} - others) for call in refusals]


def test_each_refusal_has_one_sentence_that_tells_its_values():
    fields = {name: {field for _, field, _, _ in string.Formatter().parse(text) if field} for name, text in REFUSALS.items()}
    assert {name for name, _ in raised()} == set(fields)
    assert all(values == fields[name] for name, values in raised())
    refusal = Refusal("queue_full.tokens", param="n", held=7, most=5)
    assert (refusal.code, refusal.param, refusal.values) == ("queue_full", "n", {"held": 7, "most": 5})
    assert str(refusal) == "7 prompt tokens wait or run, and 5 may; come back later"
