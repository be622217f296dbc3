"""Statistics of accepted drafts, from execution records."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.request import ExecutionRecord


def length(records: Sequence[ExecutionRecord]) -> float | None:
    """Acceptance length: mean tokens per step that verified drafts, over all requests; None without such steps."""
    steps = _steps(records)
    return 1 + sum(sum(record.accepted_per_position) for record in records) / steps if steps else None


def rates(records: Sequence[ExecutionRecord]) -> list[float]:
    """Acceptance rates: for each draft position, the share of those steps that accepted the draft; empty without such steps."""
    steps = _steps(records)
    return [sum(counts) / steps for counts in zip(*(record.accepted_per_position for record in records), strict=True)] if steps else []


def _steps(records: Sequence[ExecutionRecord]) -> int:
    return sum(record.verify_steps for record in records)
