"""`/v1/responses/{id}`: responses that are kept, read again, followed from an event on, cancelled and deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..storage.store import StoredResponse
from .api import Api, owner_of
from .event_reader import EventReader
from .responses import EventFrames
from .sse import EventStream

CANCEL_WAIT_S = 10.0
"""How long a cancel waits for the response to end before it answers with what there is."""

QUERY = ("stream", "starting_after", "include", "include[]", "include_obfuscation")


async def retrieve(api: Api, request: Request) -> Response:
    """The response object, or with `stream=true` its events behind `starting_after`.

    Raises:
        RequestError: there is no such response, or its events are not kept.
    """
    query = request.query_params
    for name in query:
        if name not in QUERY:
            raise RequestError(f"there is no query parameter {show(name)}; legal are {list(QUERY)}", param=name[:128], code="unknown_field")
    stored = _stored(api, request)
    if not _flag(query, "stream"):
        return _body(stored)
    if stored.replay is None:
        raise Refusal("not_resumable", param="response_id", response=show(stored.response_id))
    events = stored.replay.after(_number(query, "starting_after"))
    reader = EventReader(api.serving())
    reader.follow(stored.run)
    if stored.run is not None:
        stored.run.join(reader)
    reader.read(events, stored.run is None)
    return EventStream(reader, EventFrames())


async def cancel(api: Api, request: Request) -> Response:
    """Ends a response that runs, and answers with what it has become; one that has ended is left as it is.

    Raises:
        RequestError: there is no such response.
    """
    stored = _stored(api, request)
    run = stored.run
    if run is not None:
        run.cancel()
        try:
            await asyncio.wait_for(run.ended.wait(), CANCEL_WAIT_S)
        except TimeoutError:
            return JSONResponse(run.snapshot())
        return JSONResponse(run.snapshot())
    return _body(stored)


async def delete(api: Api, request: Request) -> Response:
    """Forgets a response; one that runs is cancelled.

    Raises:
        RequestError: there is no such response.
    """
    stored = _stored(api, request)
    api.serving().store.remove(stored.response_id)
    if stored.run is not None:
        stored.run.unkept()
        stored.run.cancel()
    return JSONResponse({"id": stored.response_id, "object": "response", "deleted": True})


async def compact(_: Api, __: Request) -> Response:
    """Refuses what OpenAI's clients may ask for before they sum a conversation up themselves.

    Raises:
        RequestError: in any case.
    """
    raise Refusal("no_compaction")


def _stored(api: Api, request: Request) -> StoredResponse:
    return api.serving().store.named(request.path_params["response_id"], (owner_of(request),))


def _body(stored: StoredResponse) -> Response:
    if stored.run is not None:
        return JSONResponse(stored.run.snapshot())
    if stored.body is None:
        raise Refusal("response_not_found.unkept", param="response_id", response=show(stored.response_id))
    return Response(stored.body, media_type="application/json")


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
