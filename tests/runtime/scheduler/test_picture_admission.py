"""runtime/scheduler/picture_admission.py: pictures that can never be served are refused, and the refusal says what is legal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import toy_device as toy

from npucompile.graphs.errors import RequestError
from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.picture_spans import PictureInput, Span
from npucompile.runtime.request import RECEIVE, SEND, Request
from npucompile.runtime.scheduler.picture_admission import check_pictures

LIMITS = Limits(4, 17, 9, 32, picture_rows=9)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("encode", 1, 24), Bucket("encode", 4, 8))
SIZES = SegmentSizes(2 * toy.PATCH, 4)


def check(
    *pictures: PictureInput, prompt: int = 20, limits: Limits = LIMITS, buckets: Any = BUCKETS, sizes: Any = SIZES, **of: Any
) -> None:
    check_pictures(Request("a", (1,) * prompt, 5, pictures=pictures, **of), limits, buckets, sizes)


def test_what_can_be_served_is() -> None:
    check(toy.picture(0, 2, 3, 1), toy.picture(17, 1, 2, 2))
    # Rows of equal pictures count once.
    check(*(toy.picture(first, 2, 3, 1) for first in (0, 6, 13)))
    check(toy.picture(2, 1, 2, 1), prompt_logprobs=1, prompt_logprobs_from=5)
    still = toy.picture(2, 1, 2, 1)
    check(replace(still, patches=still.patches.repeat(2, 1)))


@pytest.mark.parametrize(
    "pictures, fields, message, code",
    [
        ([(0, 1, 1)], {"sizes": None}, "1 pictures, and these graphs take none; legal is text, or a build with --encode", "no_bucket"),
        ([(0, 1, 1)], {"buckets": BUCKETS[:1]}, "legal is text, or a build with --encode", "no_bucket"),
        ([(0, 1, 1)], {"handover": SEND}, "prompts that are handed over are text", "no_bucket"),
        ([(0, 1, 1)], {"handover": RECEIVE}, "prompts that are handed over are text", "no_bucket"),
        ([(1, 1, 7)], {}, "picture 0 has 28 patches after resizing; the largest encode bucket holds 24", "image_too_large"),
        ([(1, 2, 3), (8, 1, 3)], {}, "the prompt's pictures have 9 rows; the pool of rows holds 8", "too_many_images"),
        ([(17, 1, 3)], {}, "picture 0 stands in tokens 17 to 19 of 20; legal is from 0, .* to 18: the last token is text", None),
        ([(1, 1, 3), (3, 1, 1)], {}, "picture 1 stands in tokens 3 to 3 of 20; legal is from 4, behind the one before", None),
        ([(1, 1, 3)], {"prompt_logprobs": 0, "prompt_logprobs_from": 4}, "legal is a prompt_logprobs_from of at least 5", None),
    ],
)
def test_what_can_never_be_served_is_refused(pictures: Any, fields: Any, message: str, code: str | None) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        check(*(toy.picture(*part, seed) for seed, part in enumerate(pictures)), **fields)
    assert refused.value.code == (code or "invalid_request_error")


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, patches=p.patches[:-1]),
        lambda p: replace(p, patches=p.patches[:, :-1]),
        lambda p: replace(p, grid=(4, 2)),
        lambda p: replace(p, grid=(8, 1)),
        lambda p: replace(p, span=Span(1, 2, 1)),
        lambda p: replace(p, span=Span(1, 0, 2)),
        lambda p: replace(p, span=Span(1, 2, 4)),
    ],
)
def test_patches_grid_and_places_must_agree(change: Any) -> None:
    with pytest.raises(RequestError, match="legal are patches of 6 values, or a frame of them, one for each cell of the grid, and 4 cells"):
        check(change(toy.picture(1, 1, 2, 1)))
