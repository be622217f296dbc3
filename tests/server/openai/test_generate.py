"""server/openai/generate.py: SGLang's native API, with the payload of its benchmark."""

from __future__ import annotations

import json

import httpx
import pytest
from support.scripted import scripted
from support.texts import byte_codec


@pytest.fixture(scope="module")
def served():
    with scripted() as (url, engine), httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield client, engine


def benchmark(prompt, tokens, **more):
    """What sglang.bench_serving sends."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    payload = {"sampling_params": params, "stream": True, "lora_path": None, "return_logprob": False, "logprob_start_len": -1}
    return {("text" if isinstance(prompt, str) else "input_ids"): prompt, **payload, **more}


def events(client, payload):
    """What its reader does with the lines: drop blank ones and the prefix."""
    with client.stream("POST", "/generate", json=payload) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.strip()]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("prompt", ["äbc", list(byte_codec().encode("äbc"))], ids=["text", "ids"])
def test_the_benchmark_reads_cumulative_text_and_counts(served, prompt):
    client, engine = served
    found = events(client, benchmark(prompt, 4))
    # The end may come with the last token, or after it.
    assert [entry["text"] for entry in found] in (["ä", "äb", "äbc"], ["ä", "äb", "äbc", "äbc"])
    assert [entry["meta_info"]["completion_tokens"] for entry in found][:3] == [2, 3, 4]
    assert found[-1]["output_ids"] == list(byte_codec().encode("äbc"))
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert (found[-1]["meta_info"]["prompt_tokens"], found[-1]["meta_info"]["cached_tokens"]) == (4, 1)
    assert engine.requests[-1].sampling.temperature == 0.0


def test_one_answer_or_a_list(served):
    client, _ = served
    one = client.post("/generate", json={"text": "ab", "rid": "mine"}).json()
    assert (one["text"], one["meta_info"]["id"], one["meta_info"]["finish_reason"]) == ("ab", "mine", {"type": "stop", "matched": None})
    for payload in ({"text": ["ab", "c"]}, {"input_ids": [list(byte_codec().encode(text)) for text in ("ab", "c")]}):
        assert [entry["text"] for entry in client.post("/generate", json=payload).json()] == ["ab", "c"]
    several = client.post("/generate", json={"text": "ab", "sampling_params": {"n": 2}}).json()
    assert [entry["text"] for entry in several] == ["ab", "ab"]
    found = events(client, {"text": ["ab", "cd"], "stream": True})
    assert {entry["index"]: entry["text"] for entry in found} == {0: "ab", 1: "cd"}


def test_log_probabilities_are_triples(served):
    payload = {"text": "ab", "return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = served[0].post("/generate", json=payload).json()["meta_info"]
    a, b = byte_codec().encode("ab")
    assert meta["output_token_logprobs"] == [[0.0, a, "a"], [-1.0, b, "b"]]
    assert [[entry[:2] for entry in top] for top in meta["output_top_logprobs"]] == [[[-0.5, 0]], [[-0.5, 0]]]
    assert meta["input_token_logprobs"] == []


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [1]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"regex": "x", "ebnf": "y"}}, "ebnf"),
        ({"text": "a", "sampling_params": {"min_new_tokens": -1}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"tempratur": 1}}, "tempratur"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 6}, "top_logprobs_num"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served, payload, param):
    answer = served[0].post("/generate", json=payload)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
