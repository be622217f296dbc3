"""Count of traces and compiles, by which a serving process proves that it makes none."""

from __future__ import annotations

from collections import Counter

_COUNTS: Counter[str] = Counter()


def record(kind: str) -> None:
    """Counts one event, "trace" or "compile", of this process."""
    _COUNTS[kind] += 1


def count() -> int:
    """Traces and compiles of this process so far."""
    return _COUNTS.total()
