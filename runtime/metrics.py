"""Turns what the engine does into counters."""

from __future__ import annotations

from typing import Any

from ..graphs.types import Bucket
from .request import FINISH_REASONS


class Metrics:
    """Counters since the engine was made; they only grow. The engine guards them with its lock."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padded_rows = 0
        self.preemptions = 0
        self.failed_steps = 0
        self.bucket_steps: dict[str, int] = {}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)

    def count_step(self, bucket: Bucket, live_rows: int, groups: int = 1) -> None:
        """Counts a step that ran, with its live rows in all of so many dp groups."""
        self.bucket_steps[bucket.name] = self.bucket_steps.get(bucket.name, 0) + 1
        self.padded_rows += groups * bucket.batch - live_rows

    def snapshot(self) -> dict[str, Any]:
        """All counters by public name; nothing in it is shared with this object.

        `prompt_tokens_total` counts each prompt once, when its first token is sampled. `generation_tokens_total` counts
        sampled tokens, stop tokens included. Steps that failed are in `steps_failed_total` and nowhere else.
        """
        return {
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "requests_total": sum(self.finished.values()),
            **{f"requests_finished_{reason}": count for reason, count in self.finished.items()},
            "padded_rows_total": self.padded_rows,
            "preemptions_total": self.preemptions,
            "steps_total": sum(self.bucket_steps.values()),
            "steps_failed_total": self.failed_steps,
            "bucket_steps": dict(sorted(self.bucket_steps.items())),
        }
