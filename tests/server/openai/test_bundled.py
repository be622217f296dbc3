"""The bundled model behind the HTTP API: the same tokens as over the websocket, and what the README shows."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from support import bundled
from support.grammars import BUNDLED, TOKENIZER
from tokenizers import Tokenizer

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.client import Client
from npucompile.server.engine.service import Service
from npucompile.server.run import serving
from npucompile.server.text.tokenizer import TextTokenizer

README = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8")
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    sizes = {"buckets": (1, 4), "prefill": (32,), "max_model_len": 128, "max_logprobs": 2}
    out = tmp_path_factory.mktemp("bundled") / "tiny"
    with bundled.served(out, tool_call_parser="hermes", **sizes) as (url, service):
        yield f"{url}/v1", service


@pytest.fixture(scope="module")
def running(served):
    """The engine and its service."""
    return served[1]


@pytest.fixture(scope="module")
def url(served):
    """URL of the HTTP API."""
    return served[0]


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="module")
def marked(running):
    """A client of the same engine behind a tokenizer in which marks are tokens that are not special, as in Qwen3's; and their ids."""
    stored = json.loads((BUNDLED / "tokenizer.json").read_text())
    numbers = {mark: len(stored["model"]["vocab"]) - len(MARKS) + place for place, mark in enumerate(MARKS)}
    stored["model"]["vocab"] = {text: number for text, number in stored["model"]["vocab"].items() if number not in numbers.values()}
    stored["model"]["merges"] = stored["model"]["merges"][: -len(MARKS)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    stored["added_tokens"] = [*({"id": number, "content": mark} | plain for mark, number in numbers.items()), *stored["added_tokens"]]
    codec = TextTokenizer(Tokenizer.from_str(json.dumps(stored)))
    form = ChatFormat.of(ChatTemplate("{{ messages[-1].content }}{% if enable_thinking %}<think>\n{% endif %}"), "qwen3", "hermes")
    with serving(Service(running.engine, codec, running.service.model, chat=form)) as address:
        base_url = address.replace("ws://", "http://").removesuffix("/responses")
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield client, numbers


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_every_way_to_ask_gives_the_tokens_of_the_websocket(url, client, options):
    prompt, tokens = "And God said", 12

    async def over_websocket():
        async with await Client.connect(url.replace("http", "ws") + "/responses") as socket:
            return await socket.create(prompt, max_output_tokens=tokens, **options).completion()

    expected = asyncio.run(over_websocket())
    extra = {"extra_body": {"return_token_ids": True}}
    messages = [{"role": "user", "content": prompt}]
    completion = client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, **options, **extra)
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=tokens, **options, **extra)
    assert (completion.choices[0].text, tuple(completion.choices[0].token_ids)) == (expected.text, expected.token_ids)
    assert (chat.choices[0].message.content, tuple(chat.choices[0].token_ids)) == (expected.text, expected.token_ids)
    chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    own = {name: value for name, value in options.items() if name != "seed"}
    response = client.responses.create(
        model="tiny", input=prompt, max_output_tokens=tokens, extra_body={"seed": options.get("seed")}, **own
    )
    assert response.output_text == expected.text
    assert completion.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    assert completion.system_fingerprint.startswith("fp_")


