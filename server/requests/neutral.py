"""Fields of OpenAI's Responses API that clients send and that change nothing here, and those of which only such values are legal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import FieldError, show

IGNORED: Mapping[str, str] = {
    "user": "the provider's bookkeeping",
    "safety_identifier": "the provider's bookkeeping",
    "prompt_cache_key": "a hint for caches",
    "prompt_cache_retention": "a hint for caches",
    "service_tier": "the provider's bookkeeping",
    "max_tool_calls": "concerns tools of the provider",
}
"""Fields that may have any value, and why."""

NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "truncation": (("disabled",), "prompts are not cut"),
    "prompt": ((), "prompts are not kept"),
    "conversation": ((), "conversations are not kept"),
    "context_management": (([],), "prompts are not cut"),
}
"""Fields of which only these values are legal, and why."""


def without_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something.

    Raises:
        FieldError: a field asks for something that is not supported.
    """
    for name, (legal, why) in NEUTRAL.items():
        if name not in body:
            continue
        value = body[name]
        if isinstance(value, Mapping):
            value = {inner: entry for inner, entry in value.items() if entry is not None}
        if not any(type(value) is type(neutral) and value == neutral for neutral in legal):
            shown = " or ".join([*(_json(neutral) for neutral in legal), "absent"])
            raise FieldError(f"{name} is {show(body[name])}, which is not supported: {why}; legal is {shown}", param=name)
    return {name: value for name, value in body.items() if name not in IGNORED and name not in NEUTRAL}


def _json(value: Any) -> str:
    return "false" if value is False else str(value).replace("'", '"')
