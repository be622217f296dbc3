"""server/protocol.py: which frames are accepted, which are refused and by what name, and that no other exception escapes."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ProtocolError
from npucompile.runtime.request import Sampling
from npucompile.server.events import error_event
from npucompile.server.fields import FieldError
from npucompile.server.protocol import (
    JSON,
    LOGPROBS,
    MAX_COMPLETIONS,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    MSGPACK,
    SUBPROTOCOLS,
    ChatMessage,
    Conversation,
    ResponseCancel,
    ResponseCreate,
    choose_subprotocol,
    decode,
    encode,
    parse,
)

LIMIT = 2**20


def create(**fields):
    return parse({"type": "response.create", **fields})


# --- accepted ---


def test_the_least_message_takes_the_defaults():
    assert create(input="hello") == ResponseCreate("hello", None, None, None, Sampling(), (), False, None, 1, None)


def test_every_field_arrives():
    event = create(
        input="hello",
        model="tiny",
        stream_id="a",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=MAX_SEED,
        stop=["x", "yz"],
        ignore_eos=True,
        include=[LOGPROBS],
        top_logprobs=MAX_TOP_LOGPROBS,
        n=MAX_COMPLETIONS,
        speculative_tokens=3,
        cache_salt="ours",
        skip_reading_prefix_cache=True,
        stream=True,
        background=False,
        store=False,
    )
    sampling = Sampling(temperature=0.5, top_k=40, top_p=0.9, min_p=0.05, seed=MAX_SEED)
    salted = {"cache_salt": "ours", "skip_reading_prefix_cache": True}
    assert event == ResponseCreate("hello", "tiny", "a", 7, sampling, ("x", "yz"), True, 20, 8, 3, **salted)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"include": []}, None),
        ({"include": None, "top_logprobs": None}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
        ({"top_logprobs": 0}, 0),
        ({"include": [], "top_logprobs": 0}, 0),
    ],
)
def test_log_probabilities_are_asked_for_in_two_ways(fields, logprobs):
    assert create(input="x", **fields).logprobs == logprobs


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_zero_drafts_is_not_the_same_as_none_said(count):
    assert create(input="x", speculative_tokens=count).speculative_tokens == count
    assert create(input="x").speculative_tokens is None


BODY = {"input": "hi", "stream_id": "s", "top_k": 3}


@pytest.mark.parametrize(
    "fields",
    [BODY, {"response": BODY}, {"response": {"input": "hi", "top_k": 3}, "stream_id": "s"}, {"response": BODY, "stream_id": "s"}],
)
def test_flat_and_nested_bodies_are_the_same(fields):
    assert create(**fields) == create(**BODY)


def test_null_is_absent():
    nulls = dict.fromkeys(["model", "stream_id", "max_output_tokens", "temperature", "seed", "stop", "previous_response_id", "background"])
    nulls |= dict.fromkeys(["n", "include", "top_logprobs", "speculative_tokens"])
    assert create(input="hi", **nulls) == create(input="hi")


def test_three_kinds_of_prompt():
    assert create(input_token_ids=[1, 2, 3]).prompt == (1, 2, 3)
    assert create(input="").prompt == ""
    messages = [
        {"role": "system", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    assert create(input=messages).prompt == Conversation((ChatMessage("system", "be brief"), ChatMessage("user", "ab")))


def test_one_stop_string_need_not_be_a_list():
    assert create(input="a", stop="end").stop == create(input="a", stop=["end"]).stop == ("end",)


def test_cancel_names_a_response_or_a_stream():
    assert parse({"type": "response.cancel", "response_id": "r"}) == ResponseCancel("r", None)
    assert parse({"type": "response.cancel", "stream_id": "s", "response_id": None}) == ResponseCancel(None, "s")


def test_instructions_come_before_the_input():
    conversation = Conversation((ChatMessage("system", "be brief"), ChatMessage("user", "ab")))
    made = create(input="ab", instructions="be brief", metadata={"k": "v"})
    assert (made.prompt, made.instructions, made.metadata) == (conversation, "be brief", {"k": "v"})
    assert create(input=[{"role": "user", "content": "ab"}], instructions="be brief").prompt == conversation


def test_a_turn_may_hold_an_output_item_of_the_turn_before():
    part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert create(input=[{"role": "user", "content": "a"}, item]).prompt.messages[1] == ChatMessage("assistant", "b")


@pytest.mark.parametrize(
    ("body", "chars"),
    [({"input": "abc"}, 3), ({"input_token_ids": [1, 2]}, 0), ({"input": [{"role": "user", "content": "ab"}] * 2}, 4)],
)
def test_the_length_of_a_prompt_is_known_before_it_is_tokenized(body, chars):
    assert create(**body).prompt_chars == chars


# --- refused: (message, code, param, what the text must name) ---

CREATE = {"type": "response.create", "input": "x"}
REFUSED = [
    ({}, "missing_type", None, ["response.create", "response.cancel"]),
    ({"type": None}, "missing_type", None, ["response.create"]),
    ({"type": 3}, "unknown_type", None, ["3", "response.create"]),
    ({"type": "response.steer"}, "unknown_type", None, ["'response.steer'", "response.cancel"]),
    (CREATE | {"temprature": 1}, "unknown_field", "temprature", ["'temprature'", "'temperature'"]),
    ({"type": "response.create", "response": {"input": "x", "best_of": 2}}, "unknown_field", "best_of", ["'best_of'", "'n'"]),
    ({"type": "response.create", "response": {"input": "x"}, "top_k": 2}, "unknown_field", "top_k", ["'top_k'", "'stream_id'"]),
    ({"type": "response.create", "response": "x"}, "invalid_field", "response", ["'x'", "object"]),
    ({"type": "response.create", "response": BODY, "stream_id": "t"}, "invalid_field", "stream_id", ["'t'", "'s'"]),
    ({"type": "response.create"}, "invalid_field", "input", ["no input", "input_token_ids"]),
    (CREATE | {"input_token_ids": [1]}, "invalid_field", "input", ["input and input_token_ids", "exactly one"]),
    (CREATE | {"input": 5}, "invalid_field", "input", ["5", "string"]),
    (CREATE | {"input": [1, 2]}, "invalid_field", "input[0]", ["1", "input_token_ids"]),
    (CREATE | {"input": [{"role": "robot", "content": "x"}]}, "invalid_field", "input[0].role", ["'robot'", "'user'"]),
    (CREATE | {"input": [{"role": ["user"], "content": "x"}]}, "invalid_field", "input[0].role", ["['user']"]),
    (CREATE | {"input": [{"role": "user", "content": 1}]}, "invalid_field", "input[0].content", ["1"]),
    (CREATE | {"input": [{"role": "user"}]}, "invalid_field", "input[0].content", ["None"]),
    (CREATE | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid_field", "input[0].content[0]", ["input_image"]),
    (CREATE | {"input": [{"role": "user", "content": "x", "name": 1}]}, "unknown_field", "name", ["input[0]", "'role'"]),
    (CREATE | {"input": [{"type": "reasoning"}]}, "invalid_field", "input[0].type", ["'reasoning'", "'message'"]),
    ({"type": "response.create", "input_token_ids": "12"}, "invalid_field", "input_token_ids", ["'12'", "integers"]),
    ({"type": "response.create", "input_token_ids": [1, True]}, "invalid_field", "input_token_ids", ["True"]),
    ({"type": "response.create", "input_token_ids": [1.0]}, "invalid_field", "input_token_ids", ["1.0"]),
    (CREATE | {"stream": False}, "invalid_field", "stream", ["False", "true"]),
    (CREATE | {"stream": 1}, "invalid_field", "stream", ["1", "true"]),
    (CREATE | {"instructions": ""}, "invalid_field", "instructions", ["not empty"]),
    ({"type": "response.create", "input_token_ids": [1], "instructions": "a"}, "invalid_field", "instructions", ["input_token_ids"]),
    (CREATE | {"metadata": {"a": 1}}, "invalid_field", "metadata", ["16 strings"]),
    (CREATE | {"metadata": {"a": "x" * 513}}, "invalid_field", "metadata", ["512"]),
    (CREATE | {"background": True}, "invalid_field", "background", ["True", "false"]),
    (CREATE | {"store": True}, "invalid_field", "store", ["True", "false"]),
    (CREATE | {"previous_response_id": "resp_1"}, "invalid_field", "previous_response_id", ["not supported", "whole input"]),
    (CREATE | {"stream_id": ""}, "invalid_field", "stream_id", ["''"]),
    (CREATE | {"stream_id": 1}, "invalid_field", "stream_id", ["1"]),
    (CREATE | {"stream_id": "s" * 129}, "invalid_field", "stream_id", ["129", "128"]),
    (CREATE | {"model": 1}, "invalid_field", "model", ["1"]),
    (CREATE | {"max_output_tokens": 0}, "invalid_field", "max_output_tokens", ["0", "at least 1"]),
    (CREATE | {"max_output_tokens": 2.0}, "invalid_field", "max_output_tokens", ["2.0"]),
    (CREATE | {"max_output_tokens": True}, "invalid_field", "max_output_tokens", ["True"]),
    (CREATE | {"temperature": -1}, "invalid_field", "temperature", ["-1"]),
    (CREATE | {"temperature": "hot"}, "invalid_field", "temperature", ["'hot'"]),
    (CREATE | {"temperature": float("nan")}, "invalid_field", "temperature", ["nan"]),
    (CREATE | {"temperature": float("inf")}, "invalid_field", "temperature", ["inf"]),
    (CREATE | {"top_p": 0}, "invalid_field", "top_p", ["0"]),
    (CREATE | {"top_p": 1.5}, "invalid_field", "top_p", ["1.5"]),
    (CREATE | {"min_p": 2}, "invalid_field", "min_p", ["2"]),
    (CREATE | {"top_k": 1.5}, "invalid_field", "top_k", ["1.5", "integer"]),
    (CREATE | {"top_k": -1}, "invalid_field", "top_k", ["-1"]),
    (CREATE | {"seed": -1}, "invalid_field", "seed", ["-1", str(MAX_SEED)]),
    (CREATE | {"seed": MAX_SEED + 1}, "invalid_field", "seed", [str(MAX_SEED)]),
    (CREATE | {"stop": ""}, "invalid_field", "stop", ["''"]),
    (CREATE | {"stop": ["a", 1]}, "invalid_field", "stop", ["1"]),
    (CREATE | {"stop": ["a"] * 17}, "invalid_field", "stop", ["16"]),
    (CREATE | {"stop": "a" * 1025}, "invalid_field", "stop", ["1024"]),
    (CREATE | {"stop": {"a": 1}}, "invalid_field", "stop", ["{'a': 1}"]),
    (CREATE | {"ignore_eos": 1}, "invalid_field", "ignore_eos", ["1", "true or false"]),
    (CREATE | {"include": LOGPROBS}, "invalid_field", "include", ["list", LOGPROBS]),
    (CREATE | {"include": ["reasoning.encrypted_content"]}, "invalid_field", "include", ["'reasoning.encrypted_content'", LOGPROBS]),
    (CREATE | {"top_logprobs": 21}, "invalid_field", "top_logprobs", ["21", "from 0 to 20"]),
    (CREATE | {"top_logprobs": -1}, "invalid_field", "top_logprobs", ["-1", "from 0 to 20"]),
    (CREATE | {"top_logprobs": True}, "invalid_field", "top_logprobs", ["True", "integer"]),
    (CREATE | {"logprobs": True}, "unknown_field", "logprobs", ["'logprobs'", "'top_logprobs'"]),
    (CREATE | {"n": 0}, "invalid_field", "n", ["0", "from 1 to 8"]),
    (CREATE | {"n": 9}, "invalid_field", "n", ["9", "from 1 to 8"]),
    (CREATE | {"n": 2.0}, "invalid_field", "n", ["2.0", "integer"]),
    (CREATE | {"n": False}, "invalid_field", "n", ["False", "integer"]),
    (CREATE | {"cache_salt": ""}, "invalid_field", "cache_salt", ["''", "not empty"]),
    (CREATE | {"cache_salt": "x" * 257}, "invalid_field", "cache_salt", ["257 characters", "at most 256"]),
    (CREATE | {"skip_reading_prefix_cache": 1}, "invalid_field", "skip_reading_prefix_cache", ["1", "true or false"]),
    (CREATE | {"speculative_tokens": -1}, "invalid_field", "speculative_tokens", ["-1", "of at least 0"]),
    (CREATE | {"speculative_tokens": 1.5}, "invalid_field", "speculative_tokens", ["1.5", "integer"]),
    (CREATE | {"speculative_tokens": False}, "invalid_field", "speculative_tokens", ["False", "integer"]),
    ({"type": "response.cancel"}, "invalid_field", "response_id", ["stream_id"]),
    ({"type": "response.cancel", "response_id": 4}, "invalid_field", "response_id", ["4"]),
    ({"type": "response.cancel", "id": "r"}, "unknown_field", "id", ["'id'", "'response_id'"]),
]


@pytest.mark.parametrize(("message", "code", "param", "names"), REFUSED, ids=[json.dumps(case[0])[:70] for case in REFUSED])
def test_a_refusal_names_the_thing_and_the_legal_values(message, code, param, names):
    with pytest.raises(ProtocolError) as caught:
        parse(message)
    assert caught.value.code == code
    assert (caught.value.param if isinstance(caught.value, FieldError) else None) == param
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("message", "stream_id"),
    [
        (CREATE | {"stream_id": "a", "top_k": -1}, "a"),
        ({"type": "response.create", "response": {"stream_id": "b", "top_k": -1}}, "b"),
        (CREATE | {"stream_id": "c", "response": 1}, "c"),
        (CREATE | {"stream_id": 7, "top_k": -1}, None),
        (CREATE | {"top_k": -1}, None),
    ],
)
def test_a_refusal_carries_the_stream_it_is_about(message, stream_id):
    with pytest.raises(FieldError) as caught:
        parse(message)
    assert caught.value.stream_id == stream_id


# --- frames ---


@pytest.mark.parametrize(
    ("frame", "subprotocol", "code"),
    [
        (b"\xff\xfe", JSON, "invalid_utf8"),
        ("\ud800", JSON, "invalid_utf8"),
        ('{"input":"\\ud83d"}', JSON, "invalid_utf8"),
        ('{"\\uDC00":1}', JSON, "invalid_utf8"),
        ("{", JSON, "invalid_json"),
        ("", JSON, "invalid_json"),
        ("{} {}", JSON, "invalid_json"),
        ('{"a":NaN}', JSON, "invalid_json"),
        ('{"a":-Infinity}', JSON, "invalid_json"),
        ("[" * 100_000, JSON, "invalid_json"),
        ("1" * 10_000, JSON, "invalid_json"),
        ("[1]", JSON, "not_an_object"),
        ("null", JSON, "not_an_object"),
        (b"", MSGPACK, "invalid_msgpack"),
        (b"\xc1", MSGPACK, "invalid_msgpack"),
        (b"\x80\x80", MSGPACK, "invalid_msgpack"),
        (b"\x81\xa1", MSGPACK, "invalid_msgpack"),
        (b"\xa2\xff\xff", MSGPACK, "invalid_msgpack"),
        (b"\x91" * 100_000, MSGPACK, "invalid_msgpack"),
        (msgpack.packb([1]), MSGPACK, "not_an_object"),
        (msgpack.packb({b"type": 1}), MSGPACK, "not_an_object"),
        ("{}", MSGPACK, "wrong_frame_kind"),
        ("x" * (LIMIT + 1), JSON, "frame_too_large"),
        ("ü" * (LIMIT // 2 + 1), JSON, "frame_too_large"),
        (b"x" * (LIMIT + 1), MSGPACK, "frame_too_large"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_frame_is_named(frame, subprotocol, code):
    with pytest.raises(ProtocolError) as caught:
        decode(frame, subprotocol, LIMIT)
    assert caught.value.code == code
    assert len(str(caught.value)) < 400


def test_the_largest_legal_frame_is_read():
    frame = json.dumps({"input": ""})
    frame = json.dumps({"input": "x" * (LIMIT - len(frame))})
    assert len(frame) == LIMIT
    assert decode(frame, JSON, LIMIT)["input"].startswith("xxx")


def test_json_is_read_from_binary_frames_too_and_whole_surrogate_pairs_are_text():
    assert decode(b'{"a":"\xc3\xbc"}', JSON, LIMIT) == {"a": "ü"}
    assert decode('{"a":"\\ud83d\\ude42"}', JSON, LIMIT) == {"a": "🙂"}


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
KEYS = st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6)


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from(SUBPROTOCOLS))
def test_what_is_encoded_is_decoded(event, subprotocol):
    frame = encode(event, subprotocol)
    assert isinstance(frame, bytes if subprotocol == MSGPACK else str)
    assert decode(frame, subprotocol, LIMIT) == event


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [([], None), ([JSON], JSON), ([MSGPACK], MSGPACK), (["other", MSGPACK, JSON], MSGPACK)],
)
def test_the_first_offered_subprotocol_that_is_spoken_is_taken(offered, chosen):
    assert choose_subprotocol(offered) == chosen


def test_only_foreign_subprotocols_are_refused():
    with pytest.raises(ProtocolError, match=r"\['graphql-ws'\] are not spoken here; legal are .*npucompile\.json.*npucompile\.msgpack"):
        choose_subprotocol(["graphql-ws"])


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
    st.sampled_from(["response.create", "response.cancel", "other"]),
    st.dictionaries(st.sampled_from(FIELDS), NEAR, max_size=6),
)


def read(frame, subprotocol):
    """The event, or the answer to what is none; both must be fit to be used and sent."""
    try:
        return parse(decode(frame, subprotocol, LIMIT))
    except ProtocolError as error:
        return json.loads(encode(error_event(error), JSON).encode())


@given(st.binary(max_size=200) | st.text(max_size=200), st.sampled_from(SUBPROTOCOLS))
def test_any_frame_is_an_event_or_a_protocol_error(frame, subprotocol):
    assert read(frame, subprotocol)["error"]["message"]


@given(NEAR_MESSAGES, st.sampled_from(SUBPROTOCOLS))
def test_any_message_is_an_event_or_a_protocol_error(message, subprotocol):
    event = read(encode(message, subprotocol), subprotocol)
    if isinstance(event, ResponseCreate):
        hash(event)


@given(NEAR_MESSAGES, st.sampled_from(SUBPROTOCOLS), st.data())
def test_any_damaged_message_is_an_event_or_a_protocol_error(message, subprotocol, data):
    frame = encode(message, subprotocol)
    raw = bytearray(frame if isinstance(frame, bytes) else frame.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(raw), subprotocol)