SCHEMA = {
    "type": "object",
    "properties": {"tribe": {"enum": ["Judah", "Levi"]}, "sons": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["tribe", "sons"],
    "additionalProperties": False,
}


def test_outputs_have_the_form_that_is_asked_for(url, client):
    """As the four APIs ask for it; drafts are verified under the grammar."""
    messages = [{"role": "user", "content": "The tribe and its sons: "}]
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for seed in (1, 2):
        chat = client.chat.completions.create(model="tiny", messages=messages, response_format=named, seed=seed, max_tokens=60)
        response = client.responses.create(
            model="tiny", input=messages, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, max_output_tokens=60
        )
        for text in (chat.choices[0].message.content, response.output_text):
            found = json.loads(text)
            assert found["tribe"] in ("Judah", "Levi")
            assert 0 <= found["sons"] <= 99
    extra = {"structured_outputs": {"choice": ["Amos", "Hosea"]}}
    answer = client.completions.create(model="tiny", prompt="The prophet", n=2, max_tokens=20, extra_body=extra)
    assert {choice.text for choice in answer.choices} <= {"Amos", "Hosea"}
    params = {"regex": "[0-9]{3}", "max_new_tokens": 20}
    native = httpx.post(f"{url.removesuffix('/v1')}/generate", json={"text": "And", "sampling_params": params}).json()
    assert re.fullmatch("[0-9]{3}", native["text"])
    with pytest.raises(openai.BadRequestError, match="no legal regex") as caught:
        client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs.regex"


def test_every_api_restricts_what_is_sampled(url, client):
    """The free output ends where a text says, or would: under a minimum, allowed tokens or bad words it differs."""
    greedy = {"model": "tiny", "temperature": 0.0}
    free = client.completions.create(prompt="And God said", max_tokens=8, extra_body={"return_token_ids": True}, **greedy).choices[0]
    stop, others = free.token_ids[1], sorted(set(range(300, 400)) - set(free.token_ids))
    word = free.text.split()[1].strip(",.;:")
    for extra, shown in (
        ({"stop_token_ids": [stop]}, lambda text, ids: ids == free.token_ids[:1]),
        ({"stop_token_ids": [stop], "min_tokens": 8}, lambda text, ids: len(ids) == 8 and stop not in ids),
        ({"allowed_token_ids": others}, lambda text, ids: len(ids) == 8 and set(ids) <= set(others)),
        ({"bad_words": [word]}, lambda text, ids: len(ids) == 8 and word not in text.split()),
    ):
        completion = client.completions.create(
            prompt="And God said", max_tokens=8, extra_body={**extra, "return_token_ids": True}, **greedy
        )
        assert shown(completion.choices[0].text, completion.choices[0].token_ids)
        if "stop_token_ids" not in extra:
            response = client.responses.create(input="And God said", max_output_tokens=8, extra_body={**extra}, **greedy)
            assert response.output_text == completion.choices[0].text
    params = {"stop_token_ids": [stop], "min_new_tokens": 8, "max_new_tokens": 8, "temperature": 0}
    native = httpx.post(f"{url.removesuffix('/v1')}/generate", json={"text": "And God said", "sampling_params": params}).json()
    assert len(native["output_ids"]) == 8
    refused = httpx.post(f"{url.removesuffix('/v1')}/generate", json={"text": "a", "sampling_params": params | {"min_new_tokens": 9}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_new_tokens")


TRIBE = {"type": "function", "function": {"name": "tribe", "parameters": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "tribe"}}
IDS = {"return_token_ids": True}


def test_marks_that_are_tokens_but_not_special_are_written_as_such(marked):
    """Calls that have to be and calls that the model begins with its own token; an end of reasoning before a form. With drafts."""
    client, numbers = marked
    options = {"model": "tiny", "messages": [{"role": "user", "content": "The tribe:"}], "temperature": 0, "max_tokens": 80}
    for use in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"logit_bias": {numbers["<tool_call>"]: 100}}):
        said = client.chat.completions.create(tools=[TRIBE], parallel_tool_calls=False, **use, **options, extra_body=IDS).choices[0]
        (call,) = said.message.tool_calls
        assert json.loads(call.function.arguments)["tribe"] in ("Judah", "Levi")
        assert {numbers["<tool_call>"], numbers["</tool_call>"]} <= set(said.token_ids)
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    thinking = {**IDS, "chat_template_kwargs": {"enable_thinking": True}}
    bias = {numbers["</think>"]: 100}
    said = client.chat.completions.create(response_format=named, logit_bias=bias, **options, extra_body=thinking).choices[0]
    assert said.token_ids[0] == numbers["</think>"]
    assert (json.loads(said.message.content)["tribe"] in ("Judah", "Levi"), said.finish_reason) == (True, "stop")


class Tribe(pydantic.BaseModel):
    """What the SDK makes of an answer."""

    tribe: Literal["Judah", "Levi"]
    tall: bool


def test_the_sdk_parses_answers_of_a_model_that_likes_blanks(client):
    """Blanks have the largest bias; without a bound they would fill the context."""
    bias = {number: 100 for text in (" ", "\n", "\t", "  ") if len(numbers := TOKENIZER.encode(text).ids) == 1 for number in numbers}
    options = {"model": "tiny", "messages": [{"role": "user", "content": "The tribe:"}], "temperature": 0, "max_tokens": 80}
    parsed = client.chat.completions.parse(response_format=Tribe, logit_bias=bias, **options).choices[0].message.parsed
    assert isinstance(parsed, Tribe)
    tool = openai.pydantic_function_tool(Tribe)
    (call,) = (
        client.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, logit_bias=bias, **options)
        .choices[0]
        .message.tool_calls
    )
    assert isinstance(call.function.parsed_arguments, Tribe)


def test_the_readmes_curl_line_runs(url):
    (line,) = re.findall(r"^    (curl .*/v1/chat/completions.*)$", README, re.MULTILINE)
    command = line.replace("http://127.0.0.1:8000/v1", url)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_the_readmes_snippet_runs(url, capsys):
    (snippet,) = re.findall(r"^    from openai import OpenAI\n(?:(?:    .*)?\n)+", README, re.MULTILINE)
    code = "\n".join(line.removeprefix("    ") for line in snippet.splitlines())
    exec(compile(code.replace("http://127.0.0.1:8000/v1", url), "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10
