"""runtime/segments.py: pictures stand in the segments of an encode step, stills in all frames, and padding is zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Aval, Bucket, Leaf, Limits
from npucompile.runtime.buckets import pack
from npucompile.runtime.picture_spans import PictureInput, Span
from npucompile.runtime.segments import SegmentRow, SegmentSizes, segment_sizes

BUCKET, SIZES = Bucket("encode", 3, 16), SegmentSizes(patch_dim=24, merged=4)
LIMITS = Limits(4, 9, 9, 16, picture_rows=20)


def picture(rows: int, columns: int, width: int) -> PictureInput:
    patches = np.random.default_rng(width).integers(0, 256, (4 * rows * columns, width)).astype(np.uint8)
    return PictureInput(Span(3, rows, columns), patches, (2 * rows, 2 * columns), b"digest")


def test_a_still_stands_in_all_frames_and_a_frame_pair_as_it_is() -> None:
    still, pair = picture(1, 2, 12), picture(2, 2, 24)
    arrays = pack(BUCKET, [SegmentRow(still, (7, 5)), SegmentRow(pair, (1, 2, 3, 9))], LIMITS, segments=SIZES)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "patches": (np.uint8, (3, 16, 24)),
        "grids": (np.int32, (3, 2)),
        "picture_rows": (np.int32, (3, 4)),
    }
    # By channel, frame, row and column in a patch.
    frames = arrays["patches"][0, :8].reshape(8, 3, 2, 2, 2)
    for frame in range(2):
        assert (frames[:, :, frame] == still.patches.reshape(8, 3, 2, 2)).all()
    assert (arrays["patches"][1] == pair.patches).all()
    assert arrays["grids"].tolist() == [[2, 4], [4, 4], [0, 0]]
    assert arrays["picture_rows"].tolist() == [[7, 5, 0, 0], [1, 2, 3, 9], [0, 0, 0, 0]]
    assert not arrays["patches"][0, 8:].any()
    assert not arrays["patches"][2].any()


@pytest.mark.parametrize(
    "segments, message",
    [
        ([SegmentRow(picture(1, 1, 12), (1,))] * 4, "4 segments for encode-b3-q16, which holds 3"),
        (
            [SegmentRow(picture(1, 5, 12), (1, 2, 3, 4, 5))],
            "20 patches of 12 values for 5 rows; encode-b3-q16 takes up to 16 of 24, 4 a row",
        ),
        ([SegmentRow(picture(1, 1, 9), (1,))], "4 patches of 9 values for 1 rows"),
        ([SegmentRow(picture(1, 2, 24), (1,))], "8 patches of 24 values for 1 rows"),
    ],
)
def test_what_does_not_fit_is_refused(segments: list[SegmentRow], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pack(BUCKET, segments, LIMITS, segments=SIZES)
    with pytest.raises(SpecError, match="nothing says what its segments are"):
        pack(BUCKET, segments, LIMITS)


def test_sizes_are_those_of_the_graphs() -> None:
    class Entry:
        bucket = BUCKET
        inputs = tuple(
            Leaf(f"inputs.{name}", Aval(shape, dtype))
            for name, shape, dtype in [("patches", (3, 16, 24), torch.uint8), ("picture_rows", (3, 4), torch.int32)]
        )

    class Text:
        bucket = Bucket("decode", 1, 1)

    class Manifest:
        graphs = (Text, Entry)

    assert segment_sizes(Manifest) == SIZES  # type: ignore[arg-type]
    Manifest.graphs = (Text,)  # type: ignore[assignment]
    assert segment_sizes(Manifest) is None  # type: ignore[arg-type]
