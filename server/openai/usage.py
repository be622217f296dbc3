"""Usage as OpenAI's completions APIs count it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.output_stream import Usage


def usage_object(completions: Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """The usage of a request.

    Args:
        completions: of each prompt `n`, one after another. A prompt counts once.
    """
    prompts = [completions[first : first + n] for first in range(0, len(completions), n)]
    prompt_tokens = sum(several[0].input_tokens for several in prompts)
    output_tokens = sum(usage.output_tokens for usage in completions)
    # What a stop string or a limit cut off was accepted, and is not in the output.
    accepted = sum(min(usage.output_tokens, sum(usage.record.accepted_per_position)) for usage in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(min(usage.record.cached_tokens for usage in several) for several in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(usage.record.drafted_tokens for usage in completions) - accepted,
        },
    }
