"""Encode steps: a vision tower makes rows of pictures, or of pairs of frames of videos, each in a segment of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import SpecError
from ..types import PICTURE_ROWS, Bucket, Limits
from .inputs import I32, StepInput
from .kind import SegmentSizes, StepKind, StepOutput

CHANNELS = 3
"""Of every picture: they are decoded to RGB."""


def frames(patch_dim: int, own: int) -> int:
    """How many times the frames of a picture's patches, of `own` values each, stand in a patch: 1 where all are there; 0 where none fit."""
    return patch_dim // own if own % CHANNELS == 0 and patch_dim % own == 0 else 0


def _sizes(bucket: Bucket, limits: Limits, segments: SegmentSizes | None) -> dict[str, int]:
    """B segments of Q patches of D values, with grids of G sizes, that become R rows each."""
    if segments is None:
        raise SpecError(f"{bucket.name}, and nothing says what its segments are; legal are the sizes of the artifact's")
    B, Q = bucket.batch, bucket.q_len
    return {"B": B, "Q": Q, "D": segments.patch_dim, "G": 2, "R": Q // segments.merged}


def _check(row: Any, bucket: Bucket, limits: Limits, sizes: Mapping[str, int]) -> None:
    (count, own), Q, merged = row.picture.patches.shape, bucket.q_len, bucket.q_len // sizes["R"]
    if count > Q or not frames(sizes["D"], own) or len(row.rows) * merged != count:
        given = f"{count} patches of {own} values for {len(row.rows)} rows"
        raise SpecError(f"a picture of {given}; {bucket.name} takes up to {Q} of {sizes['D']}, {merged} a row")


ENCODE = StepKind(
    "encode",
    batch="segments",
    inputs=(
        StepInput("patches", "BQD", torch.uint8, "patches of the segment, by channel, frame, row and column in each", other=255),
        StepInput("grids", "BG", I32, "rows and columns of patches; 0 in a segment of padding", row="*picture.grid"),
        StepInput("picture_rows", "BR", I32, "row of the pool for each row of a segment; 0, the null row, behind its own", row="*rows"),
    ),
    # 0 where a row of the segment is not finite.
    outputs=(StepOutput("finite", "B", "i"),),
    reads=(),
    writes=(PICTURE_ROWS,),
    sizes=_sizes,
    sampled=lambda bucket: 0,
    check=_check,
    cost=lambda bucket, fixed: float(bucket.tokens),
    tower=True,
)
