"""Requests of a load over the Responses websocket of `npucompile serve`. A token counts when it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake
from websockets.typing import Subprotocol

from ....graphs.errors import ProtocolError, RequestError
from ....server.client import MAX_EVENT_BYTES, Client, raise_if_refused
from ....server.requests.frames import JSON
from .outcome import ServerWord
from .workload import WorkloadPrompt

Arrived = Callable[[Sequence[int]], None]
"""Called with the tokens that have just arrived."""

STREAMS_PER_SOCKET = 32


@dataclass(frozen=True)
class SocketTarget:
    """Where and how to send.

    Attributes:
        base_url: http://HOST:PORT.
        model: its name in requests.
        ignore_eos: ask for generation past the end of text.
        api_key: sent as bearer token; None sends none.
        extra: further fields of every request, which win over ours.
    """

    base_url: str
    model: str
    ignore_eos: bool
    api_key: str | None
    extra: Mapping[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class Websocket:
    """Sends requests; up to STREAMS_PER_SOCKET share a socket. `async with` closes all connections."""

    def __init__(self, target: SocketTarget) -> None:
        self.target = target
        self._live: dict[Client, int] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._live:
            await client.close()

    async def send(self, prompt: WorkloadPrompt, arrived: Arrived) -> ServerWord:
        """Sends one request and reads its answer to the end.

        Raises:
            NpucompileError: the server refused or failed it, or the connection did.
        """
        client = await self._client()
        usage: dict[str, Any] = {}
        try:
            options = {"max_output_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": self.target.ignore_eos}
            given = list(prompt.token_ids) if prompt.text is None else prompt.text
            async for event in client.create(given, **options | dict(self.target.extra)):
                kind = raise_if_refused(event)["type"]
                # The last delta may carry text without tokens, which the server held back until then.
                if kind == "response.output_text.delta" and event["token_ids"]:
                    arrived(event["token_ids"])
                elif kind == "response.cancelled":
                    raise RequestError("the server cancelled the response", code="cancelled")
                elif "response" in event:
                    usage = event["response"].get("usage") or {}
        finally:
            self._live[client] -= 1
        return told(usage)

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


def told(usage: Mapping[str, Any]) -> ServerWord:
    """The usage object of a response, with our execution record where it has one."""
    record = usage.get("npucompile") or {}
    details = usage.get("input_tokens_details") or {}
    counts = ServerWord(
        prompt_tokens=usage.get("input_tokens"),
        output_tokens=usage.get("output_tokens"),
        cached_tokens=details.get("cached_tokens"),
    )
    if "verify_steps" not in record:
        return counts
    return replace(
        counts,
        queue_ms=record["queue_ms"],
        first_token_ms=record["first_token_ms"],
        verify_steps=record["verify_steps"],
        accepted_tokens=sum(record["accepted_per_position"]),
    )
