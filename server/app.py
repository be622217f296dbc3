"""The ASGI application of a service."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import WebSocketRoute

from . import http
from .service import Service
from .websocket import SocketHub, SocketLimits

WEBSOCKET_PATH = "/v1/responses"


def create_app(service: Service, limits: SocketLimits | None = None) -> Starlette:
    """The application: the websocket at `/v1/responses`, and `/health`, `/v1/models`, `/metrics` beside it."""
    hub = SocketHub(service, limits or SocketLimits())
    return Starlette(
        routes=[WebSocketRoute(WEBSOCKET_PATH, hub.serve), *http.routes(service, lambda: hub.connections)],
        exception_handlers={HTTPException: http.http_error},
    )
