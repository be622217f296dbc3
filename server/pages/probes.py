"""The HTTP endpoints that say how the server is: liveness and readiness, metrics."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..engine.lifecycle import Lifecycle
from ..guard.door import error_response
from ..requests.error_objects import RETRY_AFTER_S, ErrorReply, error_reply
from ..requests.fields import show
from .exposition import CONTENT_TYPE, render_metrics

NUMBERS = "numbers"
"""Of this process alone, as other doors ask for them."""
NEAR = 0.85
"""How much of a path and of one that is meant has to be the same: all of them begin alike, and a misspelling leaves most of it."""
MAX_PATH_CHARS = 200
"""Of a path that is compared with those there are."""


def routes(lifecycle: Lifecycle, connections: Callable[[], int]) -> list[Route]:
    """The HTTP routes; `connections` counts open sockets."""

    async def health(_: Request) -> Response:
        return JSONResponse(dict(lifecycle.state()), status_code=200 if lifecycle.alive() else 503)

    async def ready(_: Request) -> Response:
        if lifecycle.ready():
            return JSONResponse(dict(lifecycle.state()))
        return JSONResponse(dict(lifecycle.state()), status_code=503, headers={"Retry-After": str(RETRY_AFTER_S[503])})

    async def metrics(_: Request) -> Response:
        service = lifecycle.serving()
        own = [numbers(), *(await service.siblings.ask_all(NUMBERS) if service.siblings else ())]
        stats = {**service.stats(), **summed(own), "draining": int(lifecycle.leaving or lifecycle.draining)}
        return Response(render_metrics(stats, service.model), media_type=CONTENT_TYPE)

    def numbers() -> dict[str, Any]:
        return {**lifecycle.serving().own_stats(), "websocket_connections": connections()}

    lifecycle.methods[NUMBERS] = numbers

    paths = {"/health": health, "/ready": ready, "/metrics": metrics}
    return [Route(path, endpoint) for path, endpoint in paths.items()]


def summed(numbers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of several doors as those of one; some are mappings of numbers."""
    sums: dict[str, Any] = dict(numbers[0])
    for each in numbers[1:]:
        for name, value in each.items():
            before = sums.get(name)
            if isinstance(value, Mapping):
                sums[name] = summed([before or {}, value])
            else:
                sums[name] = (before or 0) + value
    return sums


async def http_error(request: Request, error: Exception) -> Response:
    """Errors in OpenAI's format: those of requests, the router's own (404, 405), and the server's (500)."""
    if isinstance(error, HTTPException):
        response = error_response(ErrorReply(error.status_code, _said(request, error)))
        response.headers.update(error.headers or {})
        return response
    return error_response(error_reply(error))


def _said(request: Request, error: HTTPException) -> str:
    """What is there instead, where the router found nothing."""
    path, paths = request.url.path, list(dict.fromkeys(route.path for route in request.app.routes if isinstance(route, Route)))
    if error.status_code == 405:
        return f"{request.method} {show(path)}; legal is {(error.headers or {}).get('Allow', 'another method')}"
    if error.status_code != 404:
        return error.detail
    near = [f"/v1{path}"] if f"/v1{path}" in paths else difflib.get_close_matches(path[:MAX_PATH_CHARS], paths, 1, NEAR)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return f"there is nothing at {show(path)}{meant}; served are {', '.join(paths)}"
