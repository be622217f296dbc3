"""The websocket endpoint: reads frames into commands, writes the events of responses.

Policy, per socket:

- One task reads, one writes, one watches; an outbox is between the engine and the writer. The engine does not wait for a slow client:
  one that is too far behind (`outbox`) has its responses cancelled and is closed with 1008. While much waits to be sent to a client,
  nothing more is read of it.
- A refused frame is answered with an `error` event and the socket stays open, with two exceptions in the transport: a frame above
  `transport_frame_bytes` closes it with 1009, a text frame that is not UTF-8 with 1007 (RFC 6455).
- An exception in one response ends that response with an `error` event of status 500, and nothing else.
- When a socket closes, for whatever reason, its responses are cancelled, all in one pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from starlette.websockets import WebSocket, WebSocketDisconnect

from ..graphs.errors import ProtocolError, RequestError
from ..runtime.request import Event
from .connection import CancelCommand, Command, Connection, CreateCommand
from .door import CLIENT, refuse
from .errors import error_reply
from .events import ServerEvent, error_event
from .frames import JSON, choose_subprotocol
from .lifecycle import Lifecycle
from .limits import SocketLimits
from .outbox import Outbox
from .response import Response
from .service import Service
from .transport import FRAMES

log = logging.getLogger(__name__)

POLICY_VIOLATION = 1008

INLINE_FRAME_BYTES = 2**16
"""Larger frames are parsed on a thread."""


class SocketHub:
    """The websocket endpoint; counts open sockets."""

    def __init__(self, lifecycle: Lifecycle, limits: SocketLimits) -> None:
        self._lifecycle = lifecycle
        self._limits = limits
        self.connections = 0

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one socket until it closes."""
        try:
            subprotocol = choose_subprotocol(websocket.scope.get("subprotocols", []))
            service = self._lifecycle.admitting()
        except (ProtocolError, RequestError) as error:
            await refuse(websocket.scope, websocket.receive, websocket.send, error_reply(error))
            return
        await websocket.accept(subprotocol)
        self.connections += 1
        try:
            await _Socket(websocket, service, self._lifecycle, self._limits, subprotocol or JSON).run()
        finally:
            self.connections -= 1


class _Socket:
    """One open socket; every method runs on the event loop."""

    def __init__(self, websocket: WebSocket, service: Service, lifecycle: Lifecycle, limits: SocketLimits, subprotocol: str) -> None:
        self._websocket = websocket
        self._service = service
        self._lifecycle = lifecycle
        self._limits = limits
        max_frame_bytes = limits.frame_bytes(service.model.max_model_len)
        self._connection = Connection(subprotocol, max_frame_bytes=max_frame_bytes, max_streams=limits.max_streams)
        self._client = websocket.scope.get(CLIENT, "")
        self._responses: dict[str, Response] = {}
        self._outbox = Outbox(limits.max_queue_bytes, limits.slow_reader_s, asyncio.get_running_loop().time)
        self._too_slow = asyncio.Event()
        self._complaint: str | None = None
        self._closed = False

    async def run(self) -> None:
        tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True
            self._service.cancel(*(name for response in self._responses.values() for name in response.live))
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if self._too_slow.is_set():
            await self._close(POLICY_VIOLATION, f"{self._complaint}; the responses were cancelled")
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
            await self._outbox.readable()

    async def _write(self) -> None:
        is_text = self._connection.subprotocol == JSON
        at_once = FRAMES in self._websocket.scope.get("extensions", {})
        while True:
            frames = await self._outbox.take()
            # The peer or the transport may have closed the socket before the reader has noticed.
            try:
                if at_once:
                    await self._websocket.send({"type": "websocket.send", FRAMES: frames, "text": is_text})
                    continue
                for frame in frames:
                    await (self._websocket.send_text(frame.decode()) if is_text else self._websocket.send_bytes(frame))
            except (WebSocketDisconnect, RuntimeError):
                return

    async def _watch(self) -> None:
        """Ends when the client is too slow."""
        while not self._too_slow.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._too_slow.wait(), self._limits.slow_reader_s / 4)
            self._judge()

    def _judge(self) -> None:
        self._complaint = self._complaint or self._outbox.complaint()
        if self._complaint:
            self._too_slow.set()

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(self._limits.close_timeout_s):
                await self._websocket.close(code, reason)

    async def _handle(self, frame: str | bytes) -> None:
        try:
            command = await self._command(frame)
        except ProtocolError as error:
            self._send([error_event(error)])
            return
        if isinstance(command, CancelCommand):
            self._service.cancel(*self._responses[command.response_id].live)
            return
        try:
            await self._start(command)
        except Exception as error:
            self._connection.finish(command.response_id)
            event = error_event(error, stream_id=command.stream_id)
            if event["status"] == 500:
                log.exception("response.create on stream %r failed", command.stream_id)
            self._send([event])

    async def _command(self, frame: str | bytes) -> Command:
        if len(frame) <= INLINE_FRAME_BYTES:
            return self._connection.receive(frame)
        return self._connection.apply(await asyncio.to_thread(self._connection.parse, frame))

    async def _start(self, create: CreateCommand) -> None:
        self._lifecycle.admitting()
        if create.body.takes_long:
            prepared = await asyncio.to_thread(self._service.prepare, create)
        else:
            prepared = self._service.prepare(create)
        response = self._service.response(prepared)
        self._service.submit(prepared.requests, partial(self._deliver, create, response), self._client)
        self._responses[create.response_id] = response
        # The engine's events are delivered on this loop, so none can overtake these.
        self._send(response.begin())

    def _deliver(self, create: CreateCommand, response: Response, event: Event) -> None:
        if self._closed or create.response_id not in self._responses:
            return
        try:
            self._send(response.feed(event))
            self._service.cancel(*response.take_stopped())
        except Exception as error:
            log.exception("the response on stream %r failed", create.stream_id)
            self._service.cancel(*response.live)
            self._end(create.response_id)
            self._send([error_event(error, stream_id=create.stream_id)])
            return
        if response.done:
            self._end(create.response_id)

    def _end(self, response_id: str) -> None:
        self._connection.finish(response_id)
        del self._responses[response_id]

    def _send(self, events: list[ServerEvent]) -> None:
        # Send nothing to a client that is too slow: it must not see a response with a gap.
        if self._too_slow.is_set() or not events:
            return
        self._outbox.put([self._connection.encode_bytes(event) for event in events])
        self._judge()
