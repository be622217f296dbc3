"""The inputs of an encode step: pictures, and pairs of frames of videos, in the segments of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import SpecError
from ..graphs.types import Bucket
from ..lowering.artifact.manifest import Manifest
from .picture_spans import PictureInput

CHANNELS = 3
"""Of every picture: they are decoded to RGB."""


class SegmentSizes(NamedTuple):
    """What the encode buckets of an artifact take.

    Attributes:
        patch_dim: values of a patch, of all its channels and frames.
        merged: patches that become one row.
    """

    patch_dim: int
    merged: int

    def frames(self, picture: PictureInput) -> int:
        """How many times the frames of a picture's patches stand in a patch of these buckets: 1 where all are there; 0 where none fit."""
        own = picture.patches.shape[1]
        return self.patch_dim // own if own % CHANNELS == 0 and self.patch_dim % own == 0 else 0


class SegmentRow(NamedTuple):
    """A picture, and the rows of the pool that its rows go to."""

    picture: PictureInput
    rows: Sequence[int]


def segment_sizes(manifest: Manifest) -> SegmentSizes | None:
    """What the encode buckets of an artifact take; None where it has none."""
    entry = next((entry for entry in manifest.graphs if entry.bucket.kind == "encode"), None)
    if entry is None:
        return None
    shapes = {leaf.path: leaf.aval.shape for leaf in entry.inputs}
    (_, patches, width), (_, rows) = shapes["patches"], shapes["picture_rows"]
    return SegmentSizes(width, patches // rows)


def pack_segments(bucket: Bucket, segments: Sequence[SegmentRow], sizes: SegmentSizes) -> dict[str, npt.NDArray[Any]]:
    """`patches` u8 [B, N, patch_dim], `grids` [B, 2] i32 and `picture_rows` [B, N / merged] i32 of a step; 0 in all that is padding.

    A still picture stands in each of the frames of its patches.

    Raises:
        SpecError: the segments do not fit the bucket.
    """
    B, N = bucket.batch, bucket.q_len
    if len(segments) > B:
        raise SpecError(f"{len(segments)} segments for {bucket.name}, which holds {B}")
    patches, grids = np.zeros((B, N, sizes.patch_dim), np.uint8), np.zeros((B, 2), np.int32)
    rows = np.zeros((B, N // sizes.merged), np.int32)
    for i, (picture, own) in enumerate(segments):
        count, frames = len(picture.patches), sizes.frames(picture)
        if count > N or not frames or len(own) * sizes.merged != count:
            what = f"{count} patches of {picture.patches.shape[1]} values for {len(own)} rows"
            raise SpecError(f"a picture of {what}; {bucket.name} takes up to {N} of {sizes.patch_dim}, {sizes.merged} a row")
        by_frame = patches[i, :count].reshape(count, CHANNELS, frames, -1)
        by_frame[:] = picture.patches.reshape(count, CHANNELS, 1, -1)
        grids[i] = picture.grid
        rows[i, : len(own)] = own
    return {"patches": patches, "grids": grids, "picture_rows": rows}
