"""runtime/scheduler/prefix_blocks.py: what a prompt can start after is its last state, between two pages or where a request ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.scheduler.prefix_blocks import NOTHING, Block, Checkpoint, Match, last_state

PAGE = 4


def blocks_of(states: list[bool]) -> tuple[Block, ...]:
    blocks = tuple(Block(b"", None, number, number, PAGE) for number in range(len(states)))
    for number, (block, has) in enumerate(zip(blocks, states, strict=True)):
        block.checkpoint = Checkpoint(number) if has else None
    return blocks


@given(st.lists(st.booleans(), max_size=6), st.data())
def test_a_match_starts_after_a_state(states: list[bool], data: st.DataObject) -> None:
    blocks = blocks_of(states)
    depth = last_state(blocks, len(blocks))
    assert depth == max((place for place, has in enumerate(states, 1) if has), default=0)
    match = Match(blocks, depth)
    assert match.num_tokens(PAGE) == depth * PAGE
    assert match.checkpoint is (blocks[depth - 1].checkpoint if depth else None)
    assert match.without_tail() is match
    place, length = data.draw(st.integers(depth, len(blocks))), data.draw(st.integers(1, PAGE - 1))
    tail = Block(b"", None, 9, 9, length)
    tail.checkpoint = Checkpoint(9)
    ended = Match(blocks, place, tail)
    assert ended.num_tokens(PAGE) == place * PAGE + length > match.num_tokens(PAGE)
    assert ended.checkpoint is tail.checkpoint
    assert ended.without_tail() == match


def test_pages_that_are_in_use_are_counted_once() -> None:
    blocks = blocks_of([False, True, True])
    blocks[0].users, blocks[1].users = 2, 1
    assert [Match(blocks, depth).pinned_pages for depth in range(4)] == [0, 1, 2, 2]
    assert (NOTHING.checkpoint, NOTHING.num_tokens(PAGE), NOTHING.pinned_pages) == (None, 0, 0)
