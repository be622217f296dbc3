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
    """What a row publishes; `accepted` is tokens a step. None is what it does not say."""

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    output_tok_s: float | None = None
    accepted: float | None = None


@dataclass(frozen=True)
class MeasuredLoad:
    """A further measurement of a deployment's launch, under another load.

    Attributes:
        deployment: whose launch it was, but for what follows.
        requests: of the run; None where it is not published.
        rate: requests/s.
        prefix: share of the prompt that all prompts have in common.
        drafts, mesh, target, model, quantization, engine, max_running: of its launch, where they are not the deployment's.
        source: where it is published.
    """

    id: str
    deployment: str
    input_len: int
    output_len: int
    concurrency: int
    measured: Measured
    source: str
    requests: int | None = None
    rate: float | None = None
    prefix: float = 0.0
    drafts: int | None = None
    mesh: str | None = None
    target: str | None = None
    model: str | None = None
    quantization: str | None = None
    engine: str | None = None
    max_running: int | None = None


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return table


def facts_of(name: str) -> Mapping[str, Any]:
    """Requests, rate, lengths and flags of a row's benchmark and launch, as far as they are published."""
    return _table().get(name, {})


@cache
def loads() -> Mapping[str, MeasuredLoad]:
    """Loads by id: floors of public nightly tests, below which a run fails, so that what ran may be a few per cent faster."""
    rows = json.loads(Path(__file__).with_name("loads.json").read_text(encoding="utf-8"))
    return {row["id"]: MeasuredLoad(**{**row, "measured": Measured(**row["measured"])}) for row in rows}


@cache
def measured() -> Mapping[str, Measured]:
    """What is published, by the id of a deployment or of a load."""
    rows = {name: Measured(**row["measured"]) for name, row in _table().items() if "measured" in row}
    return rows | {name: load.measured for name, load in loads().items()}
