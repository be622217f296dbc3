"""The messages of clients on the websocket, validated.

It is the websocket mode of OpenAI's Responses API (`/v1/responses`), with `response.cancel` and `response.resume` beside it. This module
does no I/O: `frames` turns bytes into messages, `connection` holds the state of a socket, `websocket` moves its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...graphs.errors import ProtocolError
from ..requests.bounds import MAX_STREAM_ID_CHARS
from ..requests.create_body import ResponseCreate, read_create
from ..requests.fields import FieldError, integer, optional, refuse_unknown, show, string


@dataclass(frozen=True)
class ResponseCancel:
    """`response.cancel`: end a live response, named by `response_id`, `stream_id` or both."""

    response_id: str | None = None
    stream_id: str | None = None


@dataclass(frozen=True)
class ResponseResume:
    """`response.resume`: follow a response that another connection started, from an event on.

    Attributes:
        stream_id: the lane in which its events come; None is the lane without a name.
        starting_after: sequence number of the last event that the client has; -1 for none.
    """

    response_id: str
    stream_id: str | None = None
    starting_after: int = -1


@dataclass(frozen=True)
class ResponseSteer:
    """`response.steer`: input for a response that runs."""

    response_id: str
    input: Any


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
    if body.get("stream") not in (None, True) or type(body.get("stream")) is int:
        raise FieldError(f"stream is {show(body['stream'])}; a websocket always streams, legal is true or absent", param="stream")
    if body.get("background") is True:
        raise FieldError(
            "background is true; on a websocket legal is false, and resumable: true for what is to outlive it", param="background"
        )
    return read_create({name: value for name, value in body.items() if name != "stream"})


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
    refuse_unknown(fields, _CANCEL_FIELDS, "response.cancel")
    fields = {name: value for name, value in fields.items() if value is not None}
    if not fields:
        raise FieldError(f"response.cancel names no response; legal is one of {list(_CANCEL_FIELDS)}", param="response_id")
    response_id = optional(fields, "response_id", string(MAX_STREAM_ID_CHARS))
    return ResponseCancel(response_id, optional(fields, "stream_id", string(MAX_STREAM_ID_CHARS)))


def _parse_resume(fields: dict[str, Any]) -> ResponseResume:
    refuse_unknown(fields, _RESUME_FIELDS, "response.resume")
    fields = {name: value for name, value in fields.items() if value is not None}
    response_id = optional(fields, "response_id", string(MAX_STREAM_ID_CHARS))
    if response_id is None:
        raise FieldError("response.resume names no response; legal is the response_id of one that runs or is kept", param="response_id")
    starting_after = optional(fields, "starting_after", integer(-1))
    stream_id = optional(fields, "stream_id", string(MAX_STREAM_ID_CHARS))
    return ResponseResume(response_id, stream_id, -1 if starting_after is None else starting_after)


def _parse_steer(fields: dict[str, Any]) -> ResponseSteer:
    refuse_unknown(fields, _STEER_FIELDS, "response.steer")
    response_id = optional(fields, "previous_response_id", string(MAX_STREAM_ID_CHARS))
    if response_id is None:
        raise FieldError("response.steer names no response; legal is the id of one that runs", param="previous_response_id")
    return ResponseSteer(response_id, fields.get("input"))


_CANCEL_FIELDS = ("response_id", "stream_id")
_RESUME_FIELDS = ("response_id", "stream_id", "starting_after")
_STEER_FIELDS = ("previous_response_id", "input")
_PARSERS: Mapping[str, Callable[[dict[str, Any]], ClientEvent]] = {
    "response.create": _parse_create,
    "response.cancel": _parse_cancel,
    "response.resume": _parse_resume,
    "response.steer": _parse_steer,
}
