"""Bodies of requests and messages, validated by pydantic models whose fields say what becomes of them.

A field of a model is supported unless it is marked: `Ignored` changes nothing here whatever its value, `Neutral` is legal only at values
that change nothing. A field that no model has is refused: what a client asks for and does not get must not go unnoticed. A field that is
null counts as absent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError

from .fields import MAX_PARAM_CHARS, FieldError, near, show


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


HINT = "a hint, which changes no answer here"
"""Why fields within messages, parts, calls and tools are ignored, as such fields of a body are."""


class FailFast(pydantic.FailFast):
    """Marks a list that is refused at its first wrong item: a body can hold a million. Unlike pydantic's, it may be part of a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


B = TypeVar("B", bound=Body)


@functools.cache
def marks(model: type[Body]) -> Mapping[str, Neutral | Ignored | None]:
    """Fields of a model with their marks; None for those that are supported."""
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, (Neutral, Ignored))), None)
        for name, field in model.model_fields.items()
    }


def validate(model: type[B], body: dict[str, Any], where: str) -> B:
    """A body as a model.

    Args:
        where: the path that it was sent to, or the type of its message, for errors.

    Raises:
        FieldError: naming the field, what it is, and what is legal.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    known = marks(model)
    for name, value in fields.items():
        if name not in known:
            # What a field asks for, before what is accepted and asks for nothing.
            names = sorted(known, key=lambda field: isinstance(known[field], Neutral))
            legal = near(name, names) or f"it has {', '.join(names)}"
            raise FieldError(f"{where} has no field {show(name)}; {legal}", param=name[:MAX_PARAM_CHARS], code="unknown_field")
        mark = known[name]
        if isinstance(mark, Neutral) and not any(_same(value, neutral) for neutral in mark.values):
            legal = ", ".join([*(json.dumps(neutral) for neutral in mark.values), "absent"])
            message = f"{name} is {show(value)}, which is not supported ({mark.why}); legal is {legal}"
            raise FieldError(message, param=name, code="unsupported_value")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error, model, where) from None
    except RecursionError:
        raise FieldError(f"the body for {where} is nested too deep", param="body") from None


def checked(model: type[B], value: Any, where: str) -> B:
    """Part of a body as a model; `where` it is.

    Raises:
        FieldError: as `validate`.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, model, where, where) from None


@functools.cache
def _names(model: type[Body]) -> tuple[str, ...]:
    """Names of the fields of a model, and of those within it."""
    inner = [name for field in model.model_fields.values() for part in _models(field.annotation) for name in _names(part)]
    return tuple(dict.fromkeys([*model.model_fields, *inner]))


def _models(annotation: Any) -> list[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _first_error(error: ValidationError, model: type[Body], where: str, at: str = "") -> FieldError:
    """The first of pydantic's errors as a short message; of a union, the alternative that got furthest."""
    errors = error.errors(include_url=False)
    depth = max(len(entry["loc"]) for entry in errors if entry["loc"][:1] == errors[0]["loc"][:1])
    first = next(entry for entry in errors if len(entry["loc"]) == depth)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        # Of a reader of our own, which knows best where in the value it is.
        return cause
    name = _path(first["loc"], at)[:MAX_PARAM_CHARS]
    if first["type"] == "missing":
        return FieldError(f"{name} is missing in the body for {where}", param=name, code="missing_field")
    if first["type"] == "extra_forbidden":
        meant = near(str(first["loc"][-1]), _names(model))
        return FieldError(f"{name} is not a field that {where} has{'; ' * bool(meant)}{meant}", param=name, code="unknown_field")
    # Where several types are legal there is an error for each.
    peers = [entry for entry in errors if len(entry["loc"]) == depth and _path(entry["loc"], at)[:MAX_PARAM_CHARS] == name]
    legal = " or ".join(dict.fromkeys(map(_legal, peers)))
    return FieldError(f"{name} is {show(first['input'])}; legal is {legal[:300]}", param=name)


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
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "string_too_short": "a string that is not empty",
    "string_too_long": "a string of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
"""What pydantic's errors say in its own words, which are Python's."""


def _path(location: Sequence[int | str], path: str = "") -> str:
    """`messages[0].content` below a path; names of the alternatives of a union, which are types, are left out."""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[:1].isupper() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path or "body"
