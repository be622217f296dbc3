"""Turns log probabilities of tokens into objects in OpenAI's shape.

Extension: each of them carries `token_id`, as the text of a token need not tell which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.request import TokenLogprobs
from .token_text import Spelling

LEAST_LOGPROB = -9999.0
"""OpenAI's number for "next to impossible"; JSON has no -inf."""


def token_objects(spell: Callable[[int], Spelling], token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """One object per token, as they stand in an `output_text` part: with `bytes`, and under `top_logprobs` the most likely first.

    Raises:
        ValueError: there is not one of `logprobs` per token.
    """
    return [
        {**_object(spell, token_id, found.logprob), "top_logprobs": [_object(spell, *likely) for likely in found.top]}
        for token_id, found in zip(token_ids, logprobs, strict=True)
    ]


def without_bytes(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, as they stand in events about text, where OpenAI has no bytes."""
    return [{**_bare(entry), "top_logprobs": [_bare(likely) for likely in entry["top_logprobs"]]} for entry in objects]


def _object(spell: Callable[[int], Spelling], token_id: int, logprob: float) -> dict[str, Any]:
    text, data = spell(token_id)
    return {"token": text, "token_id": token_id, "bytes": list(data), "logprob": max(logprob, LEAST_LOGPROB)}


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "bytes"}
