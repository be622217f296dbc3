"""The protocols of a connection: uvicorn's, with limits on what a peer may hold open, and one write for many frames.

Each connection is counted from its first byte. It has to bring a whole request within `handshake_s`, at its start and whenever it has
begun one. What a peer sends is parsed in slices, between which the event loop does other work; pings are answered only while the
answers are read, and a peer that sends nothing but control frames and fragments is closed.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.utils import ClientDisconnected, get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from ...graphs.errors import RequestError
from ..guard.connections import Connections
from ..guard.door import CHUNKS
from ..requests.error_objects import error_reply

FRAMES = "npucompile.frames"
"""ASGI extension: a `websocket.send` may have a list of payloads under this name, all text or all binary, which are written at once."""

SLICE_BYTES = 2**13
"""Parsed at a time, if more has come; small frames take the most time, about 2 us a byte."""

SMALL_FRAMES_PER_S = 500
"""Pings, pongs and fragments of one connection, above which it is closed."""

POLICY_VIOLATION, INVALID_DATA = 1008, 1007


def protocols(
    connections: Connections, handshake_s: float, frame_bytes: Callable[[], int]
) -> tuple[type[asyncio.Protocol], type[asyncio.Protocol]]:
    """The classes that `uvicorn.Config` takes for HTTP and for websockets.

    Args:
        frame_bytes: size of a frame at which a socket that is opened now is closed; it depends on the model, which is loaded later.
    """

    class Http(LimitedHttp):
        limits = connections
        timeout_s = handshake_s

    class WebSocket(LimitedWebSocket):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            config.ws_max_size = frame_bytes()
            super().__init__(config, *args, **kwargs)

    return Http, WebSocket


class LimitedHttp(H11Protocol):
    """A connection before it is, perhaps, upgraded."""

    limits: Connections
    timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._peer: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = get_remote_addr(transport)
        peer = address[0] if address else ""
        try:
            self.limits.enter(peer)
        except RequestError as error:
            self._refuse(error)
            return
        self._peer = peer
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        # After an upgrade the transport is another protocol's.
        if self.transport.get_protocol() is self:
            self._expect_request()

    def handle_events(self) -> None:
        super().handle_events()
        # Earlier versions of HTTP have no chunks, and an answer to HEAD has no body. The application has not begun yet.
        if self.cycle is not None and self.scope["http_version"] == "1.1" and self.scope["method"] != "HEAD":
            cast(dict[str, Any], self.scope).setdefault("extensions", {})[CHUNKS] = partial(_write_chunk, self.cycle)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        # From here on the transport has another protocol, which leaves in place of this one.
        peer, self._peer = self._peer, None
        self._stop_waiting()
        super().handle_websocket_upgrade(event)
        if peer is not None:
            cast(LimitedWebSocket, self.transport.get_protocol()).on_lost = partial(self.limits.leave, peer)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        """Starts or stops the time that the peer has to send the rest of a request."""
        began = self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0])
        first = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not (began or first) or self.transport.is_closing():
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_s, self._expire)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.abort()

    def _leave(self) -> None:
        self._stop_waiting()
        if self._peer is not None:
            self.limits.leave(self._peer)
            self._peer = None

    def _refuse(self, error: RequestError) -> None:
        reply = error_reply(error)
        body = json.dumps({"error": reply.as_object()}).encode()
        head = [f"HTTP/1.1 {reply.status} Too Many Connections", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        head += ["Connection: close", *(f"{name}: {value}" for name, value in reply.headers().items()), "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()


def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    """See CHUNKS. h11 checks, and copies, as much for each chunk as for a head: 4 us, where this takes 0.3."""
    if cycle.flow.write_paused:
        return False
    # An empty chunk would be the last.
    if data and not cycle.disconnected:
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """A connection after its upgrade."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_lost: Callable[[], None] = _nothing
        self._unparsed: deque[memoryview] = deque()
        self._parsing = False
        self._window_s, self._small_frames = 0.0, 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated or (len(data) <= SLICE_BYTES and not self._unparsed):
            super().data_received(data)
            return
        view = memoryview(data)
        self._unparsed.extend(view[start : start + SLICE_BYTES] for start in range(0, len(view), SLICE_BYTES))
        if not self._parsing:
            self._parsing = True
            self.transport.pause_reading()
            self.loop.call_soon(self._parse_slice)

    def _parse_slice(self) -> None:
        if self._unparsed and not self.transport.is_closing():
            super().data_received(bytes(self._unparsed.popleft()))
        if self._unparsed and not self.transport.is_closing():
            self.loop.call_soon(self._parse_slice)
            return
        self._parsing = False
        self._unparsed.clear()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        if self._parsing and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[FRAMES] = {}

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                # uvicorn would write a traceback.
                self.frames = []
                self.conn.send_close(INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        output = self.conn.data_to_send()
        if self._count_small_frame() and self.writable.is_set():
            self.transport.write(b"".join(output))

    def handle_pong(self, event: Frame) -> None:
        self._count_small_frame()
        super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        self._count_small_frame()
        super().handle_cont(event)

    async def send(self, message: Any) -> None:
        frames = message.get(FRAMES)
        if frames is None:
            await super().send(message)
            if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
                # A refused handshake is complete, too; uvicorn would log each as an error of ours.
                self.handshake_complete = True
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        opcode = Opcode.TEXT if message["text"] else Opcode.BINARY
        self.transport.write(b"".join([part for payload in frames for part in (frame_header(opcode, len(payload)), payload)]))

    def _count_small_frame(self) -> bool:
        """Counts a frame that carries no message; returns false when there are too many and the connection is closed."""
        now_s = self.loop.time()
        if now_s - self._window_s > 1:
            self._window_s, self._small_frames = now_s, 0
        self._small_frames += 1
        if self._small_frames <= SMALL_FRAMES_PER_S:
            return True
        if not self.transport.is_closing():
            self.queue.put_nowait({"type": "websocket.disconnect", "code": POLICY_VIOLATION})
            self.conn.fail(POLICY_VIOLATION, f"more than {SMALL_FRAMES_PER_S} pings and fragments a second")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()
        return False


def _nothing() -> None:
    pass


@lru_cache
def frame_header(opcode: int, length: int) -> bytes:
    """Header of a whole unmasked frame (RFC 6455, section 5.2)."""
    first = bytes([0x80 | opcode])
    if length < 126:
        return first + bytes([length])
    if length < 2**16:
        return first + b"\x7e" + length.to_bytes(2, "big")
    return first + b"\x7f" + length.to_bytes(8, "big")
