"""Refuses requests that can never be served, or whose pictures cannot."""

from __future__ import annotations

from collections.abc import Iterable

from ...graphs.errors import RequestError
from ...graphs.steps.encode import ENCODE, frames
from ...graphs.steps.kind import SegmentSizes
from ...graphs.steps.score import SCORE
from ...graphs.types import Bucket, Limits
from ..executor import Executor, ExecutorFacts
from ..picture_spans import PictureInput
from ..request import Request
from .admission import check, check_kind
from .picture_ledger import to_read


def check_served(request: Request, executor: Executor | ExecutorFacts) -> None:
    """Checks that an executor can serve a request.

    Raises:
        RequestError: it never can.
    """
    check_kind(request, executor.buckets)
    scores = bool(SCORE.among(executor.buckets))
    check(request, executor.limits, executor.vocab_size, executor.max_logprobs, executor.max_ranked, scores=scores)
    if request.pictures:
        check_pictures(request, executor.limits, executor.buckets, executor.segments)


def check_pictures(request: Request, limits: Limits, buckets: Iterable[Bucket], sizes: SegmentSizes | None) -> None:
    """Checks that a request's pictures can be served.

    Args:
        limits, buckets: of the executor.
        sizes: what its encode buckets take; None without any.

    Raises:
        RequestError: they never can be.
    """
    longest = max((bucket.q_len for bucket in ENCODE.among(buckets)), default=0)
    if sizes is None or not longest or not limits.picture_rows:
        message = f"the prompt has {len(request.pictures)} pictures, and these graphs take none; legal is text, or a build with --encode"
        raise _refusal(message, "no_bucket")
    if request.handover:
        raise _refusal("the prompt has pictures, and prompts that are handed over are text; legal is a server that does both", "no_bucket")
    end = 0
    for place, picture in enumerate(request.pictures):
        _check_picture(place, picture, end, len(request.prompt), sizes)
        if len(picture.patches) > longest:
            what = f"picture {place} has {len(picture.patches)} patches after resizing"
            raise _refusal(f"{what}; the largest encode bucket holds {longest}", "image_too_large")
        end = picture.span.end
    needed = sum(picture.span.rows * picture.span.columns for picture in to_read(request.pictures, 0))
    if needed >= limits.picture_rows:
        message = f"the prompt's pictures have {needed} rows; the pool of rows holds {limits.picture_rows - 1}"
        raise _refusal(message, "too_many_images")
    if request.prompt_logprobs is not None and request.prompt_logprobs_from <= end:
        legal = f"legal is a prompt_logprobs_from of at least {end + 1}, behind the last picture"
        message = f"prompt_logprobs_from is {request.prompt_logprobs_from}, and the last picture ends before position {end}; {legal}"
        raise RequestError(message, param="prompt_logprobs")


def _check_picture(place: int, picture: PictureInput, end: int, prompt: int, sizes: SegmentSizes) -> None:
    """Checks a picture against its places and its patches.

    Args:
        end: of the picture before.
        prompt: tokens of the prompt, the last of which is text.
    """
    span, (height, width), shape = picture.span, picture.grid, picture.patches.shape
    if span.first < end or span.end >= prompt:
        where = f"picture {place} stands in tokens {span.first} to {span.end - 1} of {prompt}"
        raise _refusal(f"{where}; legal is from {end}, behind the one before, to {prompt - 2}: the last token is text")
    side = height // span.rows if span.rows > 0 else 0
    tiles = side > 0 and (span.rows * side, span.columns * side, side * side) == (height, width, sizes.merged)
    if not tiles or len(shape) != 2 or shape[0] != height * width or not frames(sizes.patch_dim, shape[1]):
        what = f"picture {place} has patches {list(shape)}, a grid of {height} x {width} and {span.rows} x {span.columns} tokens"
        legal = f"patches of {sizes.patch_dim} values, or a frame of them, one for each cell of the grid, and {sizes.merged} cells a token"
        raise _refusal(f"{what}; legal are {legal}")


def _refusal(message: str, code: str = "invalid_request_error") -> RequestError:
    return RequestError(message, param="pictures", code=code)
