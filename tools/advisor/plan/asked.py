"""What `npucompile plan` is asked, by its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of `plan` by their parameters (tools/commands/plan.py says what each means); None where one is not given.

    Attributes:
        inputs, outputs: lengths, or histograms of them.
        drafts: to try; none are those that the model's rows have.
        file: of parameters that `calibrate` wrote.
    """

    cards: int | None
    target: str
    inputs: str | None
    outputs: str | None
    concurrency: int | None
    requests: int | None
    rate: float | None
    shared_prefix: int
    trace: Path | None
    tpot: float | None
    ttft: float | None
    itl_target: float | None
    quantization: tuple[str, ...]
    drafts: tuple[int, ...]
    accepted: float | None
    expert_map: str | None
    max_buckets: int
    metrics: str | None
    file: Path | None
