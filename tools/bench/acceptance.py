"""Turns execution records into how many drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.request import ExecutionRecord


def length(records: Sequence[ExecutionRecord]) -> float | None:
    """Tokens for each step of a request that verified drafts, over all requests; None where none did."""
    steps = _steps(records)
    return 1 + sum(sum(record.accepted_per_position) for record in records) / steps if steps else None


def rates(records: Sequence[ExecutionRecord]) -> list[float]:
    """For each place, the share of those steps that accepted the draft there; empty where there were none."""
    steps = _steps(records)
    return [sum(place) / steps for place in zip(*(record.accepted_per_position for record in records), strict=True)] if steps else []


def _steps(records: Sequence[ExecutionRecord]) -> int:
    return sum(record.verify_steps for record in records)
