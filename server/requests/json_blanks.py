"""Blanks within JSON that a grammar forces: few by default, as a model that likes blanks would write them up to the end of its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIONS = "x-guidance"
"""The key of a schema under which llguidance finds how its JSON is written."""

ONE_SPACE = {"whitespace_pattern": "[ ]?"}
"""At most a space between two parts of the JSON, so that both `{"a": 1}` and `{"a":1}` are legal."""


def with_blanks(schema: Mapping[str, Any], options: Mapping[str, Any] = ONE_SPACE, /, **others: Any) -> dict[str, Any]:
    """A schema with options of its own, or where it does not say which blanks are legal, with those.

    Args:
        schema: JSON.
        options: which blanks are legal.
        others: further options, for which the schema's own go too.
    """
    own = schema.get(OPTIONS, {})
    if not isinstance(own, Mapping):
        return dict(schema)
    says = own.keys() & {"whitespace_pattern", "whitespace_flexible"}
    return {**schema, OPTIONS: {**others, **({} if says else options), **own}}
