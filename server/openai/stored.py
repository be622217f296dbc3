"""`/v1/responses/{id}`: responses that are kept, read again, followed from an event on, cancelled and deleted."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..response import kept
from .api import Api, owner_of
from .event_reader import EventReader
from .responses import EventFrames
from .sse import EventStream

QUERY = ("stream", "starting_after", "include", "include[]", "include_obfuscation")


async def retrieve(api: Api, request: Request) -> Response:
    """The response object, or with `stream=true` its events behind `starting_after`.

    Raises:
        RequestError: there is no such response, or its events are not kept.
    """
    query, service, response_id = request.query_params, api.serving(), request.path_params["response_id"]
    for name in query:
        if name not in QUERY:
            raise RequestError(f"there is no query parameter {show(name)}; legal are {list(QUERY)}", param=name[:128], code="unknown_field")
    if not _flag(query, "stream"):
        return _json(await kept.body(service, response_id, owner_of(request)))
    reader = EventReader(service)
    reader.follow(await kept.follow(service, reader, response_id, owner_of(request), _number(query, "starting_after")))
    return EventStream(reader, EventFrames())


async def cancel(api: Api, request: Request) -> Response:
    """Ends a response that runs, and answers with what it has become; one that has ended is left as it is.

    Raises:
        RequestError: there is no such response.
    """
    return _json(await kept.cancel(api.serving(), request.path_params["response_id"], owner_of(request)))


async def delete(api: Api, request: Request) -> Response:
    """Forgets a response; one that runs is cancelled.

    Raises:
        RequestError: there is no such response.
    """
    response_id = request.path_params["response_id"]
    await kept.delete(api.serving(), response_id, owner_of(request))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def compact(_: Api, __: Request) -> Response:
    """Refuses what OpenAI's clients may ask for before they sum a conversation up themselves.

    Raises:
        RequestError: in any case.
    """
    raise Refusal("no_compaction")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise RequestError(f"{name} is {show(query[name])}; legal is true or false", param=name)
    return value == "true"


def _number(query: Mapping[str, str], name: str) -> int:
    value = query.get(name, "-1")
    if not value.removeprefix("-").isdecimal() or len(value) > 18 or int(value) < -1:
        raise RequestError(f"{name} is {show(value)}; legal is the sequence number of an event", param=name)
    return int(value)
