"""Turns a finished build into what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """What a build did.

    Attributes:
        seconds: wall time of all of it.
        ready_seconds: wall time until the artifact could serve, eagerly at least.
        compiled: bucket name to compile seconds, for graphs that were compiled now.
        reused: names of buckets whose executables were up to date.
    """

    path: Path
    seconds: float
    ready_seconds: float
    compiled: Mapping[str, float]
    reused: tuple[str, ...]
