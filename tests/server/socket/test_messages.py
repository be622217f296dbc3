"""server/socket/messages.py: which messages are accepted, which are refused and by what name, and that no other exception escapes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ProtocolError
from npucompile.server.requests.create_body import ResponseCreate
from npucompile.server.requests.fields import FieldError
from npucompile.server.requests.frames import JSON, SUBPROTOCOLS, decode, encode
from npucompile.server.response.events import error_event
from npucompile.server.socket.messages import ResponseCancel, ResponseResume, parse

LIMIT = 2**20
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)


def test_resume_starts_behind_an_event_or_before_the_first():
    assert parse({"type": "response.resume", "response_id": "r"}) == ResponseResume(response_id="r")
    assert parse({"type": "response.resume", "response_id": "r", "stream_id": "s", "starting_after": 7}) == ResponseResume(
        response_id="r", stream_id="s", starting_after=7
    )


def create(**fields):
    return parse({"type": "response.create", **fields})


BODY = {"input": "hi", "stream_id": "s", "top_k": 3}


@pytest.mark.parametrize(
    "fields",
    [BODY, {"response": BODY}, {"response": {"input": "hi", "top_k": 3}, "stream_id": "s"}, {"response": BODY, "stream_id": "s"}],
)
def test_flat_and_nested_bodies_are_the_same(fields):
    assert create(**fields) == create(**BODY)


def test_cancel_names_a_response_or_a_stream():
    assert parse({"type": "response.cancel", "response_id": "r"}) == ResponseCancel(response_id="r")
    assert parse({"type": "response.cancel", "stream_id": "s", "response_id": None}) == ResponseCancel(stream_id="s")


# --- refused: (message, code, param, what the text must name) ---

CREATE = {"type": "response.create", "input": "x"}
REFUSED = [
    ({}, "missing_type", None, ["response.create", "response.cancel"]),
    ({"type": None}, "missing_type", None, ["response.create"]),
    ({"type": 3}, "unknown_type", None, ["3", "response.create"]),
    ({"type": "response.other"}, "unknown_type", None, ["'response.other'", "response.cancel"]),
    ({"type": "response.steer"}, "invalid_field", "previous_response_id", ["response.steer names no response"]),
    ({"type": "response.resume"}, "invalid_field", "response_id", ["response.resume names no response"]),
    ({"type": "response.resume", "response_id": "r", "starting_after": -2}, "invalid_field", "starting_after", ["-2", "at least -1"]),
    ({"type": "response.create", "response": {"input": "x", "best_of": 2}}, "unknown_field", "best_of", ["'best_of'", "stop"]),
    ({"type": "response.create", "response": {"input": "x"}, "top_k": 2}, "unknown_field", "top_k", ["'top_k'", "'stream_id'"]),
    ({"type": "response.create", "response": "x"}, "invalid_field", "response", ["'x'", "object"]),
    ({"type": "response.create", "response": BODY, "stream_id": "t"}, "invalid_field", "stream_id", ["'t'", "'s'"]),
    ({"type": "response.cancel"}, "invalid_field", "response_id", ["stream_id"]),
    ({"type": "response.cancel", "response_id": 4}, "invalid_field", "response_id", ["4"]),
    ({"type": "response.cancel", "id": "r"}, "unknown_field", "id", ["'id'", "response_id"]),
]


@pytest.mark.parametrize(("message", "code", "param", "names"), REFUSED, ids=[json.dumps(case[0])[:70] for case in REFUSED])
def test_a_refusal_names_the_thing_and_the_legal_values(message, code, param, names):
    with pytest.raises((ProtocolError, FieldError)) as caught:
        parse(message)
    assert (caught.value.code, getattr(caught.value, "param", None)) == (code, param)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("message", "stream_id"),
    [
        (CREATE | {"stream_id": "a", "top_k": -2}, "a"),
        ({"type": "response.create", "response": {"stream_id": "b", "top_k": -2}}, "b"),
        (CREATE | {"stream_id": "c", "response": 1}, "c"),
        (CREATE | {"stream_id": 7, "top_k": -2}, None),
        (CREATE | {"top_k": -2}, None),
    ],
)
def test_a_refusal_carries_the_stream_it_is_about(message, stream_id):
    with pytest.raises(FieldError) as caught:
        parse(message)
    assert caught.value.stream_id == stream_id


# --- fuzz: a frame is an event or a ProtocolError ---

FIELDS = [
    "type", "response", "input", "input_token_ids", "model", "stream_id", "max_output_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "ignore_eos", "stream", "background", "previous_response_id", "response_id", "role", "content", "text", "x",
    "include", "top_logprobs", "n", "speculative_tokens", "cache_salt", "skip_reading_prefix_cache",
]  # fmt: skip
WORDS = st.sampled_from(["response.create", "response.cancel", "user", "input_text", "message", "", "a"]) | st.text(max_size=5)
NEAR = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=20,
)
NEAR_MESSAGES = st.builds(
    lambda kind, body: {"type": kind, **{name: value for name, value in body.items() if name != "type"}},
    st.sampled_from(["response.create", "response.cancel", "response.resume", "response.steer", "other"]),
    st.dictionaries(st.sampled_from(FIELDS), NEAR, max_size=6),
)


def read(frame, subprotocol):
    """The event, or the answer to what is none; both must be fit to be used and sent."""
    try:
        return parse(decode(frame, subprotocol, LIMIT))
    except (ProtocolError, FieldError) as error:
        return json.loads(encode(error_event(error), JSON).encode())


@given(st.binary(max_size=200) | st.text(max_size=200), st.sampled_from(SUBPROTOCOLS))
def test_any_frame_is_an_event_or_a_protocol_error(frame, subprotocol):
    assert read(frame, subprotocol)["error"]["message"]


@given(NEAR_MESSAGES, st.sampled_from(SUBPROTOCOLS))
def test_any_message_is_an_event_or_a_protocol_error(message, subprotocol):
    event = read(encode(message, subprotocol), subprotocol)
    if isinstance(event, ResponseCreate):
        assert event.prompt_chars >= 0
        assert event.after(event.items).items == event.items * 2


@given(NEAR_MESSAGES, st.sampled_from(SUBPROTOCOLS), st.data())
def test_any_damaged_message_is_an_event_or_a_protocol_error(message, subprotocol, data):
    frame = encode(message, subprotocol)
    raw = bytearray(frame if isinstance(frame, bytes) else frame.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(raw), subprotocol)
