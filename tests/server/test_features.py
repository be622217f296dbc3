"""Features in pairs: what a request gives does not depend on what serves it, or on what happens beside it.

Each test is one request with a value of every factor, such that every pair of values occurs somewhere. What it gives has to be what the
same request gives alone: without drafts, from a cold cache, undisturbed and read to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import pytest
from allpairspy import AllPairs
from support import bundled

from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.client import Client, raise_if_refused
from npucompile.tools.serve.serving import RunningService

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was upon the "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Judah", "Levi"]}, "sons": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "sons"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOKENS = 24
DELTA = "response.output_text.delta"
FACTORS: Mapping[str, list[str]] = OrderedDict(
    door=["websocket", "completions", "chat"],
    drafts=["none", "all"],
    sampling=["greedy", "seeded", "min_p"],
    form=["free", "schema", "regex", "allowed", "call"],
    penalty=["none", "presence", "repetition", "bias", "least"],
    logprobs=["none", "two"],
    prefix=["cold", "warm"],
    beside=["nobody", "many", "cancelled"],
    prompt=["short", "chunked"],
    n=["one", "three"],
    stop=["none", "string"],
    end=["whole", "stream", "cancelled", "resumed"],
)
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "min_p": {"temperature": 1.2, "seed": 12, "min_p": 0.05},
}
PENALTY: Mapping[str, dict[str, Any]] = {
    "none": {},
    "presence": {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {"40": 3.0, "41": -100.0}},
    "least": {"min_tokens": 3},
}
FORM: Mapping[str, dict[str, Any]] = {
    "free": {},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "regex": {"structured_outputs": {"regex": "(And|Then) [a-z ]{12,40}\\."}},
    "allowed": {"allowed_token_ids": list(range(40, 400))},
    "call": {"tools": [{"type": "function", "function": {"name": "tribe", "parameters": SCHEMA}}], "tool_choice": "required"},
}


def legal(values: list[str]) -> bool:
    """Whether the values so far can be of one request: calls are of chats and of one completion, and only a socket's stream is resumed."""
    case = dict(zip(FACTORS, values, strict=False))
    call = case.get("form") != "call" or (case.get("n", "one") == "one" and case["door"] == "chat")
    return call and (case.get("end") != "resumed" or case["door"] == "websocket")


class Case(OrderedDict[str, str]):
    """A value of every factor."""

    @property
    def alone(self) -> Case:
        """The same request with nothing that may not matter."""
        return Case(self | {"drafts": "none", "prefix": "cold", "beside": "nobody", "end": "whole"})


