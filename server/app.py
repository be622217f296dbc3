"""The ASGI application of a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from ..graphs.errors import NpucompileError
from .anthropic.messages import POSTS as MESSAGES
from .client import WEBSOCKET_PATH
from .engine.lifecycle import Lifecycle
from .engine.service import Service
from .fleet.prefill_hub import PATH as HANDOVER_PATH
from .fleet.prefill_hub import handover_endpoint
from .guard.access import ANY, Access
from .guard.door import Door, refuse
from .guard.limits import SocketLimits
from .guard.refusals import Refusals
from .openai.routes import routes
from .pages import page, probes
from .requests.error_objects import ErrorReply
from .requests.fields import show
from .socket.websocket import SocketHub

CORS: Mapping[str, Any] = {"allow_methods": [ANY], "allow_headers": [ANY], "allow_private_network": True}
"""What pages of allowed origins may do; a page of the internet asks besides whether it may reach into a private network."""


def create_app(served: Service | Lifecycle, limits: SocketLimits | None = None, access: Access | None = None) -> Starlette:
    """The application: the websocket at `/v1/responses`, and HTTP beside it; every request comes through the door first."""
    lifecycle = Lifecycle(served) if isinstance(served, Service) else served
    access = access or Access()
    limits = limits or SocketLimits()
    refusals = Refusals(limits.refusals_per_s, time.monotonic)
    hub = SocketHub(lifecycle, limits)
    # Browsers ask before they send a key (CORS), and without one; what is answered then depends on the origin alone.
    origins = [ANY] if ANY in access.origins else sorted(access.origins)
    cors = [Middleware(CORSMiddleware, allow_origins=origins, **CORS)] if origins else []
    return Starlette(
        routes=[
            WebSocketRoute(WEBSOCKET_PATH, hub.serve),
            WebSocketRoute(HANDOVER_PATH, handover_endpoint(lifecycle)),
            WebSocketRoute("/{path:path}", _no_socket),
            page.route(),
            *probes.routes(lifecycle, lambda: hub.connections),
            *routes(lifecycle, MESSAGES),
        ],
        middleware=[*cors, Middleware(Door, access=access, refusals=refusals, leaving=lambda: lifecycle.leaving)],
        exception_handlers=dict.fromkeys((HTTPException, NpucompileError, Exception), probes.http_error),
    )


async def _no_socket(websocket: WebSocket) -> None:
    """Refuses a handshake at another path, which a close before it would make a 403, as of a key."""
    message = f"there is no websocket at {show(websocket.url.path)}; legal is {WEBSOCKET_PATH}"
    await refuse(websocket.scope, websocket.receive, websocket.send, ErrorReply(404, message))
