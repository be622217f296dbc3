"""What published deployments measured, and the flags of their launches that `tools/builder/deployments.json` does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """What a row publishes; `accepted` is tokens a step, None without drafts."""

    tpot_ms: float
    ttft_ms: float
    e2e_ms: float
    output_tok_s: float
    accepted: float | None = None


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return table


def facts_of(name: str) -> Mapping[str, Any]:
    """Requests, rate, lengths and flags of a row's benchmark and launch, as far as they are published."""
    return _table().get(name, {})


@cache
def measured() -> Mapping[str, Measured]:
    """What is published, by id."""
    return {name: Measured(**row["measured"]) for name, row in _table().items() if "measured" in row}
