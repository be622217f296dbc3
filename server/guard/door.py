"""The ASGI middleware in front of every route: lets in what `Access` allows, and answers the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...graphs.errors import RequestError
from ..requests.error_objects import ErrorReply, error_reply
from ..requests.shared_threads import asking
from ..telemetry.trace_context import carried, carrier
from .access import KEY_SUBPROTOCOL, Access
from .refusals import Refusals
from .work import GuardedWork, work

CLIENT = "npucompile.client"
"""Key of a scope: whose request it is, KEY and the digest of its key or else the address that it comes from."""

KEY = "key "

OWNER = "npucompile.owner"
"""Key of a scope: whose responses it may name, the digest of its key; "" where no key is asked for, and an id opens what it names."""

CHUNKS = "npucompile.chunks"
"""Extension of a scope: a function that writes a part of a body whose length was not said, once `http.response.start` was sent; it returns
false, and writes nothing, where the client is behind and `http.response.body` would wait."""

_REFUSED = 400
"""Statuses of answers that say no begin here."""

_STARTS = ("http.response.start", "websocket.http.response.start")


class Door:
    """Checks each HTTP request and each websocket before its route sees it.

    Args:
        leaving: whether connections should be closed with the next answer, so that their clients turn to another server.
    """

    def __init__(self, app: ASGIApp, access: Access, refusals: Refusals, leaving: Callable[[], bool]) -> None:
        self._app, self._leaving = app, leaving
        self._access = access
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        try:
            key = self._access.check(scope)
        except RequestError as error:
            await refuse(scope, receive, self._paced(GuardedWork(self._refusals, address), send), error_reply(error))
            return
        client = f"{KEY}{key}" if key else address
        known: dict[str, Any] = {CLIENT: client, OWNER: key or ""}
        if "subprotocols" in scope:
            known["subprotocols"] = [name for name in scope["subprotocols"] if not name.startswith(KEY_SUBPROTOCOL)]
        own = GuardedWork(self._refusals, client)
        tokens = carrier.set(carried(scope)), asking.set(client), work.set(own)
        try:
            # A client that leaves while it is answered is no fault of the server's.
            with contextlib.suppress(WebSocketDisconnect):
                await self._app({**scope, **known}, receive, self._paced(own, send))
        finally:
            for variable, token in zip((carrier, asking, work), tokens, strict=True):
                variable.reset(token)  # type: ignore[attr-defined]

    def _paced(self, own: GuardedWork, send: Send) -> Send:
        """Sends an answer, a refusal when it is its turn."""

        async def paced(message: Any) -> None:
            if message["type"] in _STARTS and message["status"] >= _REFUSED:
                await asyncio.sleep(own.refused(message["status"]))
            elif message["type"] == "http.response.start":
                own.admitted()
            if message["type"] == "http.response.start" and self._leaving():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return paced


def has_key(client: str) -> bool:
    """Whether a client (CLIENT) is known by its key; all others are known by their addresses."""
    return client.startswith(KEY)


async def refuse(scope: Scope, receive: Receive, send: Send, reply: ErrorReply) -> None:
    """Answers a request, or the handshake of a websocket, with an error."""
    response = error_response(reply)
    if scope["type"] == "websocket":
        await WebSocket(scope, receive, send).send_denial_response(response)
    else:
        await response(scope, receive, send)


def error_response(reply: ErrorReply) -> JSONResponse:
    """An error as an HTTP response."""
    return JSONResponse({"error": reply.as_object()}, status_code=reply.status, headers=reply.headers())
