"""The usage object of a response, in OpenAI's format.

Extensions: `input_tokens_details.image_tokens` where the prompt has pictures, as OpenAI's chats have it. `npucompile` has the execution
record of a single completion, or for several {"completions": [...]}, their records in the order of the output items, each with its
`output_tokens`. A record has the fields of `runtime.request.ExecutionRecord`, `decode_steps` as an object, and `acceptance_length` (tokens
per verify step, or null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.request import ExecutionRecord
from ..engine.output_stream import Usage


def usage_object(completions: Sequence[Usage]) -> dict[str, Any]:
    """The usage of a response with at least one completion.

    The shared prompt counts once; `cached_tokens` are the prompt tokens that none of the completions prefilled, `cache_write_tokens` those
    that one of them was the first to have computed, and that are kept for later prompts.
    """
    input_tokens = completions[0].input_tokens
    output_tokens = sum(usage.output_tokens for usage in completions)
    records = [_record_object(usage.record) for usage in completions]
    several = [{"output_tokens": usage.output_tokens, **record} for usage, record in zip(completions, records, strict=True)]
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": min(usage.record.cached_tokens for usage in completions),
            "cache_write_tokens": min(input_tokens, sum(usage.record.cache_write_tokens for usage in completions)),
        }
        | ({"image_tokens": completions[0].image_tokens} if completions[0].image_tokens else {}),
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in completions)},
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
