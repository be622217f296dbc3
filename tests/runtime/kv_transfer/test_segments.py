"""Bytes that arrive are those of the pages that were sent, and no others change."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.kv_transfer.layout import LayoutError, Region
from npucompile.runtime.kv_transfer.segments import batches, segments


def pool(name: str, axis: str, count: int, stride: int, item: int, address: int) -> Region:
    return Region(name, axis, "int8", (item,), item, stride, count, address, True)


@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 9), st.integers(1, 64))
def test_exactly_the_items_arrive(randoms: random.Random, count: int, most_segments: int, most_bytes: int) -> None:
    source_count, target_count = randoms.randint(count + 1, 60), randoms.randint(count + 1, 60)
    # A pool of whole items, and one of which the beginning of each travels, with other strides on either side.
    layouts = [("a.k", "pages", 4, 4, 4), ("a.conv", "slots", 3, 7, 5)]
    sources, targets, at = [], [], [16, 16]
    for name, axis, item, source_stride, target_stride in layouts:
        sources.append(pool(name, axis, source_count, source_stride, item, at[0]))
        targets.append(pool(name, axis, target_count, target_stride, item, at[1]))
        at = [at[0] + sources[-1].nbytes, at[1] + targets[-1].nbytes]
    sent = bytes(randoms.randrange(1, 256) for _ in range(at[0]))
    received = bytearray(at[1])
    runs = randoms.random() < 0.5
    numbers = [range(1, count + 1)] * 2 if runs else [randoms.sample(range(1, n), count) for n in (source_count, target_count)]
    pairs = {"pages": list(zip(*numbers, strict=True)), "slots": [(numbers[0][0], numbers[1][0])]}
    plan = segments(sources, targets, pairs)
    assert not runs or len(plan) == 2
    for batch in batches(plan, most_segments, most_bytes):
        assert len(batch) <= most_segments
        assert sum(part.nbytes for part in batch) <= most_bytes
        for source, target, nbytes in batch:
            assert not any(received[target : target + nbytes])
            received[target : target + nbytes] = sent[source : source + nbytes]
    expected = bytearray(at[1])
    for source, target in zip(sources, targets, strict=True):
        for here, there in pairs[source.axis]:
            begin, end = source.address + here * source.stride_bytes, target.address + there * target.stride_bytes
            expected[end : end + source.item_bytes] = sent[begin : begin + source.item_bytes]
    assert received == expected


@pytest.mark.parametrize(("here", "there"), list(itertools.product((0, 1, 7, 8, -1), (0, 1, 7, 8))))
def test_numbers_outside_of_a_pool_are_refused(here, there):
    region = pool("k", "pages", 8, 4, 4, 64)
    if here in (1, 7) and there in (1, 7):
        assert segments([region], [region], {"pages": [(here, there)]}) == [(64 + 4 * here, 64 + 4 * there, 4)]
        return
    with pytest.raises(LayoutError, match="legal are 1 to 7"):
        segments([region], [region], {"pages": [(here, there)]})
