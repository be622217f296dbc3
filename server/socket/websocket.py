"""The websocket endpoint: reads frames into commands, writes the events of responses.

Policy, per socket:

- One task reads, one writes, one watches; an outbox is between the engine and the writer. The engine does not wait for a slow client:
  one that is too far behind (`outbox`) has its responses cancelled and is closed with 1008. While much waits to be sent to a client,
  nothing more is read of it.
- A refused frame is answered with an `error` event and the socket stays open, with two exceptions in the transport: a frame above
  `transport_frame_bytes` closes it with 1009, a text frame that is not UTF-8 with 1007 (RFC 6455).
- An exception in one response ends that response with an `error` event of status 500, and nothing else.
- A client that is refused more often than it may be waits: what follows, on the socket or in a lane, comes later (`refusals`).
- When a socket closes, for whatever reason, its responses are cancelled, all in one pass, but for those that can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.websockets import WebSocket, WebSocketDisconnect

from ...graphs.errors import ProtocolError, RequestError
from ..engine.lifecycle import Lifecycle
from ..engine.prompts import reading
from ..engine.service import Service
from ..guard.door import CLIENT, OWNER, refuse
from ..guard.limits import SocketLimits
from ..guard.work import LARGE_BYTES, off_loop, work
from ..requests.error_objects import error_reply
from ..requests.frames import JSON, choose_subprotocol
from ..response import kept
from ..response.events import ServerEvent, error_event, in_lane, steer_refusal
from ..response.prepare import Owners, continued, prepare
from ..response.prepare import keeping as keeping_of
from ..response.run import ResponseRun
from ..storage.store import Followed
from .connection import Command, Connection, CreateCommand
from .messages import ResponseCancel, ResponseResume, ResponseSteer
from .outbox import Outbox
from .transport import FRAMES

log = logging.getLogger(__name__)

POLICY_VIOLATION = 1008


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
        max_frame_bytes = limits.frame_bytes(service.model.max_model_len) + service.picture_bytes
        self._connection = Connection(
            subprotocol, max_frame_bytes=max_frame_bytes, max_streams=limits.max_streams, new_id=service.new_response_id
        )
        self._client = websocket.scope.get(CLIENT, "")
        # Names in the store what this socket alone may continue.
        self._owners = Owners(websocket.scope.get(OWNER, ""), uuid.uuid4().hex)
        self._streams: dict[str, _Stream] = {}
        self._to_cancel: set[str] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._outbox = Outbox(limits.max_queue_bytes, limits.slow_reader_s, asyncio.get_running_loop().time)
        self._too_slow = asyncio.Event()
        self._context = contextvars.copy_context()
        self._complaint: str | None = None
        self._closed = False

    async def run(self) -> None:
        tasks = [asyncio.create_task(part) for part in (self._read(), self._write(), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._closed = True
            self._service.cancel(*self._left())
            self._service.store.forget(str(self._owners.socket))
            for task in (*tasks, *self._starting):
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*self._starting, return_exceptions=True)
        if self._too_slow.is_set():
            await self._close(POLICY_VIOLATION, f"{self._complaint}; the responses were cancelled")
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _left(self) -> list[str]:
        """Leaves all responses; ids of requests that nobody waits for now."""
        streams, self._streams = self._streams, {}
        return [name for stream in streams.values() if stream.run is not None for name in stream.run.leave(stream)]

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
        except Exception as error:
            await self._refuse(_refusal(error, None))
            return
        match command:
            case CreateCommand():
                await self._begin(command)
            case ResponseResume():
                await self._resume(command)
            case ResponseSteer():
                await self._refuse(steer_refusal(command.previous_response_id, command.input))
            case ResponseCancel():
                self._cancel(str(command.response_id))

    async def _refuse(self, event: ServerEvent) -> None:
        """Sends a refusal; what comes next, on the socket or in its lane, waits until it was its turn."""
        self._send([event])
        await asyncio.sleep(work.get().refused(int(event.get("status", 400))))

    async def _command(self, frame: str | bytes) -> Command | None:
        if len(frame) <= LARGE_BYTES:
            return self._connection.receive(frame)
        return self._connection.apply(await off_loop(True, lambda: self._connection.parse(frame)))

    async def _begin(self, create: CreateCommand) -> None:
        """Starts a response; one that cannot be started is refused, and makes place in its lane."""
        try:
            await self._start(create)
        except Exception as error:
            try:
                await self._refuse(_refusal(error, create.body.fields.stream_id))
            finally:
                self._end(create.response_id)

    async def _start(self, create: CreateCommand) -> None:
        service = self._lifecycle.admitting()
        if create.body.fields.previous_response_id is not None:
            create = replace(create, body=await continued(service, create.body, self._owners))
        keeping = keeping_of(service, create.body, self._owners)
        body = create.body
        async with reading(service, body.pictures, body.fields.mm_processor_kwargs, self._client, body.fields.n) as read:
            arguments = service, body, create.response_id, create.stream_id, read
            prepared = await off_loop(body.takes_long, lambda: prepare(*arguments))
        if self._closed:
            return
        run = ResponseRun(service, prepared, keeping)
        stream = _Stream(self, create.response_id, run, create.stream_id)
        self._streams[create.response_id] = stream
        try:
            run.start(stream, self._client)
            work.get().admitted()
        except Exception:
            self._streams.pop(create.response_id, None)
            raise
        if create.response_id in self._to_cancel:
            self._to_cancel.discard(create.response_id)
            run.cancel()

    async def _resume(self, command: ResponseResume) -> None:
        try:
            await self._follow(command)
        except Exception as error:
            await self._refuse(_refusal(error, command.stream_id))
            self._end(command.response_id)

    async def _follow(self, command: ResponseResume) -> None:
        stream = _Stream(self, command.response_id, None, command.stream_id or "", elsewhere=True)
        self._streams[command.response_id] = stream
        stream.run = await kept.follow(self._service, stream, command.response_id, self._owners.key, command.starting_after)

    def _cancel(self, response_id: str) -> None:
        stream = self._streams.get(response_id)
        if stream is None:
            # It is being prepared.
            self._to_cancel.add(response_id)
        elif stream.run is not None:
            stream.run.cancel()

    def _end(self, response_id: str) -> None:
        self._streams.pop(response_id, None)
        self._to_cancel.discard(response_id)
        following = self._connection.finish(response_id)
        if following is not None and not self._closed:
            # This runs within the delivery of another response's events, which is no part of this socket's trace.
            task = asyncio.create_task(self._begin(following), context=self._context.copy())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def _send(self, events: Sequence[ServerEvent]) -> None:
        # Send nothing to a client that is too slow: it must not see a response with a gap.
        if self._complaint or self._closed:
            return
        if self._outbox.put(list(map(self._connection.encode_bytes, events))):
            self._judge()


def _refusal(error: Exception, stream_id: str | None) -> ServerEvent:
    """What is told of a message that was refused; the server's own fault is logged."""
    event = error_event(error, stream_id=stream_id)
    if event["status"] == 500:
        log.error("a message on stream %r failed", stream_id, exc_info=error)
    return event


class _Stream:
    """A response as one socket follows it; `run` is None once it has ended.

    Args:
        elsewhere: whether it began on another socket, perhaps in a lane of another name.
    """

    def __init__(self, socket: _Socket, response_id: str, run: Followed | None, stream_id: str, *, elsewhere: bool = False) -> None:
        self.run = run
        self._elsewhere = elsewhere
        self._response_id = response_id
        self._socket = socket
        self._stream_id = stream_id

    def read(self, events: Sequence[ServerEvent], done: bool) -> None:
        """See `response_run.Reader`."""
        self._socket._send([in_lane(event, self._stream_id) for event in events] if self._elsewhere else events)
        if done:
            self._over()

    def failed(self, error: Exception) -> None:
        """See `response_run.Reader`."""
        self._socket._send([error_event(error, stream_id=self._stream_id or None)])
        self._over()

    def _over(self) -> None:
        self.run = None
        self._socket._end(self._response_id)
