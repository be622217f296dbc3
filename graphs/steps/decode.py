"""Decode steps: rows verify drafts, sample, and draft again, from what their request slots say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..types import Bucket, Limits
from .inputs import I32, StepInput, request_inputs, request_sizes
from .kind import OF_REQUESTS, SAMPLED, SegmentSizes, StepKind, StepOutput, check_request, price


def _sizes(bucket: Bucket, limits: Limits, _: SegmentSizes | None) -> dict[str, int]:
    # Of the steps of a request the one before may have been of any width.
    return request_sizes(bucket, limits, sampled=bucket.q_len, ahead=max(limits.drafts, bucket.q_len - 1))


def _check(row: Any, bucket: Bucket, limits: Limits, sizes: Mapping[str, int]) -> None:
    Q, slots, uniforms = bucket.q_len, sizes["L"], sizes["U"]
    if len(row.slots) != slots or 0 < len(row.uniforms) < uniforms:
        given = f"{len(row.slots)} slots and {len(row.uniforms)} uniforms"
        raise SpecError(f"a row of {given} for {bucket.name}; legal is {slots} slots, and {uniforms} uniforms or none")
    if not 0 <= row.drafts < Q:
        raise SpecError(f"a row of {row.drafts} drafts for {bucket.name}; legal is 0 to {Q - 1}")
    # From up to k tokens behind base on the step writes Q candidates, and the draft head the drafts after the last of them.
    check_request(row, min(row.base + limits.drafts + Q, limits.max_model_len), limits)


DECODE = StepKind(
    "decode",
    batch="requests",
    inputs=(
        StepInput("drafts", "B", I32, "how many of the row's drafts are verified, 0 to Q-1", row="drafts"),
        StepInput("base", "B", I32, "smallest position at which the row can start, for all the host knows", row="base"),
        *request_inputs("*slots", "*uniforms"),
    ),
    outputs=(*SAMPLED, StepOutput("counts", "B", "i")),
    reads=OF_REQUESTS,
    writes=OF_REQUESTS,
    sizes=_sizes,
    sampled=lambda bucket: bucket.q_len,
    check=_check,
    cost=price,
    decodes=True,
    ragged=False,
    dynamic="B",
)
