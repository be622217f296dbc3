"""The messages of clients on the websocket, validated.

It is the websocket mode of OpenAI's Responses API (`/v1/responses`), with `response.cancel` and `response.resume` beside it. This module
does no I/O: `frames` turns bytes into messages, `connection` holds the state of a socket, `websocket` moves its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from ...graphs.errors import ProtocolError
from ..requests.bodies import Body, validate
from ..requests.bounds import MAX_STREAM_ID_CHARS
from ..requests.create_body import ResponseCreate, StreamId, read_create
from ..requests.fields import FieldError, refuse_unknown, show


class ResponseCancel(Body):
    """`response.cancel`: end a live response, named by `response_id`, `stream_id` or both."""

    response_id: StreamId | None = None
    stream_id: StreamId | None = None


class ResponseResume(Body):
    """`response.resume`: follow a response that another connection started, from an event on.

    Attributes:
        stream_id: the lane in which its events come; None is the lane without a name.
        starting_after: sequence number of the last event that the client has; -1 for none.
    """

    response_id: StreamId = ""
    stream_id: StreamId | None = None
    starting_after: Annotated[int, Field(ge=-1)] = -1


class ResponseSteer(Body):
    """`response.steer`: input for a response that runs."""

    previous_response_id: StreamId = ""
    input: Any = None


ClientEvent = ResponseCreate | ResponseCancel | ResponseResume | ResponseSteer


def parse(message: Mapping[str, Any]) -> ClientEvent:
    """Validates one decoded message.

    Raises:
        ProtocolError: missing_type or unknown_type.
        FieldError: a field is missing, unknown, or has an illegal value.
    """
    kind = message.get("type")
    if not isinstance(kind, str):
        code = "missing_type" if kind is None else "unknown_type"
        raise ProtocolError(f"message type is {show(kind)}; legal types are {sorted(_PARSERS)}", code=code)
    parser = _PARSERS.get(kind)
    if parser is None:
        raise ProtocolError(f"unknown message type {show(kind)}; legal types are {sorted(_PARSERS)}", code="unknown_type")
    try:
        return parser({name: value for name, value in message.items() if name != "type"})
    except FieldError as error:
        error.stream_id = _readable_stream_id(message)
        raise


def _readable_stream_id(message: Mapping[str, Any]) -> str | None:
    nested = message.get("response")
    candidates = (message.get("stream_id"), nested.get("stream_id") if isinstance(nested, Mapping) else None)
    return next((c for c in candidates if isinstance(c, str) and 0 < len(c) <= MAX_STREAM_ID_CHARS), None)


def _parse_create(fields: dict[str, Any]) -> ResponseCreate:
    body = _flatten(fields)
    if body.get("stream") not in (None, True):
        raise FieldError(f"stream is {show(body['stream'])}; a websocket always streams, legal is true or absent", param="stream")
    if body.get("background") is True:
        raise FieldError(
            "background is true; on a websocket legal is false, and resumable: true for what is to outlive it", param="background"
        )
    return read_create(body)


def _flatten(fields: dict[str, Any]) -> dict[str, Any]:
    """The body, which is at top level or under `response`."""
    if "response" not in fields:
        return fields
    outer = {name: value for name, value in fields.items() if name != "response"}
    inner = fields["response"]
    if not isinstance(inner, dict):
        raise FieldError(f"response is {show(inner)}; legal is an object holding the body", param="response")
    refuse_unknown(outer, ("response", "stream_id"), "response.create with a nested body")
    if "stream_id" in outer and "stream_id" in inner and outer["stream_id"] != inner["stream_id"]:
        both = f"{show(outer['stream_id'])} at top level, {show(inner['stream_id'])} under response"
        raise FieldError(f"stream_id is {both}; legal is one of them", param="stream_id")
    return {**outer, **inner}


def _parse_cancel(fields: dict[str, Any]) -> ResponseCancel:
    cancel = validate(ResponseCancel, fields, "response.cancel")
    if cancel.response_id is None and cancel.stream_id is None:
        raise FieldError(f"response.cancel names no response; legal is one of {list(ResponseCancel.model_fields)}", param="response_id")
    return cancel


def _parse_resume(fields: dict[str, Any]) -> ResponseResume:
    resume = validate(ResponseResume, fields, "response.resume")
    if not resume.response_id:
        raise FieldError("response.resume names no response; legal is the response_id of one that runs or is kept", param="response_id")
    return resume


def _parse_steer(fields: dict[str, Any]) -> ResponseSteer:
    steer = validate(ResponseSteer, fields, "response.steer")
    if not steer.previous_response_id:
        raise FieldError("response.steer names no response; legal is the id of one that runs", param="previous_response_id")
    return steer


_PARSERS: Mapping[str, Callable[[dict[str, Any]], ClientEvent]] = {
    "response.create": _parse_create,
    "response.cancel": _parse_cancel,
    "response.resume": _parse_resume,
    "response.steer": _parse_steer,
}
