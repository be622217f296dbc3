"""Requests of a load as HTTP streams of `npucompile serve`: the events of the websocket as server-sent events, on a connection each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import h11

from ....graphs.errors import ProtocolError
from ....server.client import raise_if_refused
from .outcome import ServerWord
from .websocket import Arrived, SocketTarget, told
from .workload import WorkloadPrompt

READ_BYTES = 2**16


class HttpStreams:
    """Sends requests; connections are used again. `async with` closes them all."""

    def __init__(self, target: SocketTarget) -> None:
        self.target = target
        self._place = urlsplit(target.base_url)
        self._idle: list[tuple[h11.Connection, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, _, writer in self._idle:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, _, writer in self._idle), return_exceptions=True)

    async def send(self, prompt: WorkloadPrompt, arrived: Arrived) -> ServerWord:
        """Sends one request and reads its answer to the end.

        Raises:
            NpucompileError: the server refused or failed it, or the connection did.
        """
        given = {"input": prompt.text} if prompt.text is not None else {"input_token_ids": list(prompt.token_ids)}
        options = {"stream": True, "max_output_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": self.target.ignore_eos}
        usage: dict[str, Any] = {}
        async with aclosing(self._events(given | options | dict(self.target.extra))) as events:
            async for event in events:
                if raise_if_refused(event)["type"] == "response.output_text.delta" and event["token_ids"]:
                    arrived(event["token_ids"])
                elif "response" in event:
                    usage = event["response"].get("usage") or {}
        return told(usage)

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        connection, reader, writer = self._idle.pop() if self._idle else await self._connect()
        data, left = json.dumps(body).encode(), b""
        headers = [
            *(("Host", self._place.netloc), ("Content-Type", "application/json"), ("Content-Length", str(len(data)))),
            *self.target.headers.items(),
        ]
        sent = (h11.Request(method="POST", target="/v1/responses", headers=headers), h11.Data(data=data), h11.EndOfMessage())
        try:
            writer.write(b"".join(connection.send(part) or b"" for part in sent))
            while not isinstance(part := connection.next_event(), h11.EndOfMessage):
                match part:
                    case h11.NEED_DATA:
                        connection.receive_data(await reader.read(READ_BYTES))
                    case h11.Response() if part.status_code != 200:
                        raise ProtocolError(f"{self.target.base_url} answers with status {part.status_code}", code="refused")
                    case h11.Data():
                        *frames, left = (left + bytes(part.data)).split(b"\n\n")
                        for frame in frames:
                            yield json.loads(frame.partition(b"data: ")[2])
                    case h11.ConnectionClosed():
                        raise ProtocolError(f"{self.target.base_url} closed the connection of a stream", code="connection_closed")
        except BaseException:
            writer.close()
            raise
        connection.start_next_cycle()
        self._idle.append((connection, reader, writer))

    async def _connect(self) -> tuple[h11.Connection, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._place.hostname, self._place.port)
        return h11.Connection(h11.CLIENT), reader, writer
