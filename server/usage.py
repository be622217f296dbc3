"""Turns what completions took into the usage object of their response.

Extension: how they were served lies under `npucompile`. For one completion that is its execution record; for several it is
{"completions": [...]}, the record of each in the order of the output items, with its `output_tokens`. A record is
`runtime.request.ExecutionRecord` by field name, with `decode_steps` as an object and `acceptance_length` (tokens a verify step, or null).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.request import ExecutionRecord


@dataclass(frozen=True)
class Usage:
    """Tokens a completion took, and how it was served."""

    input_tokens: int
    output_tokens: int
    record: ExecutionRecord


def usage_object(completions: Sequence[Usage]) -> dict[str, Any]:
    """The usage of a response with these completions, at least one.

    The prompt they share counts once; `cached_tokens` are those of its tokens that none of them prefilled.
    """
    input_tokens = completions[0].input_tokens
    output_tokens = sum(one.output_tokens for one in completions)
    records = [_record_object(one.record) for one in completions]
    several = [{"output_tokens": one.output_tokens, **record} for one, record in zip(completions, records, strict=True)]
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": min(one.record.cached_tokens for one in completions)},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
        "npucompile": records[0] if len(completions) == 1 else {"completions": several},
    }


def _record_object(record: ExecutionRecord) -> dict[str, Any]:
    return record._asdict() | {
        "prefill_chunks": list(record.prefill_chunks),
        "decode_steps": dict(record.decode_steps),
        "accepted_per_position": list(record.accepted_per_position),
        "acceptance_length": record.acceptance_length,
    }
