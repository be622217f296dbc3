"""server/anthropic/messages.py: a real client of Anthropic's API, over a model that acts by what it reads."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from support.published_pictures import encoded, picture
from support.scripted import MODEL, ScriptedEngine, scripted
from support.shown import reader, showing
from support.strict_template import STRICT, call
from support.texts import byte_codec

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.service import Service
from npucompile.server.guard.access import Access
from npucompile.server.run import Serving, running

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USER: Any = [{"role": "user", "content": "How is it in Rome?"}]


def says(prompt: str) -> str:
    """Asks for the weather once it may; else repeats what it was asked."""
    asked = prompt.rpartition("<user>")[2].partition("\n")[0]
    if "<tool>" in prompt:
        return "I know.\n</think>\n\nIt is " + prompt.rpartition("<tool>")[2].partition("\n")[0]
    if "[weather]" in prompt:
        return "I ask.\n</think>\n\nLet me see.\n\n" + call("weather", city="Rome")
    return "Hm.\n</think>\n\n" + asked


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    chat = ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")
    with scripted(says, chat=chat, model=dataclasses.replace(MODEL, eos_token_ids=frozenset({255}))) as (url, engine):
        yield url.removesuffix("/v1"), engine


@contextlib.contextmanager
def client_of(url: str, **options: Any) -> Iterator[anthropic.Anthropic]:
    """A client of the server at a URL, which closes its connections."""
    base = url.replace("ws:", "http:").removesuffix("/responses").removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, max_retries=0, **(options or {"api_key": "none"})) as client:
        yield client


@pytest.fixture
def client(server: tuple[str, Any]) -> Iterator[anthropic.Anthropic]:
    with client_of(server[0]) as one:
        yield one


def ask(client: anthropic.Anthropic, streams: bool, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 400, "messages": USER, **options}
    if not streams:
        return client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streams", [False, True])
def test_thinking_and_text_are_blocks_of_their_own_and_usage_says_what_was_cached(client: anthropic.Anthropic, streams: bool) -> None:
    message = ask(client, streams, system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}])
    assert [(block.type, getattr(block, block.type)) for block in message.content] == [
        ("thinking", "Hm."),
        ("text", "How is it in Rome?"),
    ]
    assert (message.role, message.stop_reason, message.stop_sequence, message.model) == ("assistant", "end_turn", None, "tiny")
    assert message.usage.cache_read_input_tokens == 1
    prompt = "<system>Be short.\n<user>How is it in Rome?\n<assistant><think>\n"
    assert message.usage.input_tokens == len(prompt) - 1
    assert message.usage.output_tokens > len("How is it in Rome?")


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_is_made_and_its_result_answers(client: anthropic.Anthropic, streams: bool) -> None:
    first = ask(client, streams, tools=[WEATHER])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    used = first.content[-1]
    assert (used.name, used.input, first.stop_reason) == ("weather", {"city": "Rome"}, "tool_use")
    # As clients send it back: every block of the answer, thinking included, then the result.
    turns = [
        *USER,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "sunny"}]}]},
    ]
    second = ask(client, streams, messages=turns, tools=[WEATHER])
    assert second.content[-1].text == "It is sunny"
    assert second.stop_reason == "end_turn"


def test_a_stream_has_their_events_in_their_order(server: tuple[str, Any]) -> None:
    body = {"model": "tiny", "max_tokens": 400, "messages": USER, "tools": [WEATHER], "stream": True}
    lines = httpx.post(f"{server[0]}/v1/messages", json=body).text.split("\n\n")[:-1]
    events = [(line.split("\n")[0].removeprefix("event: "), json.loads(line.split("\n")[1].removeprefix("data: "))) for line in lines]
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    opened = [data["index"] for name, data in events if name == "content_block_start"]
    assert opened == [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    partial = "".join(data["delta"].get("partial_json", "") for name, data in events if name == "content_block_delta")
    assert json.loads(partial) == {"city": "Rome"}
    # No block before its start, and none within another.
    depth = 0
    for name, _ in events:
        depth += {"content_block_start": 1, "content_block_stop": -1}.get(name, 0)
        assert depth == (1 if name in ("content_block_start", "content_block_delta") else 0)


@pytest.mark.parametrize("streams", [False, True])
def test_why_it_stopped_is_said(client: anthropic.Anthropic, streams: bool) -> None:
    stopped = ask(client, streams, stop_sequences=["zzz", "Rom"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[-1].text) == ("stop_sequence", "Rom", "How is it in ")
    assert ask(client, streams, max_tokens=3).stop_reason == "max_tokens"


def test_thinking_is_asked_for_or_not_and_choices_are_kept(client: anthropic.Anthropic, server: tuple[str, Any]) -> None:
    engine = server[1]

    def prompt(**options: Any) -> str:
        ask(client, False, **options)
        return byte_codec().decode(engine.requests[-1].prompt, skip_special=False)

    assert "</think>" in prompt(thinking={"type": "disabled"})
    assert "</think>" not in prompt(thinking={"type": "enabled", "budget_tokens": 1024})
    assert "[weather]" in prompt(tools=[WEATHER])
    assert "[weather]" not in prompt(tools=[WEATHER], tool_choice={"type": "none"})
    ask(client, False, metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=USER, tools=[WEATHER], system="Be short.")
    answered = ask(client, False, tools=[WEATHER], system="Be short.")
    assert counted.input_tokens == answered.usage.input_tokens + answered.usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "served"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens is 0"),
        ({"extra_body": {"seed": 1}}, anthropic.BadRequestError, "has no field 'seed'"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}]}, anthropic.BadRequestError,
         r"messages\[0\].content\[0\].type is not one of a message of 'user'"),
        ({"tools": [{"input_schema": {}}]}, anthropic.BadRequestError, r"tools\[0\].name is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png",
          "data": "iVBORw0KGgo="}}]}]}, anthropic.BadRequestError, "text alone|takes no"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_their_form(client: anthropic.Anthropic, options: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        ask(client, False, **options)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_what_a_provider_would_run_is_left_out_and_named(client: anthropic.Anthropic) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    message = ask(client, False, tools=[search])
    assert "web_search_20250305" in json.dumps(message.model_extra["warnings"])
    assert message.stop_reason == "end_turn"


def test_a_key_may_come_in_their_header() -> None:
    chat = ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")
    with contextlib.closing(ScriptedEngine(says)) as engine:
        service = Service(engine, byte_codec(), MODEL, chat=chat)  # type: ignore[arg-type]
        with running(service, settings=Serving(access=Access.of(("secret",)))) as server:
            with client_of(server.url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
                ask(client, False)
            for options in ({"api_key": "secret"}, {"auth_token": "secret"}):
                with client_of(server.url, **options) as client:
                    assert ask(client, False).stop_reason


def test_a_picture_is_that_of_a_chat() -> None:
    data = encoded(picture(50, 70, 3, "RGB"))
    with reader() as taken, showing(taken=taken) as (url, engine), client_of(url) as client:
        source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        turns: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "x"}]}]
        assert client.messages.create(model="tiny", max_tokens=9, messages=turns).content
        (shown,) = engine.requests[-1].pictures
        form = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{source['data']}"}}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": [form, {"type": "text", "text": "x"}]}]}
        prompt = engine.requests[-1].prompt
        httpx.post(f"{url}/chat/completions", json=chat).raise_for_status()
        (as_chat,) = engine.requests[-1].pictures
        assert (shown.patches == as_chat.patches).all()
        assert prompt == engine.requests[-1].prompt
        counted = client.messages.count_tokens(model="tiny", messages=turns)
        assert counted.input_tokens == len(engine.requests[-1].prompt)


@pytest.mark.parametrize("streams", [False, True])
def test_what_was_aborted_is_an_error_and_no_whole_answer(streams: bool) -> None:
    chat = ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")
    with scripted(lambda prompt: "Hm.\n</think>\n\nYes…", chat=chat) as (url, engine), client_of(url) as client:

        def abort() -> None:
            assert engine.wait_submitted()
            httpx.post(f"{url.removesuffix('/v1')}/abort_request", json={"abort_all": True})

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(anthropic.APIStatusError, match="the request was aborted"):
            ask(client, streams)
        thread.join()


def test_a_body_that_is_no_json_is_refused_in_their_form(server: tuple[str, Any]) -> None:
    for path in ("messages", "messages/count_tokens"):
        response = httpx.post(f"{server[0]}/v1/{path}", content=b"{", headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert response.json()["type"] == "error"
