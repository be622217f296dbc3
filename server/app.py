"""The ASGI application of a server."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import WebSocketRoute

from ..graphs.errors import NpucompileError
from . import http, page
from .access import ANY, Access
from .door import Door
from .lifecycle import Lifecycle
from .limits import SocketLimits
from .openai.routes import routes
from .refusals import Refusals
from .service import Service
from .websocket import SocketHub

WEBSOCKET_PATH = "/v1/responses"


def create_app(served: Service | Lifecycle, limits: SocketLimits | None = None, access: Access | None = None) -> Starlette:
    """The application: the websocket at `/v1/responses`, and HTTP beside it; every request comes through the door first."""
    lifecycle = Lifecycle(served) if isinstance(served, Service) else served
    access = access or Access()
    limits = limits or SocketLimits()
    refusals = Refusals(limits.refusals_per_s, time.monotonic)
    hub = SocketHub(lifecycle, limits, refusals)
    # Browsers ask before they send a key (CORS), and without one; what is answered then depends on the origin alone.
    origins = [ANY] if ANY in access.origins else sorted(access.origins)
    cors = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=[ANY], allow_headers=[ANY])] if origins else []
    return Starlette(
        routes=[
            WebSocketRoute(WEBSOCKET_PATH, hub.serve),
            page.route(),
            *http.routes(lifecycle, lambda: hub.connections),
            *routes(lifecycle),
        ],
        middleware=[*cors, Middleware(Door, access=access, refusals=refusals)],
        exception_handlers=dict.fromkeys((HTTPException, NpucompileError, Exception), http.http_error),
    )
