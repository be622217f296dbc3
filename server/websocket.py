"""The websocket endpoint: reads frames into commands, writes the events of responses.

Policy, per socket:

- One task reads, one writes; a queue of at most `max_queue_events` is between the engine and the writer. The engine does not wait for a
  slow client: when the queue is full, the client's responses are cancelled and the socket is closed with 1008.
- A refused frame is answered with an `error` event and the socket stays open, with two exceptions in the transport: a frame above
  `transport_frame_bytes` closes it with 1009, a text frame that is not UTF-8 with 1007 (RFC 6455).
- When a socket closes, for whatever reason, its responses are cancelled.
- Sockets beyond `max_connections` are closed with 1013 at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial

from starlette.responses import PlainTextResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..graphs.errors import ProtocolError
from ..runtime.request import Event
from .connection import MAX_FRAME_BYTES, MAX_STREAMS, Connection, CreateCommand
from .events import ServerEvent, error_event
from .protocol import JSON, choose_subprotocol
from .response import Response
from .service import Service

log = logging.getLogger(__name__)

POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013

INLINE_PROMPT_CHARS = 8192
"""Longer prompts are tokenized on a thread, so that they do not block the other streams."""


@dataclass(frozen=True)
class SocketLimits:
    """Limits on clients.

    Attributes:
        max_frame_bytes: larger frames are refused with an error event.
        max_queue_events: events that may wait to be sent on a socket.
        max_streams: responses open at once on a socket, of up to protocol.MAX_COMPLETIONS requests each.
        max_connections: sockets open at once.
        close_timeout_s: how long sending the close frame may take.
    """

    max_frame_bytes: int = MAX_FRAME_BYTES
    max_queue_events: int = 4096
    max_streams: int = MAX_STREAMS
    max_connections: int = 100
    close_timeout_s: float = 5.0

    @property
    def transport_frame_bytes(self) -> int:
        """Frame size at which the transport closes the socket; above max_frame_bytes, so that most oversized frames get an error event."""
        return 2 * self.max_frame_bytes


class SocketHub:
    """The websocket endpoint; counts open sockets."""

    def __init__(self, service: Service, limits: SocketLimits) -> None:
        self._service = service
        self._limits = limits
        self.connections = 0

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one socket until it closes."""
        try:
            subprotocol = choose_subprotocol(websocket.scope.get("subprotocols", []))
        except ProtocolError as error:
            await websocket.send_denial_response(PlainTextResponse(f"{error}\n", status_code=400))
            return
        await websocket.accept(subprotocol)
        if self.connections >= self._limits.max_connections:
            await websocket.close(TRY_AGAIN_LATER, f"all {self._limits.max_connections} connections are taken")
            return
        self.connections += 1
        try:
            await _Socket(websocket, self._service, self._limits, subprotocol or JSON).run()
        finally:
            self.connections -= 1


class _Socket:
    """One open socket; every method runs on the event loop."""

    def __init__(self, websocket: WebSocket, service: Service, limits: SocketLimits, subprotocol: str) -> None:
        self._websocket = websocket
        self._service = service
        self._limits = limits
        self._connection = Connection(subprotocol, max_frame_bytes=limits.max_frame_bytes, max_streams=limits.max_streams)
        self._responses: dict[str, Response] = {}
        self._queue: asyncio.Queue[ServerEvent] = asyncio.Queue(limits.max_queue_events)
        self._overflow = asyncio.Event()
        self._closed = False

    async def run(self) -> None:
        tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._overflow.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True
            for response_id in self._responses:
                self._cancel(response_id)
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if self._overflow.is_set():
            await self._close(POLICY_VIOLATION, f"{self._limits.max_queue_events} events wait to be read; the responses were cancelled")
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            await self._handle(message["bytes"] if text is None else text)

    async def _write(self) -> None:
        while True:
            frame = self._connection.encode(await self._queue.get())
            # The peer or the transport may have closed the socket before the reader has noticed.
            try:
                if isinstance(frame, str):
                    await self._websocket.send_text(frame)
                else:
                    await self._websocket.send_bytes(frame)
            except (WebSocketDisconnect, RuntimeError):
                return

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                await self._websocket.close(code, reason)

    async def _handle(self, frame: str | bytes) -> None:
        try:
            command = self._connection.receive(frame)
        except ProtocolError as error:
            self._send([error_event(error)])
            return
        if not isinstance(command, CreateCommand):
            self._cancel(command.response_id)
            return
        try:
            await self._start(command)
        except Exception as error:
            self._connection.finish(command.response_id)
            event = error_event(error, stream_id=command.stream_id)
            if event["status"] >= 500:
                log.exception("response.create on stream %r failed", command.stream_id)
            self._send([event])

    async def _start(self, create: CreateCommand) -> None:
        prompt = create.body.prompt
        if isinstance(prompt, str) and len(prompt) > INLINE_PROMPT_CHARS:
            prepared = await asyncio.to_thread(self._service.prepare, create)
        else:
            prepared = self._service.prepare(create)
        response = self._service.response(prepared)
        self._service.submit(prepared.requests, partial(self._deliver, create.response_id, response))
        self._responses[create.response_id] = response
        # The engine's events are delivered on this loop, so none can overtake these.
        self._send(response.begin())

    def _deliver(self, response_id: str, response: Response, event: Event) -> None:
        if self._closed:
            return
        self._send(response.feed(event))
        for request_id in response.take_stopped():
            self._service.cancel(request_id)
        if response.done:
            self._connection.finish(response_id)
            del self._responses[response_id]

    def _cancel(self, response_id: str) -> None:
        for request_id in self._responses[response_id].live:
            self._service.cancel(request_id)

    def _send(self, events: list[ServerEvent]) -> None:
        # Send nothing after an overflow: the client must not see a response with a gap.
        if self._overflow.is_set():
            return
        try:
            for event in events:
                self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._overflow.set()
