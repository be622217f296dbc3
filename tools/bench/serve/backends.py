"""How a request is sent to a server, and what its answer says: one class per API.

A token counts when it arrives. Where a server says how many tokens a part of its answer holds, that is their number; where it does not,
as OpenAI's API, a part with text counts as one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake
from websockets.typing import Subprotocol

from ....graphs.errors import NpucompileError, ProtocolError, RequestError
from ....server.client import MAX_EVENT_BYTES, Client, raise_if_refused
from ....server.socket.frames import JSON
from .outcome import Told
from .workload import Prompt

Arrived = Callable[[int], None]
"""Called with the number of tokens that have just arrived."""

STREAMS_PER_SOCKET = 32
MESSAGE_CHARS = 200


@dataclass(frozen=True)
class Target:
    """Where and how to send.

    Attributes:
        base_url: http://HOST:PORT.
        model: its name in requests.
        ignore_eos: ask for generation past the end of text.
        api_key: sent as bearer token; None sends none.
        extra: further fields of every request, which win over ours.
        decode: text of token ids, for APIs that take only text.
    """

    base_url: str
    model: str
    ignore_eos: bool
    api_key: str | None
    extra: Mapping[str, Any]
    decode: Callable[[tuple[int, ...]], str]

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def text(self, prompt: Prompt) -> str:
        """The prompt as text."""
        return self.decode(prompt.token_ids) if prompt.text is None else prompt.text


class Backend(ABC):
    """Sends requests; `async with` opens and closes its connections."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @abstractmethod
    async def send(self, prompt: Prompt, arrived: Arrived) -> Told:
        """Sends one request and reads its answer to the end.

        Raises:
            NpucompileError: the server refused or failed it.
            httpx2.HTTPError: the connection did.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Closes all connections."""


class Websocket(Backend):
    """The Responses websocket of `npucompile serve`; up to STREAMS_PER_SOCKET requests share a socket."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._live: dict[Client, int] = {}

    async def send(self, prompt: Prompt, arrived: Arrived) -> Told:
        client = await self._client()
        usage: dict[str, Any] = {}
        try:
            options = {"max_output_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": self.target.ignore_eos}
            given = list(prompt.token_ids) if prompt.text is None else prompt.text
            async for event in client.create(given, **options | dict(self.target.extra)):
                kind = raise_if_refused(event)["type"]
                # The last delta may carry text without tokens, which the server held back until then.
                if kind == "response.output_text.delta" and event["token_ids"]:
                    arrived(len(event["token_ids"]))
                elif kind == "response.cancelled":
                    raise RequestError("the server cancelled the response", code="cancelled")
                elif "response" in event:
                    usage = event["response"].get("usage") or {}
        finally:
            self._live[client] -= 1
        return told(usage)

    async def close(self) -> None:
        for client in self._live:
            await client.close()

    async def _client(self) -> Client:
        free = next((client for client, live in self._live.items() if live < STREAMS_PER_SOCKET), None)
        if free is None:
            free = await self._connect()
            self._live[free] = 0
        self._live[free] += 1
        return free

    async def _connect(self) -> Client:
        url = "ws" + self.target.base_url.removeprefix("http") + "/v1/responses"
        try:
            socket = await connect(
                url,
                subprotocols=[Subprotocol(JSON)],
                additional_headers=self.target.headers,
                compression=None,
                max_size=MAX_EVENT_BYTES,
                proxy=None,
            )
        except (OSError, InvalidHandshake) as error:
            raise ProtocolError(f"cannot connect to {url}: {error}", code="connection_failed") from error
        return Client(socket, JSON)


class Streaming(Backend):
    """An HTTP API that answers with server-sent events."""

    path: str

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # No limit of time: a benchmark measures how long it takes.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=target.base_url, headers=target.headers, timeout=None, limits=limits, trust_env=False)

    @abstractmethod
    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request."""

    @abstractmethod
    def read(self, chunk: Mapping[str, Any], before: int) -> tuple[int, Told | None]:
        """How many tokens an event brings, and what it says of the request.

        Args:
            before: tokens that arrived before it.
        """

    async def send(self, prompt: Prompt, arrived: Arrived) -> Told:
        said, count, ended = Told(), 0, False
        body = self.body(prompt) | {"stream": True} | dict(self.target.extra)
        async with self._http.sse(self.path, method="POST", json=body) as source:
            if source.response.status_code != 200:
                text = (await source.response.aread()).decode(errors="replace")
                raise RequestError(f"HTTP {source.response.status_code}: {_message(text)}")
            async for event in source:
                if event.data == "[DONE]":
                    ended = True
                    continue
                chunk = json.loads(event.data)
                if "error" in chunk:
                    raise RequestError(_message(event.data))
                tokens, more = self.read(chunk, count)
                if tokens > 0:
                    arrived(tokens)
                    count += tokens
                said = more or said
        if not ended:
            raise NpucompileError("the server's events ended without [DONE]")
        return said

    async def close(self) -> None:
        await self._http.aclose()


