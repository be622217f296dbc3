"""The prefill side of pairs: decode servers connect to a websocket of this server, and ask for prompts over it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...graphs.errors import NpucompileError, ProtocolError, RequestError
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups
from ...runtime.kv_transfer import layout
from ...runtime.kv_transfer.layout import PAGES, SLOTS, Instance
from ...runtime.kv_transfer.lease import clock_s
from ...runtime.kv_transfer.messages import VERSION, Declined, Hello, Message, Refused, decode, encode, room_of
from ...runtime.kv_transfer.open_rooms import PeerConnection
from ...runtime.kv_transfer.pools import Peer, Pools
from ...runtime.kv_transfer.receiver import OK
from ...runtime.kv_transfer.room import DEFAULTS, Timeouts
from ...runtime.kv_transfer.sender import Sender
from ...runtime.request import ParkedEvent
from ..engine.lifecycle import Lifecycle
from ..guard.door import CLIENT, refuse
from ..requests.error_objects import ErrorReply, Refusal, Relayed, error_reply
from ..requests.router_fields import HandoverFields
from .routed import answered, is_probe, rooms_of

log = logging.getLogger(__name__)

PATH = "/v1/handover"
TICK_S, GREETING_S = 0.1, 10.0
MOST_ENDED = 10_000
"""Rooms whose ends are kept for a router that has not asked yet."""
SSE_END = b"data: [DONE]\n\n"
_VLLM = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [], "remote_host": None, "remote_port": None}


class PrefillHub:
    """The connections of decode servers, each with its rooms.

    Args:
        engine: computes the prompts.
        pools: of this server.
        instance: how it describes itself.
    """

    def __init__(self, engine: Engine | EngineGroups, pools: Pools, instance: Instance, timeouts: Timeouts = DEFAULTS) -> None:
        self._engine, self._pools, self._instance, self._timeouts = engine, pools, instance, timeouts
        self._hello = Hello(VERSION, Raw(msgspec.json.encode(instance)), engine_id=secrets.token_hex(16))
        self._names = itertools.count()
        # Replaced and never changed: the engine's thread goes through it.
        self._senders: tuple[Sender, ...] = ()
        # Of connections that have ended.
        self._writes = self._pages_written = 0
        engine.on_parked(self._parked)
        # Rooms that routers know: who waits for one, and how it ended where nobody has asked yet.
        self._waiting: dict[int, asyncio.Future[ErrorReply | None]] = {}
        self._ended: dict[int, ErrorReply | None] = {}

    @property
    def rooms(self) -> int:
        """Prompts that are computed, kept or written."""
        return sum(sender.rooms for sender in self._senders)

    def stats(self) -> Mapping[str, Any]:
        """Numbers by name."""
        senders = self._senders
        writes = self._writes + sum(sender.writes for sender in senders)
        pages = self._pages_written + sum(sender.pages_written for sender in senders)
        nbytes = pages * self._instance.item_bytes(PAGES) + writes * self._instance.item_bytes(SLOTS)
        own = {"kv_transfer_requests_total": writes, "kv_transfer_bytes_total": nbytes}
        return {"kv_transfer_rooms": self.rooms, "kv_transfer_connections": len(senders), **own}

    async def serve(self, websocket: WebSocket, enter: Callable[[int], Callable[[], None]]) -> None:
        """See `Handovers`; lets writes that are in flight at the end of a connection end."""
        await websocket.accept()
        outgoing: asyncio.Queue[Message] = asyncio.Queue()
        try:
            peer = await asyncio.wait_for(self._greeted(websocket), GREETING_S)
        except (NpucompileError, TimeoutError, ValueError) as error:
            reason = str(error) or f"no greeting came within {GREETING_S:g} s"
            await websocket.send_text(encode(Refused(reason)))
            await websocket.close(1008)
            return

        loop = asyncio.get_running_loop()

        def call(function: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(function)

        name = f"handover-{next(self._names)}"
        connection = PeerConnection(self._engine, outgoing.put_nowait, call, clock_s, self._timeouts)
        sender = Sender(connection, self._pools, peer, name, enter, self._room_ended)
        self._senders = (*self._senders, sender)
        try:
            await websocket.send_text(encode(self._hello))
            await _until_closed(websocket, sender, outgoing, self._declined)
        finally:
            sender.disconnected()
            while sender.rooms:
                await asyncio.sleep(TICK_S)
            self._writes += sender.writes
            self._pages_written += sender.pages_written
            self._senders = tuple(other for other in self._senders if other is not sender)

    async def answer(self, fields: HandoverFields, path: str, streams: bool) -> Response:
        """Answers a router: SGLang's when the rooms that it names have ended, vLLM's at once with a room.

        Raises:
            RequestError: a room is missing, was declined by the decode server, or was given up.
        """
        if is_probe(fields):
            return JSONResponse(answered(path, {}))
        rooms = rooms_of(fields)
        if not rooms:
            if not (fields.kv_transfer_params or {}).get("do_remote_decode"):
                raise Refusal("prefill_role")
            joined = {"remote_engine_id": self._hello.engine_id, "remote_request_id": str(secrets.randbits(62) + 1)}
            return JSONResponse(answered(path, {"kv_transfer_params": {**_VLLM, **joined}}))
        for room in rooms:
            if (reply := await self._end_of(room)) is not None:
                raise Relayed(reply)
        return Response(SSE_END, media_type="text/event-stream") if streams else JSONResponse(answered(path, {}))

    async def _end_of(self, room: int) -> ErrorReply | None:
        if room in self._ended:
            return self._ended.pop(room)
        future = self._waiting.setdefault(room, asyncio.get_running_loop().create_future())
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeouts.asked)
        except TimeoutError:
            return ErrorReply(503, f"no decode server asked for room {room} within {self._timeouts.asked:g} s", "not_handed_over")
        finally:
            self._waiting.pop(room, None)

    def _room_ended(self, room: int, reason: str) -> None:
        self._end(room, ErrorReply(503, f"room {room} was given up: {reason}", "not_handed_over") if reason else None)

    def _declined(self, message: Declined) -> None:
        self._end(message.routed, None if message.status == OK else ErrorReply(message.status, message.reason, "declined"))

    def _end(self, room: int, reply: ErrorReply | None) -> None:
        waiting = self._waiting.get(room)
        if waiting is not None:
            if not waiting.done():
                waiting.set_result(reply)
            return
        self._ended[room] = reply
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _greeted(self, websocket: WebSocket) -> Peer:
        try:
            hello = decode(await websocket.receive_text())
        except KeyError:
            raise RequestError("a greeting is a text of JSON, and no bytes", code="handover_greeting") from None
        # An older decode server refuses this one by its answer.
        if not isinstance(hello, Hello) or hello.version > VERSION:
            raise RequestError(f"a pair begins with a greeting of version {VERSION}, not {str(hello)[:80]}", code="handover_greeting")
        instance = Instance.from_json(hello.instance)
        layout.check(self._instance, instance)
        return Peer(instance, hello.sessions)

    def _parked(self, event: ParkedEvent) -> None:
        any(sender.parked(event) for sender in self._senders)


def handover_endpoint(lifecycle: Lifecycle) -> Callable[[WebSocket], Awaitable[None]]:
    """The endpoint at PATH; it refuses the handshake where this server computes no prompts for others."""

    async def endpoint(websocket: WebSocket) -> None:
        try:
            handovers = lifecycle.admitting().handovers
            if handovers is None:
                raise Refusal("no_prefill_role")
        except RequestError as error:
            await refuse(websocket.scope, websocket.receive, websocket.send, error_reply(error))
            return

        def enter(tokens: int) -> Callable[[], None]:
            return lifecycle.admitting().admission.enter(websocket.scope.get(CLIENT, ""), 1, tokens)

        await handovers.serve(websocket, enter)

    return endpoint


async def _until_closed(
    websocket: WebSocket, sender: Sender, outgoing: asyncio.Queue[Message], declined: Callable[[Declined], None]
) -> None:
    """Passes messages in both directions until the connection ends or one of them is wrong."""

    async def receive() -> None:
        async for text in websocket.iter_text():
            try:
                message = decode(text)
            except ProtocolError as error:
                if (room := room_of(text)) is None:
                    raise
                sender.refused(room, str(error))
                continue
            if isinstance(message, Declined):
                declined(message)
            else:
                sender.received(message)

    async def send() -> None:
        while True:
            await websocket.send_text(encode(await outgoing.get()))

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            sender.tick()

    tasks = [asyncio.ensure_future(part()) for part in (receive, send, tick)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        error = task.exception()
        if error is not None and not isinstance(error, WebSocketDisconnect | RuntimeError):
            log.warning("the connection of a decode server ends: %s", error)
