"""server/requests/create_body.py: which bodies are accepted, and which are refused and by what name."""

from __future__ import annotations

import json

import pytest

from npucompile.graphs.errors import ProtocolError
from npucompile.runtime.request import Sampling
from npucompile.server.requests.bounds import MAX_COMPLETIONS, MAX_SEED, MAX_TOP_LOGPROBS
from npucompile.server.requests.create_body import LOGPROBS, ChatMessage, Conversation, ResponseCreate
from npucompile.server.requests.fields import FieldError
from npucompile.server.socket.messages import parse


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
    assert event == ResponseCreate("hello", "tiny", "a", 7, sampling, ("x", "yz"), True, 20, 8, 3, store=False, **salted)


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


def test_a_conversation_goes_on_behind_what_is_kept_of_it():
    kept = create(input=[{"role": "user", "content": "a"}]).items
    for body in (create(input="b", previous_response_id="r"), create(input=[{"role": "user", "content": "b"}], previous_response_id="r")):
        assert body.after(kept).prompt == Conversation((ChatMessage("user", "a"), ChatMessage("user", "b")))
    assert create(previous_response_id="r").after(kept).prompt == Conversation(kept)
    assert create(generate=False, instructions="be brief").prompt == Conversation((), "be brief")


def test_one_stop_string_need_not_be_a_list():
    assert create(input="a", stop="end").stop == create(input="a", stop=["end"]).stop == ("end",)


def test_instructions_come_before_the_input():
    conversation = Conversation((ChatMessage("user", "ab"),), "be brief")
    assert [message["role"] for message in conversation.messages()] == ["system", "user"]
    made = create(input="ab", instructions="be brief", metadata={"k": "v"})
    assert (made.prompt, made.instructions, made.metadata) == (conversation, "be brief", {"k": "v"})
    assert create(input=[{"role": "user", "content": "ab"}], instructions="be brief").prompt == conversation


def test_a_turn_may_hold_an_output_item_of_the_turn_before():
    part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert create(input=[{"role": "user", "content": "a"}, item]).prompt.items[1] == ChatMessage("assistant", "b")


@pytest.mark.parametrize(
    ("body", "chars"),
    [({"input": "abc"}, 3), ({"input_token_ids": [1, 2]}, 0), ({"input": [{"role": "user", "content": "ab"}] * 2}, 4)],
)
def test_the_length_of_a_prompt_is_known_before_it_is_tokenized(body, chars):
    assert create(**body).prompt_chars == chars


# --- refused: (message, code, param, what the text must name) ---

CREATE = {"type": "response.create", "input": "x"}
REFUSED = [
    (CREATE | {"temprature": 1}, "unknown_field", "temprature", ["'temprature'", "'temperature'"]),
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
    (CREATE | {"input": [{"type": "web_search_call"}]}, "invalid_field", "input[0].type", ["'reasoning'", "'message'"]),
    ({"type": "response.create", "input_token_ids": "12"}, "invalid_field", "input_token_ids", ["'12'", "integers"]),
    ({"type": "response.create", "input_token_ids": [1, True]}, "invalid_field", "input_token_ids", ["True"]),
    ({"type": "response.create", "input_token_ids": [1.0]}, "invalid_field", "input_token_ids", ["1.0"]),
    (CREATE | {"stream": False}, "invalid_field", "stream", ["False", "true"]),
    (CREATE | {"stream": 1}, "invalid_field", "stream", ["1", "true"]),
    (CREATE | {"instructions": ""}, "invalid_field", "instructions", ["not empty"]),
    ({"type": "response.create", "input_token_ids": [1], "instructions": "a"}, "invalid_field", "instructions", ["input_token_ids"]),
    (CREATE | {"metadata": {"a": 1}}, "invalid_field", "metadata", ["16 strings"]),
    (CREATE | {"metadata": {"a": "x" * 513}}, "invalid_field", "metadata", ["512"]),
    (CREATE | {"background": True}, "invalid_field", "background", ["websocket", "resumable"]),
    (CREATE | {"store": 1}, "invalid_field", "store", ["1", "true or false"]),
    (CREATE | {"previous_response_id": ""}, "invalid_field", "previous_response_id", ["not empty"]),
    (CREATE | {"generate": False, "n": 2}, "invalid_field", "n", ["generate is false"]),
    (
        {"type": "response.create", "input_token_ids": [1], "previous_response_id": "r"},
        "invalid_field",
        "previous_response_id",
        ["with input"],
    ),
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
    (CREATE | {"include": ["file_search_call.results"]}, "invalid_field", "include", ["'file_search_call.results'", LOGPROBS]),
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
]


@pytest.mark.parametrize(("message", "code", "param", "names"), REFUSED, ids=[json.dumps(case[0])[:70] for case in REFUSED])
def test_a_refusal_names_the_thing_and_the_legal_values(message, code, param, names):
    with pytest.raises(ProtocolError) as caught:
        parse(message)
    assert caught.value.code == code
    assert (caught.value.param if isinstance(caught.value, FieldError) else None) == param
    for name in names:
        assert name in str(caught.value)
