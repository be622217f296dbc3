"""runtime/scheduler/checkpoints.py: places are page boundaries that save more than their step costs, and slots are never promised twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.scheduler.checkpoints import CheckpointSlots, Chunk, places
from npucompile.runtime.scheduler.prefix_blocks import Block, Checkpoint, Match


def match(known: int, depth: int, tail: int = 0) -> Match:
    """So many blocks are known, with a state behind the first `depth`, or behind part of a page more."""
    blocks = tuple(Block(b"", None, 0, number, 16) for number in range(known))
    if depth:
        blocks[depth - 1].checkpoint = Checkpoint(1)
    return Match(blocks, known, Block(b"", None, 0, known, tail)) if tail else Match(blocks, depth)


def test_a_prompt_is_kept_where_it_parts_from_others_and_at_its_end():
    assert places(match(0, 0), 100, 16, 8) == (96,)
    assert places(match(3, 0), 100, 16, 8) == (48, 96)
    # It begins where it parts; the last page boundary is never the whole prompt.
    assert places(match(3, 3), 96, 16, 8) == (80,)
    assert places(match(6, 0), 100, 16, 8) == (96,)


def test_what_begins_behind_a_tail_is_kept_once_much_has_come_since_the_last_state_between_two_pages():
    ended = match(3, 2, 7)
    assert ended.num_tokens(16) == 55
    assert ended.without_tail() == ended._replace(tail=None, depth=2)
    assert [places(match(3, 2, 7), tokens, 16, 32) for tokens in (60, 96, 97)] == [(), (), (96,)]
    # All that is known lies before the tail: a chunk cannot end there.
    assert places(match(3, 0, 7), 60, 16, 32) == ()
    assert places(match(4, 0, 7), 73, 16, 32) == ()


def test_a_place_that_saves_too_little_is_none():
    assert places(match(1, 0), 20, 16, 32) == (16,)
    assert places(match(1, 0), 20, 16, 33) == ()
    assert [places(match(0, 0), tokens, 16, 32) for tokens in (64, 65)] == [(), (64,)]


@given(st.integers(1, 8), st.integers(1, 60), st.floats(1, 40), st.data())
def test_places_are_page_boundaries_within_the_prompt(page_size: int, num_tokens: int, step_tokens: float, data: st.DataObject) -> None:
    known = data.draw(st.integers(0, (num_tokens - 1) // page_size))
    depth = data.draw(st.integers(0, known))
    found = places(match(known, depth), num_tokens, page_size, step_tokens)
    assert list(found) == sorted(set(found))
    assert all(place % page_size == 0 and depth * page_size < place < num_tokens for place in found)


def test_a_chunk_that_ends_between_pages_anyway_takes_a_slot_that_nothing_is_kept_in():
    slots = CheckpointSlots(4, available=3, unused=2)
    assert slots.stop((8,)) == 8
    assert slots.chunk(0, 8, 99, most=99) == Chunk(8, checkpoint=True)
    assert slots.chunk(0, 0, 99, most=8) == Chunk(8, checkpoint=True)
    assert slots.chunk(0, 0, 99, most=6) == Chunk(6, checkpoint=False)
    assert slots.chunk(0, 0, 8, most=8) == Chunk(8, checkpoint=False)
    assert slots.chunk(4, 0, 99, most=4) == Chunk(4, checkpoint=True)
    # Two of three are taken, one is promised.
    assert slots.chunk(4, 0, 99, most=4) == Chunk(4, checkpoint=False)


def test_without_a_slot_a_chunk_goes_on():
    slots = CheckpointSlots(4, available=1, unused=1)
    assert [slots.stop((8,)), slots.stop((8,))] == [8, 0]
    assert slots.chunk(0, 0, 99, most=16) == Chunk(16, checkpoint=False)
    assert slots.chunk(0, 8, 99, most=4) == Chunk(4, checkpoint=False)
