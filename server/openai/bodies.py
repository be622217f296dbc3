"""Bodies of HTTP requests: read, decoded, and validated by pydantic models whose fields say what becomes of them.

A field of a model is supported unless it is marked: `Ignored` changes nothing here whatever its value, `Neutral` is legal only at values
that change nothing. A field that no model has is refused: what a client asks for and does not get must not go unnoticed. A field that is
null counts as absent.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from ...graphs.errors import ProtocolError, RequestError
from ..requests.fields import MAX_PARAM_CHARS, show
from ..requests.frames import decode_json

MAX_BODY_BYTES = 4 * 2**20


class Body(BaseModel):
    """A request body; values are of the declared types, and are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


@dataclass(frozen=True)
class Neutral:
    """Marks a field that is legal at values that change nothing.

    Attributes:
        values: these; none at all where only absence is neutral.
        why: what it would take to support it.
    """

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Ignored:
    """Marks a field that changes nothing here.

    Attributes:
        why: why that is no loss.
    """

    why: str


class FailFast(pydantic.FailFast):
    """Marks a list that is refused at its first wrong item: a body can hold a million. Unlike pydantic's, it may be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


B = TypeVar("B", bound=Body)


def mark_of(model: type[Body], name: str) -> Neutral | Ignored | None:
    """The mark of a field; None where it is supported."""
    return next((mark for mark in model.model_fields[name].metadata if isinstance(mark, (Neutral, Ignored))), None)


async def read_json(request: Request, max_bytes: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The body of a request, a JSON object.

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
    try:
        body = decode_json(data.removeprefix(codecs.BOM_UTF8), "the body")
    except ProtocolError as error:
        raise RequestError(str(error), code=error.code) from None
    if not isinstance(body, dict):
        raise RequestError(f"the body is {show(body)}; legal is a JSON object", code="not_an_object")
    return body


def validate(model: type[B], body: dict[str, Any], where: str) -> B:
    """A body as a model.

    Args:
        where: the path that it was sent to, for errors.

    Raises:
        RequestError: naming the field, what it is, and what is legal.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in model.model_fields:
            legal = ", ".join(model.model_fields)
            raise RequestError(f"{where} has no field {show(name)}; it has {legal}", param=name[:MAX_PARAM_CHARS], code="unknown_field")
        mark = mark_of(model, name)
        if isinstance(mark, Neutral) and not any(_same(value, neutral) for neutral in mark.values):
            legal = ", ".join([*(json.dumps(neutral) for neutral in mark.values), "absent"])
            message = f"{name} is {show(value)}, which is not supported ({mark.why}); legal is {legal}"
            raise RequestError(message, param=name, code="unsupported_value")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error, where) from None
    except RecursionError:
        raise RequestError(f"the body for {where} is nested too deep", code="invalid_field") from None


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _first_error(error: ValidationError, where: str) -> RequestError:
    """The first of pydantic's errors as a short message; of a union, the alternative that got furthest."""
    errors = error.errors(include_url=False)
    depth = max(len(entry["loc"]) for entry in errors if entry["loc"][:1] == errors[0]["loc"][:1])
    first = next(entry for entry in errors if len(entry["loc"]) == depth)
    name = _path(first["loc"])[:MAX_PARAM_CHARS]
    if first["type"] == "missing":
        return RequestError(f"{name} is missing in the body for {where}", param=name, code="missing_field")
    if first["type"] == "extra_forbidden":
        return RequestError(f"{name} is not a field that {where} has", param=name, code="unknown_field")
    # Where several types are legal there is an error for each.
    peers = [entry for entry in errors if len(entry["loc"]) == depth and _path(entry["loc"])[:MAX_PARAM_CHARS] == name]
    legal = " or ".join(dict.fromkeys(map(_legal, peers)))
    return RequestError(f"{name} is {show(first['input'])}; legal is {legal[:300]}", param=name, code="invalid_field")


def _legal(error: Mapping[str, Any]) -> str:
    """What is legal in place of a value."""
    if error["type"] in _LEGAL:
        return _LEGAL[error["type"]].format_map(error.get("ctx", {}))
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")


_OBJECT, _INTEGER = "an object", "an integer"
_LEGAL: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
"""What pydantic's errors say in its own words, which are Python's."""


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content`; names of the alternatives of a union, which are types, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or "body"
