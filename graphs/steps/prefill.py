"""Prefill steps: rows are chunks of prompts; one that ends its prompt samples the first token and drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..types import PICTURE_ROWS, Bucket, Limits
from .inputs import I32, StepInput, request_inputs, request_sizes
from .kind import OF_REQUESTS, SAMPLED, SegmentSizes, StepKind, check_request, price


def _sizes(bucket: Bucket, limits: Limits, _: SegmentSizes | None) -> dict[str, int]:
    return request_sizes(bucket, limits, sampled=1, ahead=0)


def _check(row: Any, bucket: Bucket, limits: Limits, sizes: Mapping[str, int]) -> None:
    length = len(row.tokens)
    if not 1 <= length <= bucket.q_len:
        raise SpecError(f"a row of {length} tokens for {bucket.name}; legal is 1 to {bucket.q_len}")
    check_request(row, row.start + length, limits)
    if row.places is not None:
        first, last = min(row.places.picture_rows), max(row.places.picture_rows)
        if not limits.picture_rows:
            raise SpecError(f"a row with pictures, and the graphs keep {limits.picture_rows} rows of pictures; legal is a row without")
        if not 0 <= first <= last < limits.picture_rows:
            raise SpecError(f"a row with rows of pictures {first} to {last}; legal is 0 to {limits.picture_rows - 1}")


PREFILL = StepKind(
    "prefill",
    batch="prompts",
    inputs=(
        StepInput("tokens", "BQ", I32, "token ids, left-aligned", row="*tokens"),
        StepInput("num_computed_tokens", "B", I32, "tokens of the row's request that are in the cache already", row="start"),
        StepInput("query_lens", "B", I32, "valid tokens of the row; 0 in a row of padding", row="length"),
        StepInput("state_slots_in", "B", I32, "state slot to start from; not read where starts is 0", row="slot_read"),
        StepInput("next_tokens", "B", I32, "prompt token after the row's last one; -1 where it is sampled", -1, "drafts", "next_token"),
        StepInput("positions", "BQX", I32, "position of each token in time, row and column", needs="pictures"),
        # Of one token more than the chunk has: what follows its last one.
        StepInput("picture_rows", "BP", I32, "row of a picture in the token's place; 0 is none", needs="pictures"),
        *request_inputs("slot", "uniform"),
    ),
    outputs=SAMPLED,
    reads=(*OF_REQUESTS, PICTURE_ROWS),
    writes=OF_REQUESTS,
    sizes=_sizes,
    sampled=lambda bucket: 1,
    check=_check,
    cost=price,
    dynamic="BQ",
    # Graphs take a token off and compilers know sizes of 1 apart.
    least=4,
)
