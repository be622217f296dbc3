"""Log probabilities in OpenAI's format.

Extension: each object has a `token_id`, because several tokens may have the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...runtime.request import Logprobs
from .token_text import TokenText

LEAST_LOGPROB = -9999.0
"""OpenAI's value for tokens that are practically impossible; JSON has no -inf."""


def token_objects(token_text: Callable[[int], TokenText], token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
    """One object per token for an `output_text` part: with `bytes`, and `top_logprobs` with the most likely token first.

    Raises:
        ValueError: `logprobs` has not one entry per token.
    """
    return [
        {**_object(token_text, token_id, entry.logprob), "top_logprobs": [_object(token_text, *likely) for likely in entry.top]}
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def finite(logprob: float) -> float:
    """A log probability that JSON has."""
    return max(logprob, LEAST_LOGPROB)


def prompt_entries(
    token_text: Callable[[int], TokenText], prompt: Sequence[int], logprobs: Sequence[Logprobs], most: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs` (vllm/logprobs.py): at each position of a prompt its token and the most likely ones, by id; null at the
    first. `rank` is from 1, and null for a token of the prompt that is not among the most likely ones, whose rank is not computed.

    Args:
        logprobs: of the tokens behind the first.
        most: how many of the most likely tokens are listed.
    """

    def shown(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(token).text}

    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token, entry in zip(prompt[1:], logprobs, strict=False):
        ranks = {likely: rank for rank, (likely, _) in enumerate(entry.top, start=1)}
        listed = {token: entry.logprob, **dict(entry.top[:most])}
        entries.append({str(one): shown(one, value, ranks.get(one)) for one, value in listed.items()})
    return entries


def without_bytes(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same objects for text events, in which OpenAI has no `bytes`."""
    return [_bare(entry) | {"top_logprobs": [_bare(likely) for likely in entry["top_logprobs"]]} for entry in objects]


def _object(token_text: Callable[[int], TokenText], token_id: int, logprob: float) -> dict[str, Any]:
    text, data = token_text(token_id)
    return {"token": text, "token_id": token_id, "bytes": [*data], "logprob": logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB}


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    # Written out: with a hundred thousand of these a second a comprehension takes three times as long.
    return {"token": entry["token"], "token_id": entry["token_id"], "logprob": entry["logprob"]}
