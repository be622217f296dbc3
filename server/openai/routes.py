"""The routes of the HTTP API. What a route raises becomes an error object."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...graphs.errors import ProtocolError, RequestError
from ..engine.lifecycle import Lifecycle
from ..guard.body_room import Grow
from ..guard.work import LARGE_BYTES, work
from ..requests.bodies import Body, validate
from ..requests.fields import show
from ..requests.frames import decode_json
from ..requests.router_fields import handover_of
from .api import Api
from .chat import chat_completions, render_chat
from .completions import completions, render_completions
from .control import (
    AbortRequest,
    abort_request,
    expert_counts,
    flush_cache,
    get_load,
    health_generate,
    model_info,
    model_list,
    one_model,
    ping,
    server_info,
    version,
)
from .errors import error_response
from .generate import GenerateRequest, generate
from .request_models import ChatRequest, CompletionRequest
from .responses import render_responses, responses
from .sse import ClientGone
from .stored import cancel, compact, delete, retrieve
from .tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

CLIENT_CLOSED = 499
"""Nginx's status for a request whose client has gone; nobody reads it."""

Endpoint = Callable[[Api, Any, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Post:
    """A path that takes a body.

    Attributes:
        model: of the body; None where the endpoint reads it itself.
        completes: whether it is a body of completions, which a router may want to be handed over.
        told: the answer to what it raises.
    """

    path: str
    model: type[Body] | None
    endpoint: Endpoint
    completes: bool = False
    told: Callable[[Exception], Response] = error_response


POSTS = (
    Post("/v1/completions", CompletionRequest, completions, completes=True),
    Post("/v1/chat/completions", ChatRequest, chat_completions, completes=True),
    Post("/v1/responses", None, responses, completes=True),
    Post("/v1/completions/render", CompletionRequest, render_completions),
    Post("/v1/chat/completions/render", ChatRequest, render_chat),
    Post("/v1/responses/render", None, render_responses),
    Post("/tokenize", TokenizeRequest, tokenize),
    Post("/detokenize", DetokenizeRequest, detokenize),
    Post("/generate", GenerateRequest, generate, completes=True),
    Post("/abort_request", AbortRequest, abort_request),
)

GETS: Mapping[str, Callable[[Api, Request], Awaitable[Response]]] = {
    "/health_generate": health_generate,
    "/ping": ping,
    "/version": version,
    "/flush_cache": flush_cache,
    "/expert_counts": expert_counts,
    "/get_load": get_load,
    "/server_info": server_info,
    "/get_server_info": server_info,
    "/model_info": model_info,
    "/get_model_info": model_info,
}
"""Paths without a body; clients differ in whether they GET or POST them."""


STORED = (
    ("GET", "/v1/responses/{response_id}", retrieve),
    ("DELETE", "/v1/responses/{response_id}", delete),
    ("POST", "/v1/responses/{response_id}/cancel", cancel),
    ("POST", "/v1/responses/compact", compact),
)
"""Method and path of what is done with responses that are kept."""


def routes(lifecycle: Lifecycle, others: Sequence[Post] = ()) -> list[Route]:
    """The routes.

    Args:
        others: of APIs that are not OpenAI's, over the same completions.
    """
    api = Api(lifecycle)

    async def models(_: Request) -> Response:
        return JSONResponse(model_list(lifecycle.serving().model))

    async def model(request: Request) -> Response:
        return JSONResponse(one_model(lifecycle.serving().model, request.path_params["name"]))

    return [
        *(Route(post.path, _guarded(_posted(api, post), post.told), methods=["POST"]) for post in (*POSTS, *others)),
        *(Route(path, _guarded(partial(endpoint, api)), methods=["GET", "POST"]) for path, endpoint in GETS.items()),
        *(Route(path, _guarded(partial(endpoint, api)), methods=[method]) for method, path, endpoint in STORED),
        Route("/v1/models", _guarded(models)),
        Route("/v1/models/{name:path}", _guarded(model)),
    ]


async def read_json(request: Request, max_bytes: int, grow: Grow) -> dict[str, Any]:
    """The body of a request, a JSON object; `grow` is told its size as it comes.

    Raises:
        RequestError: it is compressed, too large, or none (codes unsupported_encoding, body_too_large, invalid_utf8, invalid_json,
            not_an_object).
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(f"the body has Content-Encoding {show(encoding)}; legal is a body as it is", code="unsupported_encoding")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise RequestError(f"the body has more than {max_bytes} bytes; legal are at most that many", code="body_too_large")
        grow(len(data))
    if data.startswith(codecs.BOM_UTF8):
        del data[: len(codecs.BOM_UTF8)]
    if len(data) > LARGE_BYTES:
        await work.get().turn()
    try:
        with work.get().counted():
            body = decode_json(data, "the body")
    except ProtocolError as error:
        raise RequestError(str(error), code=error.code) from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {show(body)}; legal is a JSON object", code="not_an_object")
    return body


def _posted(api: Api, post: Post) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        with api.bodies.entered(api.body_bytes) as grow:
            return await answer_within(request, grow)

    async def answer_within(request: Request, grow: Grow) -> Response:
        body, own = await read_json(request, api.body_bytes, grow), work.get()
        handover = handover_of(body, post.path) if post.completes else None

        async def run() -> Response:
            if post.model is None:
                return await post.endpoint(api, body, request)
            with own.counted():
                fields = validate(post.model, body, post.path)
            # What is read of it may be megabytes of pictures, which would stay as long as the answer takes.
            body.clear()
            return await post.endpoint(api, fields, request)

        if handover is None:
            return await run()
        return await api.handed_over(handover, post.path, body.get("stream") is True, run, request.receive)

    return answer


def _guarded(
    endpoint: Callable[[Request], Awaitable[Response]], told: Callable[[Exception], Response] = error_response
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:
            return told(error)

    return answer
