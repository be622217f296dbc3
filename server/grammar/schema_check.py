"""JSON schemas as a compiler of grammars takes them: without what says nothing about an output, and with numbers that it can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...graphs.errors import RequestError

ANNOTATIONS = frozenset({"default", "example", "examples", "title", "description", "$comment"})
"""Keywords that say nothing about what is legal, so that they may hold anything."""

OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has a schema for each of any names."""

BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
VALUES = frozenset({"const", "enum"})

LEAST, MOST = -(2**63), 2**64 - 1
"""The integers that a grammar has exactly."""


def compilable(schema: Any, param: str) -> Any:
    """The schema without annotations, and with bounds beyond 64 bits as the floating-point numbers that they are nearest to.

    Raises:
        RequestError: another number is beyond 64 bits or no number, a text holds half a surrogate pair, or it is nested too deeply.
    """
    try:
        return _schema(schema, param)
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deeply; legal are about 100 levels", param=param, code="invalid_grammar") from error


def has_half_pair(text: str) -> bool:
    """Whether a text holds half a surrogate pair, which no output can."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def _schema(schema: Any, param: str) -> Any:
    if isinstance(schema, list):
        return [_schema(item, param) for item in schema]
    if not isinstance(schema, Mapping):
        return _scalar(schema, param, "a keyword")
    return {_scalar(key, param, "a name"): _keyword(key, value, param) for key, value in schema.items() if key not in ANNOTATIONS}


def _keyword(key: str, value: Any, param: str) -> Any:
    if key in OF_NAMES and isinstance(value, Mapping):
        return {_scalar(name, param, f"a name of {key}"): _schema(inner, param) for name, inner in value.items()}
    if key in VALUES:
        return _value(value, param, key)
    if key in BOUNDS and type(value) is int and not LEAST <= value <= MOST and abs(value) < 1 << 1023:
        return float(value)
    return _schema(value, param) if isinstance(value, (list, Mapping)) else _scalar(value, param, key)


def _value(value: Any, param: str, key: str) -> Any:
    """A value that the output may be."""
    if isinstance(value, list):
        return [_value(item, param, key) for item in value]
    if isinstance(value, Mapping):
        return {_scalar(name, param, key): _value(item, param, key) for name, item in value.items()}
    return _scalar(value, param, key)


def _scalar(value: Any, param: str, key: str) -> Any:
    if type(value) is int and not LEAST <= value <= MOST:
        problem = f"an integer of {value.bit_length()} bits; legal are those from {LEAST} to {MOST}"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"{value}; legal are finite numbers"
    elif isinstance(value, str) and has_half_pair(value):
        problem = "a text with half a surrogate pair; legal are whole characters"
    else:
        return value
    raise RequestError(f"{param}: {key} holds {problem}", param=param, code="invalid_grammar")
