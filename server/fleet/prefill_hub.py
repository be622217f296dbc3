"""The prefill side of pairs: decode servers connect to a websocket of this server, and ask for prompts over it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from ...graphs.errors import NpucompileError, RequestError
from ...runtime.engine import Engine
from ...runtime.kv_transfer import layout
from ...runtime.kv_transfer.layout import Instance
from ...runtime.kv_transfer.messages import VERSION, Hello, Message, Refused, from_json, to_json
from ...runtime.kv_transfer.pools import Peer, Pools
from ...runtime.kv_transfer.room import DEFAULTS, Timeouts
from ...runtime.kv_transfer.sender import Sender
from ...runtime.request import ParkedEvent
from ..engine.lifecycle import Lifecycle
from ..guard.door import CLIENT, refuse
from ..requests.error_objects import Refusal, error_reply

log = logging.getLogger(__name__)

PATH = "/v1/handover"
TICK_S, GREETING_S = 0.1, 10.0


class PrefillHub:
    """The connections of decode servers, each with its rooms.

    Args:
        engine: computes the prompts.
        pools: of this server.
        instance: how it describes itself.
    """

    def __init__(self, engine: Engine, pools: Pools, instance: Instance, timeouts: Timeouts = DEFAULTS) -> None:
        self._engine, self._pools, self._instance, self._timeouts = engine, pools, instance, timeouts
        self._hello = Hello(VERSION, instance.to_json(), pools.sessions)
        self._names = itertools.count()
        # Replaced and never changed: the engine's thread goes through it.
        self._senders: tuple[Sender, ...] = ()
        engine.stepper.on_parked = self._parked

    @property
    def rooms(self) -> int:
        """Prompts that are computed, kept or written."""
        return sum(sender.rooms for sender in self._senders)

    def stats(self) -> Mapping[str, Any]:
        """Numbers by name."""
        return {"kv_transfer_rooms": self.rooms, "kv_transfer_connections": len(self._senders)}

    async def serve(self, websocket: WebSocket, enter: Callable[[int], Callable[[], None]]) -> None:
        """See `Handovers`; lets writes that are in flight at the end of a connection end."""
        await websocket.accept()
        outgoing: asyncio.Queue[Message] = asyncio.Queue()
        try:
            peer = await asyncio.wait_for(self._greeted(websocket), GREETING_S)
        except (NpucompileError, TimeoutError, ValueError) as error:
            reason = str(error) or f"no greeting came within {GREETING_S:g} s"
            await websocket.send_text(_text(Refused(reason)))
            await websocket.close(1008)
            return

        loop = asyncio.get_running_loop()

        def call(function: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(function)

        name = f"handover-{next(self._names)}"
        sender = Sender(
            self._engine, self._pools, peer, outgoing.put_nowait, call, time.monotonic, name, timeouts=self._timeouts, enter=enter
        )
        self._senders = (*self._senders, sender)
        try:
            await websocket.send_text(_text(self._hello))
            await _until_closed(websocket, sender, outgoing)
        finally:
            sender.disconnected()
            while sender.rooms:
                await asyncio.sleep(TICK_S)
            self._senders = tuple(other for other in self._senders if other is not sender)

    async def _greeted(self, websocket: WebSocket) -> Peer:
        hello = from_json(json.loads(await websocket.receive_text()))
        if not isinstance(hello, Hello) or hello.version != VERSION:
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


async def _until_closed(websocket: WebSocket, sender: Sender, outgoing: asyncio.Queue[Message]) -> None:
    """Passes messages in both directions until the connection ends or one of them is wrong."""

    async def receive() -> None:
        async for text in websocket.iter_text():
            sender.received(from_json(json.loads(text)))

    async def send() -> None:
        while True:
            await websocket.send_text(_text(await outgoing.get()))

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


def _text(message: Message) -> str:
    return json.dumps(to_json(message), separators=(",", ":"))
