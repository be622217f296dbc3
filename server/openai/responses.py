"""`/v1/responses` over HTTP: the events of the websocket as server-sent events, or the response that the last one has.

Other than on the websocket, a text is a message of the user, and sampling that is not set is OpenAI's, as everywhere over HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ..engine.prompts import reading
from ..engine.service import Service
from ..guard.work import off_loop, work
from ..requests.create_body import ResponseCreate, read_create
from ..requests.fields import FieldError
from ..response.events import ServerEvent, error_event
from ..response.prepare import Owners, continued, keeping, prepare
from ..response.run import ResponseRun
from .api import Api, client_of, defaults, owner_of
from .errors import EngineTimeout
from .event_reader import EventReader
from .live import MAX_WAITING
from .sse import EventStream, Frames, frame, whole


async def responses(api: Api, body: dict[str, Any], request: Request) -> Response:
    """Answers a request.

    Raises:
        ProtocolError: the body is not legal.
        RequestError: it cannot be served.
    """
    service = api.service()
    fields = {name: value for name, value in body.items() if value is not None}
    create = _create(fields, service)
    streams = bool(create.fields.stream)
    _check_stream_options(fields.get("stream_options", {}), streams)
    # What is read of them may be megabytes of pictures.
    fields.clear()
    body.clear()
    owner = owner_of(request)
    owners = Owners(owner)
    what_is_kept = keeping(service, create, owners)
    whole_body, response_id = await continued(service, create, owners), service.new_response_id()
    async with reading(service, whole_body.pictures, create.fields.mm_processor_kwargs, client_of(request), create.fields.n) as read:
        prepared = await off_loop(whole_body.takes_long, lambda: prepare(service, whole_body, response_id, pictures=read))
    run = ResponseRun(service, prepared, what_is_kept, on_end=lambda: api.live.pop((owner, response_id), None))
    reader = EventReader(service, MAX_WAITING if streams else None)
    reader.follow(run)
    waits = streams or not create.fields.background
    run.start(reader if waits else None, client_of(request))
    work.get().admitted()
    if not run.ended.is_set():
        api.live[owner, response_id] = run
    if not waits:
        return JSONResponse(run.snapshot())
    if streams:
        return EventStream(reader, EventFrames())
    response = (await whole(reader, request.receive))[-1]["response"]
    failure = response["error"] or {}
    if failure.get("code") == "timeout" and not response["usage"]["output_tokens"]:
        raise EngineTimeout(failure["message"])
    if failure.get("code") == "draining":
        raise RequestError(failure["message"], code="draining")
    return JSONResponse(response)


async def render_responses(api: Api, body: dict[str, Any], request: Request) -> Response:
    """Token ids of the prompt, in vLLM's answer; vllm-router asks for them before each request.

    Raises: as `responses`.
    """
    service = api.serving()
    create = _create({name: value for name, value in body.items() if value is not None and name != "stream_options"}, service)
    whole_body = await continued(service, create, Owners(owner_of(request)))
    prepared = await off_loop(whole_body.takes_long, lambda: prepare(service, whole_body, service.new_response_id()))
    return JSONResponse({"token_ids": [token for engine_request in prepared.requests[:1] for token in engine_request.prompt]})


class EventFrames(Frames[ServerEvent]):
    """The events of a response as frames."""

    def feed(self, events: Sequence[ServerEvent]) -> list[bytes]:
        return [frame(event, event["type"]) for event in events]

    def end(self) -> list[bytes]:
        return []

    def fault(self, error: Exception) -> list[bytes]:
        return [frame(error_event(error), "error")]


def _create(fields: dict[str, Any], service: Service) -> ResponseCreate:
    own = {name: value for name, value in fields.items() if name != "stream_options"}
    if "stream_id" in own:
        raise FieldError("stream_id is for websockets; over HTTP a connection has one stream", param="stream_id", code="unknown_field")
    create = read_create(defaults(service) | own)
    if isinstance(create.prompt, str):
        return create.after(())
    return create


def _check_stream_options(options: Any, streams: bool) -> None:
    # Nothing is padded; padding is no part of an answer.
    if isinstance(options, dict) and options.keys() <= {"include_obfuscation"} and all(type(value) is bool for value in options.values()):
        return
    legal = '{"include_obfuscation": true or false}' if streams else "absent, as stream is false"
    raise FieldError(f"stream_options is {options!r:.200}; legal is {legal}", param="stream_options")
