"""Score steps: as prefill steps, and of each token of a chunk they give the one that follows and its log probability."""

from __future__ import annotations

from dataclasses import replace

from .prefill import PREFILL

SCORE = replace(
    PREFILL,
    name="score",
    # The token behind a chunk is scored whether steps draft or not.
    inputs=tuple(replace(field, needs="") if field.name == "next_tokens" else field for field in PREFILL.inputs),
    outputs=tuple(output._replace(dims=output.dims.replace("W", "Q")) for output in PREFILL.outputs),
)