class Completions(Streaming):
    """OpenAI's `/v1/completions`; prompts are token ids."""

    path = "/v1/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        return _openai(self.target) | {
            "prompt": list(prompt.token_ids) if prompt.text is None else prompt.text,
            "max_tokens": prompt.output_tokens,
        }

    def read(self, chunk: Mapping[str, Any], before: int) -> tuple[int, Told | None]:
        return _openai_chunk(chunk, before, [choice.get("text") for choice in chunk.get("choices") or ()])


class Chat(Streaming):
    """OpenAI's `/v1/chat/completions`; prompts are text, one user message."""

    path = "/v1/chat/completions"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        return _openai(self.target) | {
            "messages": [{"role": "user", "content": self.target.text(prompt)}],
            "max_completion_tokens": prompt.output_tokens,
        }

    def read(self, chunk: Mapping[str, Any], before: int) -> tuple[int, Told | None]:
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
        return _openai_chunk(
            chunk, before, [delta.get(name) for delta in deltas for name in ("content", "reasoning_content", "tool_calls")]
        )


class Generate(Streaming):
    """SGLang's `/generate`; prompts are token ids, and every event counts the tokens so far."""

    path = "/generate"

    def body(self, prompt: Prompt) -> dict[str, Any]:
        given = {"input_ids": list(prompt.token_ids)} if prompt.text is None else {"text": prompt.text}
        sampling = {"temperature": 0.0, "max_new_tokens": prompt.output_tokens, "ignore_eos": self.target.ignore_eos}
        return {**given, "sampling_params": sampling}

    def read(self, chunk: Mapping[str, Any], before: int) -> tuple[int, Told | None]:
        meta = chunk.get("meta_info") or {}
        total, verified = meta.get("completion_tokens"), meta.get("spec_verify_ct")
        said = Told(
            prompt_tokens=meta.get("prompt_tokens"),
            output_tokens=total,
            cached_tokens=meta.get("cached_tokens"),
            verify_steps=verified,
            # Each verification yields a token beside the drafts that it accepts; the first token comes from prefill.
            accepted_tokens=max(total - 1 - verified, 0) if verified and total else None,
        )
        return (int(bool(chunk.get("text"))) if total is None else total - before), said


BACKENDS: Mapping[str, type[Backend]] = {
    "npucompile-ws": Websocket,
    "openai": Completions,
    "openai-chat": Chat,
    "sglang": Generate,
}


def told(usage: Mapping[str, Any]) -> Told:
    """A usage object, of OpenAI's completions, chat or responses API, with our execution record where it has one."""
    record = usage.get("npucompile") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    said = Told(
        prompt_tokens=usage.get("prompt_tokens", usage.get("input_tokens")),
        output_tokens=usage.get("completion_tokens", usage.get("output_tokens")),
        cached_tokens=details.get("cached_tokens"),
    )
    if "verify_steps" not in record:
        return said
    return replace(
        said,
        queue_ms=record["queue_ms"],
        first_token_ms=record["first_token_ms"],
        verify_steps=record["verify_steps"],
        accepted_tokens=sum(record["accepted_per_position"]),
    )


def _openai(target: Target) -> dict[str, Any]:
    body: dict[str, Any] = {"model": target.model, "temperature": 0.0, "stream_options": {"include_usage": True}}
    # Not of OpenAI's API: servers that do not know the field may refuse it, so it is sent only where it says something.
    return body | ({"ignore_eos": True} if target.ignore_eos else {})


def _openai_chunk(chunk: Mapping[str, Any], before: int, parts: list[Any]) -> tuple[int, Told | None]:
    """A chunk with usage counts its tokens (servers may send it with every one); any other is one token if it has any content."""
    usage, content = chunk.get("usage"), any(parts)
    said = told(usage) if usage else None
    if content and said is not None and said.output_tokens is not None:
        return said.output_tokens - before, said
    return int(content), said


def _message(text: str) -> str:
    """The message of an error body in OpenAI's format, or the beginning of anything else."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        found = error.get("message", text) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        found = text
    return str(found)[:MESSAGE_CHARS]
