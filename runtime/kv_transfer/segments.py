"""Which bytes of a prefill server's memory go where in that of a decode server: runs of neighbouring pages are one segment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .layout import LayoutError, Region
from .transfer_engine import Segment

MOST_SEGMENTS, MOST_BYTES = 500, 256 << 20
"""Of one batch. Mooncake over tcp takes about 2,048 segments to a peer at a time, over all threads, and fails for good beyond."""

Pairs = Mapping[str, Sequence[tuple[int, int]]]
"""By axis of pools: numbers of items on the prefill server, and where each belongs on the decode server."""


def segments(sources: Sequence[Region], targets: Sequence[Region], pairs: Pairs) -> list[Segment]:
    """What one rank writes for a request, pools in their order.

    Args:
        sources: regions of the rank.
        targets: regions of the rank that receives, as the handshake has checked them.
        pairs: the request's pages and its state slot.

    Raises:
        LayoutError: a number is outside of its pool, or is that of the null item. A transfer engine does not notice either.
    """
    by_name = {region.name: region for region in targets}
    result: list[Segment] = []
    for source in sources:
        target, numbers = by_name[source.name], sorted(pairs.get(source.axis, ()))
        for side, region, place in (("source", source, 0), ("target", target, 1)):
            wrong = [pair[place] for pair in numbers if not 0 < pair[place] < region.count]
            if wrong:
                raise LayoutError(f"{side} {source.axis} {wrong[:8]} of {source.name}: legal are 1 to {region.count - 1}")
        whole = source.item_bytes == source.stride_bytes == target.stride_bytes
        for first, last in _runs(numbers) if whole else ((pair, pair) for pair in numbers):
            start = source.address + first[0] * source.stride_bytes, target.address + first[1] * target.stride_bytes
            result.append(Segment(*start, source.item_bytes * (last[0] - first[0] + 1)))
    return result


def batches(all_segments: Sequence[Segment], most_segments: int = MOST_SEGMENTS, most_bytes: int = MOST_BYTES) -> Iterator[list[Segment]]:
    """The same bytes in batches of bounded size; a segment that is longer than a batch is cut."""
    batch, size = list[Segment](), 0
    for segment in all_segments:
        while segment.nbytes:
            if len(batch) == most_segments or size == most_bytes:
                yield batch
                batch, size = [], 0
            nbytes = min(segment.nbytes, most_bytes - size)
            batch.append(segment._replace(nbytes=nbytes))
            size += nbytes
            segment = Segment(segment.source + nbytes, segment.target + nbytes, segment.nbytes - nbytes)
    if batch:
        yield batch


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """First and last pair of each run in which both numbers go up by one."""
    first = last = None
    for pair in pairs:
        if first is None or last is None:
            first = last = pair
        elif pair == (last[0] + 1, last[1] + 1):
            last = pair
        else:
            yield first, last
            first = last = pair
    if first is not None and last is not None:
        yield first, last
