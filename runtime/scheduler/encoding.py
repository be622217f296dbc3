"""Which pictures the next encode step encodes, and in which bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...graphs.types import Bucket
from ..picture_spans import PictureInput
from .picture_ledger import Key, PictureLedger, key_of
from .scheduled_step import GroupStep, ScheduledRequest, ScheduledSegment, ScheduledStep


class PromptChunk(NamedTuple):
    """What a prompt may compute in the next prefill step.

    Attributes:
        row: of the request in an encode step: it computes nothing.
        lacking: pictures that it would read and that have no rows yet.
    """

    row: ScheduledRequest
    lacking: Sequence[PictureInput]


def chunk(ledger: PictureLedger | None, row: ScheduledRequest, most: int) -> PromptChunk:
    """The chunk of a request that computes up to so many tokens."""
    lacking = ledger.lacking(row.request, row.start, most) if ledger is not None and row.request.pictures else ()
    return PromptChunk(row, lacking)


def num_ready(chunks: Iterable[PromptChunk]) -> int:
    """How many prompts come before the first one of a group that lacks rows: nobody overtakes it."""
    count = 0
    for item in chunks:
        if item.lacking:
            break
        count += 1
    return count


def encode_step(
    buckets: Iterable[Bucket], groups: Sequence[Sequence[PromptChunk]], in_time: Callable[[Sequence[Bucket]], Sequence[Bucket]]
) -> ScheduledStep | None:
    """A step that encodes pictures of the first prompts of every group, one that several lack once.

    The largest of the groups' first pictures decides which buckets can hold it. Of those the smallest is taken that holds all; where none
    does, the one of whose patches the largest part is pictures.

    Args:
        buckets: of encode steps.
        in_time: those of some for which there is time.
        groups: the prompts of each that it can go on with or begin, in their order.

    Returns:
        None where nobody lacks rows, or there is no time. Those before the last prompt with a picture in the step are admitted with it, so
        that the order of admissions stays.
    """
    wanted = [_wanted(chunks) for chunks in groups]
    if not any(wanted):
        return None
    first = max(_patches(own[0][1]) for own in wanted if own)
    legal = in_time([bucket for bucket in buckets if bucket.q_len >= first])
    if not legal:
        return None
    bucket = min(legal, key=lambda bucket: _rank(bucket, wanted))
    return ScheduledStep(bucket, tuple(_part(bucket, own, chunks) for own, chunks in zip(wanted, groups, strict=True)))


def _wanted(chunks: Sequence[PromptChunk]) -> list[tuple[int, PictureInput]]:
    """The pictures of a group that have no rows, in the order of its prompts, each with the place of the first that lacks it."""
    wanted: dict[Key, tuple[int, PictureInput]] = {}
    for place, item in enumerate(chunks):
        for picture in item.lacking:
            wanted.setdefault(key_of(picture), (place, picture))
    return list(wanted.values())


def _rank(bucket: Bucket, wanted: Sequence[Sequence[tuple[int, PictureInput]]]) -> tuple[bool, float, int, int]:
    taken = [_taken(bucket, own) for own in wanted]
    whole = all(len(some) == len(own) for some, own in zip(taken, wanted, strict=True))
    patches = sum(_patches(picture) for some in taken for _, picture in some)
    # Shorter segments have less attention. Where several steps follow one another, fewer of more segments read the weights less often.
    return not whole, bucket.tokens if whole else bucket.tokens / patches, bucket.q_len, bucket.batch if whole else -bucket.batch


def _taken(bucket: Bucket, own: Sequence[tuple[int, PictureInput]]) -> list[tuple[int, PictureInput]]:
    return [(place, picture) for place, picture in own if _patches(picture) <= bucket.q_len][: bucket.batch]


def _part(bucket: Bucket, own: Sequence[tuple[int, PictureInput]], chunks: Sequence[PromptChunk]) -> GroupStep:
    taken = _taken(bucket, own)
    if not taken:
        return GroupStep()
    rows = tuple(item.row for item in chunks[: 1 + max(place for place, _ in taken)])
    # A running request holds pages, a waiting one none.
    admitted = tuple(row.request.id for row in rows if not row.state.num_pages)
    segments = tuple(ScheduledSegment(chunks[place].row, picture) for place, picture in taken)
    return GroupStep(rows, admitted=admitted, segments=segments)


def _patches(picture: PictureInput) -> int:
    return len(picture.patches)
