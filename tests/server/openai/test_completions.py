"""server/openai/completions.py: completions as openai-python sees them."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.parsing import pieces_of
from support.scripted import MODEL, scripted
from support.texts import byte_codec

from npucompile.runtime.request import Logprobs, TokenEvent
from npucompile.server.engine.output_stream import OutputStream
from npucompile.server.openai.completions import CompletionChoice
from npucompile.server.openai.request_models import CompletionRequest


@pytest.fixture(scope="module")
def served():
    with scripted() as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine


def test_a_prompt_is_continued(client):
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=2)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model, answer.created) == ("text_completion", "tiny", 1700000000)
    assert answer.system_fingerprint == f"fp_{MODEL.artifact[:16]}"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "ab", "length", None)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.prompt_tokens_details.cached_tokens == 1
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 4)


def test_what_a_request_leaves_out_is_openais_default(client, served):
    answer = client.completions.create(model="small", prompt="a" * 20)
    request = served[1].requests[-1]
    assert (answer.usage.completion_tokens, answer.model) == (16, "tiny")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k, request.sampling.seed) == (1.0, 1.0, 0, None)


def test_what_a_request_says_reaches_the_engine(client, served):
    extra = {"top_k": 5, "min_p": 0.25, "stop_token_ids": [7], "ignore_eos": True, "speculative_tokens": 0}
    client.completions.create(model="tiny", prompt="ab", temperature=0.5, top_p=0.75, seed=9, max_tokens=1, extra_body=extra)
    request = served[1].requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k, request.sampling.min_p) == (0.5, 0.75, 5, 0.25)
    assert (request.sampling.seed, request.stop_token_ids, request.speculative_tokens, request.max_tokens) == (9, {7}, 0, 1)
    client.completions.create(model="tiny", prompt="ab", extra_body={"top_k": -1})
    assert served[1].requests[-1].sampling.top_k == 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_several_choices_each(client, stream):
    prompts = ["one", "two, longer", "3"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    texts = dict.fromkeys(range(6), "")
    for chunk in answer if stream else [answer]:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {2 * i + j: prompt for i, prompt in enumerate(prompts) for j in range(2)}
    assert (usage.prompt_tokens, usage.completion_tokens) == (15, 30)


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_is_the_answer_in_pieces(client, echo):
    options = {"model": "tiny", "prompt": "äbc", "max_tokens": 3, "echo": echo}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text == "äbc" * echo + "äb"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.usage for chunk in client.completions.create(**options, stream=True)} == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_lists_beside_the_tokens(client, stream):
    answer = client.completions.create(model="tiny", prompt="ab", max_tokens=2, logprobs=2, stream=stream)
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in answer if stream else [answer]:
        for name, entries in found.items():
            entries += getattr(chunk.choices[0].logprobs, name)
    likely = {byte_codec().token_text(0).text: -0.5, byte_codec().token_text(1).text: -1.5}
    assert found == {"tokens": ["a", "b"], "token_logprobs": [0.0, -1.0], "top_logprobs": [likely, likely], "text_offset": [0, 1]}


@given(text=st.text("aé語🙂 ", max_size=8), echo=st.booleans(), data=st.data())
def test_offsets_are_those_of_the_text_whichever_tokens_come_together(text, echo, data):
    """A character of several tokens begins where it begins, for each of them."""
    tokenizer, prompt = byte_codec(), byte_codec().encode("aé")
    ids = tokenizer.encode(text)

    def scored(ids):
        return tuple(Logprobs(-1.0, ()) for _ in ids)

    body = CompletionRequest(prompt="a", logprobs=0, echo=echo)
    choice, stream = CompletionChoice(0, prompt, body, tokenizer), OutputStream(tokenizer.detokenizer())
    offsets, first = [], scored(prompt[1:])
    for piece in data.draw(pieces_of(ids)):
        delta = stream.push(TokenEvent("a", piece, scored(piece), first)) if piece else None
        if delta is not None:
            first, chunk = (), choice.chunk(delta, None)
            offsets += chunk["logprobs"]["text_offset"]
    whole = choice.whole()
    shown = "aé" * echo + text if ids else ""
    assert whole["text"] == shown
    assert offsets == [place for place, char in enumerate(shown) for _ in char.encode()]
    assert not ids or whole["logprobs"]["text_offset"] == offsets


def test_stops_end_the_text(client, served):
    assert client.completions.create(model="tiny", prompt="abcdef", stop=["cd", "x"]).choices[0].to_dict() == {
        "index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    ids = byte_codec().encode("abcdef")
    choice = client.completions.create(model="tiny", prompt="abcdef", extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "stop")


def test_token_ids_come_when_asked_for(client):
    choice = client.completions.create(model="tiny", prompt="abc", max_tokens=2, extra_body={"return_token_ids": True}).choices[0]
    assert choice.prompt_token_ids == list(byte_codec().encode("abc"))
    assert choice.token_ids == list(byte_codec().encode("ab"))


@pytest.mark.parametrize(
    ("options", "param", "code", "words"),
    [
        ({"prompt": "a", "model": "gpt"}, "model", "model_not_found", "'gpt'; served here is 'tiny' or 'small'"),
        ({"prompt": ""}, "prompt", "empty_prompt", "at least 1"),
        ({"prompt": []}, "prompt", "empty_prompt", "at least 1"),
        ({"prompt": [[1], [256]]}, "prompt", "token_out_of_range", "256"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_field", "legal is a string, a list of token ids"),
        ({"prompt": ["a"] * 1025}, "prompt", "invalid_field", "at most 1024 prompts"),
        ({"prompt": "a", "max_tokens": 4096}, "max_tokens", "context_length_exceeded", "at most 4096"),
        ({"prompt": "a" * 4096}, "prompt", "context_length_exceeded", "4096"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_value", "legal is 1, absent"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_value", "forwards"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "invalid_request_error", "0 to 5"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "invalid_field", "at least 0"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "invalid_request_error", "stream: true"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, options, param, code, words):
    status = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
    with pytest.raises(status) as caught:
        client.completions.create(**{"model": "tiny", **options})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
    assert words in caught.value.message
