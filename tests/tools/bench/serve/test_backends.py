"""tools/bench/serve/backends.py: each API against a server that speaks its published format, and ours against our own server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.sse_server import CACHED, SseServer

from npucompile.graphs.errors import NpucompileError
from npucompile.tools.bench.serve.backends import BACKENDS, Target, told
from npucompile.tools.bench.serve.drive import drive
from npucompile.tools.bench.serve.outcome import Told
from npucompile.tools.bench.serve.workload import Prompt

PROMPT = Prompt((104, 105, 33), 5)
HTTP = ["openai", "openai-chat", "sglang"]


@pytest.fixture(scope="module")
def stub() -> Iterator[SseServer]:
    with SseServer().serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _healthy(stub: SseServer) -> Iterator[None]:
    stub.received.clear()
    yield
    stub.fault = ""


def target(url: str, **changes: Any) -> Target:
    plain = Target(url, "stub", True, None, {}, lambda ids: "".join(map(chr, ids)))
    return replace(plain, **changes)


def ask(name: str, where: Target, prompt: Prompt = PROMPT) -> tuple[Told, list[int]]:
    """What a server says, and the numbers of tokens that arrived."""
    arrived: list[int] = []

    async def run() -> Told:
        async with BACKENDS[name](where) as backend:
            return await backend.send(prompt, arrived.append)

    return asyncio.run(run()), arrived


def test_completions(stub: SseServer) -> None:
    said, arrived = ask("openai", target(stub.url))
    # The chunk with the finish reason has no text, the one with the usage no choice; neither is a token.
    assert arrived == [1] * 5
    assert said == Told(prompt_tokens=3, output_tokens=5, cached_tokens=CACHED)
    (_, body), *_ = stub.received
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ([104, 105, 33], 5, True, True)


def test_chat(stub: SseServer) -> None:
    said, arrived = ask("openai-chat", target(stub.url, ignore_eos=False))
    # The role comes first without text; reasoning counts.
    assert arrived == [1] * 5
    assert said.output_tokens == 5
    (_, body), *_ = stub.received
    assert body["messages"] == [{"role": "user", "content": "hi!"}]
    assert "ignore_eos" not in body
    ask("openai-chat", target(stub.url), Prompt((1,), 2, text="as it was"))
    assert stub.received[-1][1]["messages"][0]["content"] == "as it was"


def test_generate(stub: SseServer) -> None:
    said, arrived = ask("sglang", target(stub.url))
    assert arrived == [1, 2, 2]
    # 5 tokens: one of prefill, and two verifications with a token beside each accepted draft.
    assert said == Told(prompt_tokens=3, output_tokens=5, cached_tokens=CACHED, verify_steps=2, accepted_tokens=2)
    (_, body), *_ = stub.received
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    assert body == {"input_ids": [104, 105, 33], "stream": True, "sampling_params": sampling}


@pytest.mark.parametrize("name", HTTP)
def test_keys_and_further_fields_are_sent(stub: SseServer, name: str) -> None:
    ask(name, target(stub.url, api_key="secret", extra={"temperature": 0.5, "user": "me"}))
    headers, body = stub.received[-1]
    assert headers["authorization"] == "Bearer secret"
    assert (body["temperature"], body["user"]) == (0.5, "me")


@pytest.mark.parametrize("name", HTTP)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "HTTP 400: it is too long"),
        ("page", "HTTP 502: <html>bad gateway</html>"),
        ("event", "the engine died"),
        ("cut", r"ended without \[DONE\]"),
    ],
)
def test_a_failure_says_what_the_server_said(stub: SseServer, name: str, fault: str, message: str) -> None:
    stub.fault = fault
    with pytest.raises(NpucompileError, match=message):
        ask(name, target(stub.url))


def test_any_failure_is_an_outcome_and_the_others_go_on(stub: SseServer) -> None:
    async def run(url: str) -> list[str | None]:
        async with BACKENDS["openai"](target(url)) as backend:
            return [outcome.error for outcome in await drive(backend, [PROMPT] * 2, (0.0, 0.0))]

    stub.fault = "garbage"
    assert all("Expecting property name" in (error or "") for error in asyncio.run(run(stub.url)))
    assert all("connect" in (error or "").lower() for error in asyncio.run(run("http://127.0.0.1:9")))


def test_our_own_record_is_read() -> None:
    record = {"queue_ms": 1.5, "first_token_ms": 2.5, "verify_steps": 4, "accepted_per_position": [3, 1]}
    usage = {"input_tokens": 7, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 6}, "npucompile": record}
    assert told(usage) == Told(7, 9, 6, 1.5, 2.5, 4, 4)
    assert told({**usage, "npucompile": {"completions": [record]}}) == Told(7, 9, 6)
    assert told({}) == Told()


def test_a_websocket_that_is_not_there_is_an_error() -> None:
    with pytest.raises(NpucompileError, match=r"cannot connect to ws://127\.0\.0\.1:9/v1/responses"):
        ask("npucompile-ws", target("http://127.0.0.1:9"))