@dataclass(frozen=True)
class Choice:
    """One completion."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[float, ...]


def cases() -> list[Case]:
    """So many that every pair of values occurs."""
    return [Case(zip(FACTORS, values, strict=True)) for values in AllPairs(FACTORS, filter_func=legal)]


class Server:
    """A server of the bundled model with pages for two long requests, and what each request gives alone."""

    def __init__(self, url: str, running: RunningService, tokenizer: Any) -> None:
        self.url, self.running, self.tokenizer = url, running, tokenizer
        self.salts = count()
        self.alone: dict[Case, tuple[Choice, ...]] = {}

    def expected(self, case: Case) -> tuple[Choice, ...]:
        """What the request gives alone."""
        key = tuple(case.alone.items())
        if key not in self.alone:
            self.alone[key] = asyncio.run(self.ask(case.alone))
        return self.alone[key]

    async def ask(self, case: Case) -> tuple[Choice, ...]:
        """What the request gives, with what is to happen before it and beside it."""
        salt = f"salt {next(self.salts)}"
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as http:
            if case["prefix"] == "warm":
                await self._send(http, Case(case.alone | {"n": "one", "stop": "none", "form": "free"}), salt)
            async with contextlib.AsyncExitStack() as stack:
                if case["beside"] != "nobody":
                    await stack.enter_async_context(self._noise(case["beside"] == "cancelled"))
                return await self._send(http, case, salt)

    @contextlib.asynccontextmanager
    async def _noise(self, cancelled: bool) -> Any:
        """Requests that take all pages, so that some are preempted; or that are cancelled in the middle."""
        async with await Client.connect(self.url.replace("http", "ws") + "/v1/responses") as client:
            streams = [client.create([9 + i] * 20, max_output_tokens=90, ignore_eos=True, temperature=1.0, seed=i) for i in range(4)]
            for stream in streams:
                await stream.start()
            await anext(streams[0])
            if cancelled:
                await asyncio.gather(*(stream.cancel() for stream in streams))
            yield
            for stream in streams:
                await stream.cancel()

    async def _send(self, http: httpx.AsyncClient, case: Case, salt: str) -> tuple[Choice, ...]:
        body = {**SAMPLING[case["sampling"]], **PENALTY[case["penalty"]], **FORM[case["form"]], "cache_salt": salt, "ignore_eos": True}
        body |= {"top_p": 1.0, "top_k": 0, "n": 3 if case["n"] == "three" else 1} | ({"min_p": 0.0} | SAMPLING[case["sampling"]])
        body |= {"stop": ["th"]} if case["stop"] == "string" else {}
        body |= {"speculative_tokens": 0} if case["drafts"] == "none" else {}
        text = TEXT if case["prompt"] == "chunked" else TEXT[:12]
        if case["door"] == "websocket":
            return await self._websocket(body, case, text)
        chat = case["door"] == "chat"
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if case["logprobs"] == "two":
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body |= {"max_tokens": TOKENS, "return_token_ids": True}
        if case["end"] == "whole":
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return tuple(_choice([choice], chat) for choice in answer.json()["choices"])
        parts: dict[int, list[Any]] = {}
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": ()}
                assert "error" not in event, event["error"]["message"]
                for choice in event["choices"]:
                    parts.setdefault(choice["index"], []).append(choice)
                if case["end"] == "cancelled" and sum(map(len, parts.values())) > 3:
                    break
        return tuple(_choice(parts[index], chat) for index in sorted(parts))

    async def _websocket(self, body: dict[str, Any], case: Case, text: str) -> tuple[Choice, ...]:
        own = {"max_output_tokens": TOKENS, "top_logprobs": 2 if case["logprobs"] == "two" else None}
        socket = self.url.replace("http", "ws") + "/v1/responses"
        events: list[dict[str, Any]] = []
        async with await Client.connect(socket) as client:
            stream = client.create(list(self.tokenizer.encode(text)), **body, **own, resumable=case["end"] == "resumed")
            async for event in stream:
                events.append(raise_if_refused(event))
                if case["end"] in ("cancelled", "resumed") and sum(event["type"] == DELTA for event in events) > 3:
                    client._websocket.transport.abort()
                    break
        if case["end"] == "resumed" and events[-1]["type"] == DELTA:
            async with await Client.connect(socket) as client:
                response_id, last = events[0]["response"]["id"], events[-1]["sequence_number"]
                events += [raise_if_refused(event) async for event in client.resume(response_id, starting_after=last)]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [event for event in events if event["type"] == DELTA]
        items = events[-1]["response"]["output"] if events[-1]["type"] != DELTA else []
        return tuple(
            Choice(
                tuple(token for event in deltas if event["output_index"] == index for token in event["token_ids"]),
                "".join(event["delta"] for event in deltas if event["output_index"] == index),
                ("length" if items[index]["status"] == "incomplete" else "stop") if items else "",
                tuple(entry["logprob"] for event in deltas if event["output_index"] == index for entry in event.get("logprobs", ())),
            )
            for index in sorted({event["output_index"] for event in deltas})
        )


def _said(message: Mapping[str, Any]) -> str:
    """The content of a message, or what it calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(call.get("name") or "" for call in calls) + "".join(call["arguments"] for call in calls)


def _choice(parts: list[Any], chat: bool) -> Choice:
    """A completion of its parts: one whole, or those of a stream."""
    texts = [_said(part.get("message") or part["delta"]) if chat else part["text"] for part in parts]
    tokens = [token for part in parts for token in part.get("token_ids") or ()]
    reason = next((part["finish_reason"] for part in parts if part.get("finish_reason")), "")
    logprobs: list[float] = []
    for part in parts:
        if part.get("logprobs"):
            own = part["logprobs"]
            logprobs += [entry["logprob"] for entry in own["content"]] if chat else own["token_logprobs"]
    return Choice(tuple(tokens), "".join(texts), reason, tuple(logprobs))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sizes = {"buckets": (1, 4), "prefill": (32,), "max_model_len": 160, "max_logprobs": 2, "max_num_seqs": 6, "max_total_tokens": 384}
    out = tmp_path_factory.mktemp("features") / "tiny"
    with bundled.served(out, tool_call_parser="hermes", prefix_cache=PrefixCacheSettings(), **sizes) as (url, running):
        yield Server(url, running, running.service.tokenizer)


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(case.values()))
def test_a_request_gives_what_it_gives_alone(server, case):
    expected, actual = server.expected(case), asyncio.run(server.ask(case))
    if case["end"] == "cancelled":
        for right, found in zip(expected, actual, strict=False):
            assert found.tokens == right.tokens[: len(found.tokens)]
            assert right.text.startswith(found.text)
        return
    assert [(c.tokens, c.text, c.reason) for c in actual] == [(c.tokens, c.text, c.reason) for c in expected]
    for right, found in zip(expected, actual, strict=True):
        assert found.logprobs == pytest.approx(right.logprobs, abs=1e-3)
        assert len(found.logprobs) == (len(found.tokens) if case["logprobs"] == "two" else 0)


def test_everything_happened(server):
    """After the others: drafts were accepted, prefixes found, requests preempted, and nothing is held."""
    stats = server.running.engine.stats()
    assert min(stats[f"{name}_total"] for name in ("preemptions", "spec_decode_num_accepted_tokens", "prefix_cache_hits")) > 0
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
