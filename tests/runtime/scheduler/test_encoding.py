"""runtime/scheduler/encoding.py: which pictures an encode step takes, in which bucket, and who is admitted with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import toy_device as toy

from npucompile.graphs.types import Bucket
from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.encoding import PromptChunk, chunk, encode_step, num_ready
from npucompile.runtime.scheduler.picture_ledger import PictureLedger
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.scheduled_step import GroupStep, ScheduledRequest

BUCKETS = tuple(Bucket("encode", *size) for size in ((4, 4), (1, 16), (2, 16), (1, 64)))


def prompt(name: str, *sizes: tuple[int, int], pages: int = 0, most: int = 99) -> PromptChunk:
    """A prompt with pictures of so many tokens and such seeds, a token of text before each, of which a chunk reads up to `most`."""
    pictures, count = [], 0
    for tokens, seed in sizes:
        pictures.append(toy.picture(count + 1, 1, tokens, seed))
        count += 1 + tokens
    state = RequestState(Request(name, (1,) * (count + 1), 1, pictures=tuple(pictures)), 0, 0.0, num_pages=pages)
    return chunk(PictureLedger(99, drafts=False), ScheduledRequest(state, max(pages, 1), 0), most)


def step(
    *groups: Sequence[PromptChunk], buckets: Sequence[Bucket] = BUCKETS
) -> tuple[str, list[list[tuple[str, int]]], list[list[str]]] | None:
    """The bucket; of each group its segments, as requests and seeds; and its rows."""
    made = encode_step(buckets, groups, lambda legal: legal)
    if made is None:
        return None
    segments = [[(s.row.request.id, int(s.picture.digest.split()[0])) for s in part.segments] for part in made.groups]
    return made.bucket.name, segments, [[row.request.id for row in part.rows] for part in made.groups]


def test_a_chunk_lacks_what_it_reads() -> None:
    sizes = ((2, 1), (3, 2))
    assert [len(prompt("a", *sizes, most=most).lacking) for most in (1, 2, 4, 5, 9)] == [0, 1, 1, 2, 2]
    assert not prompt("a").lacking
    assert not chunk(None, prompt("a", *sizes).row, 9).lacking


@pytest.mark.parametrize(
    "sizes, expected",
    [
        # Patches are four a token. The smallest that holds all.
        ([(1, 1)], ("encode-b4-q4", [1])),
        ([(1, 1), (1, 2), (1, 3)], ("encode-b4-q4", [1, 2, 3])),
        ([(1, 1), (4, 2)], ("encode-b2-q16", [1, 2])),
        ([(4, 1)], ("encode-b1-q16", [1])),
        # None holds all: the one with most of a picture in its patches, among those that hold the first.
        ([(1, 1), (1, 2), (4, 3), (4, 4)], ("encode-b4-q4", [1, 2])),
        ([(4, 1), (4, 2), (4, 3)], ("encode-b2-q16", [1, 2])),
        ([(1, 1), (16, 2)], ("encode-b4-q4", [1])),
        ([(16, 1), (1, 2)], ("encode-b1-q64", [1])),
        # One that two prompts lack is encoded once.
        ([(4, 1), (4, 1), (4, 2)], ("encode-b2-q16", [1, 2])),
    ],
)
def test_the_bucket_is_the_one_that_wastes_least(sizes: list[tuple[int, int]], expected: tuple[str, list[int]]) -> None:
    made = step([prompt(f"r{i}", size) for i, size in enumerate(sizes)])
    assert made is not None
    assert (made[0], [seed for _, seed in made[1][0]]) == expected


def test_all_groups_take_the_same_bucket_and_those_without_pictures_take_padding() -> None:
    groups = [prompt("a", (1, 1))], [prompt("b", (4, 2), (1, 3))], [prompt("c")], []
    assert step(*groups) == ("encode-b2-q16", [[("a", 1)], [("b", 2), ("b", 3)], [], []], [["a"], ["b"], [], []])
    made = encode_step(BUCKETS, groups, lambda legal: legal)
    assert made is not None
    assert made.groups[2:] == (GroupStep(), GroupStep())


def test_those_before_a_prompt_are_admitted_with_it() -> None:
    chunks = [prompt("running", pages=1), prompt("text"), prompt("a", (1, 1)), prompt("b", (1, 2)), prompt("later")]
    made = encode_step(BUCKETS[:1], [chunks], lambda legal: legal)
    assert made is not None
    (part,) = made.groups
    assert ([row.request.id for row in part.rows], part.admitted) == (["running", "text", "a", "b"], ("text", "a", "b"))
    assert {row.num_tokens for row in part.rows} == {0}
    assert num_ready(chunks) == 2
    assert num_ready(chunks[:2]) == 2


def test_there_is_none_without_pictures_or_time() -> None:
    assert step([prompt("a")], []) is None
    offered = []

    def in_time(legal: Sequence[Bucket]) -> Sequence[Bucket]:
        offered.append(list(legal))
        return ()

    assert encode_step(BUCKETS, [[prompt("a", (4, 1))]], in_time) is None
    # Those that hold the first picture.
    assert offered == [list(BUCKETS[1:])]
