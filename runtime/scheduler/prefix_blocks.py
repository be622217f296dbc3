"""The records of a prefix index: blocks of a page, states after some of them, and what is known of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Checkpoint:
    """A state slot with the recurrent state after some tokens.

    Attributes:
        holds: how many steps to come write or read it.
        block: that it belongs to; None where nothing is known of the state yet, or no more.
    """

    __slots__ = ("block", "holds", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.holds = slot, 0
        self.block: Block | None = None


class Block:
    """A node: the tokens of one page, after those of its parent; or those of a part of one, where a request ended, which is a tail.

    Attributes:
        key: its tokens.
        length: of its page, how many tokens it has.
        tails: those behind it, by length and key.
        depth: pages from the root up to and with this one.
        users: running requests whose page table begins with the pages up to this one.
        last_used: when a request last came or left.
        known: it can be found from the root.
        queued: it is among the leaves to evict.
    """

    __slots__ = (
        "checkpoint", "children", "depth", "key", "known", "last_used", "length", "number", "page", "parent", "queued", "tails", "users",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Block | None, page: int, number: int, length: int) -> None:
        self.key, self.parent, self.page, self.number, self.length = key, parent, page, number, length
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Block] = {}
        self.tails: dict[tuple[int, bytes], Block] = {}
        self.checkpoint: Checkpoint | None = None
        self.users = self.last_used = 0
        self.known, self.queued = True, False


class Match(NamedTuple):
    """What is known of a prompt.

    Attributes:
        blocks: all leading pages that are cached, but for the one with the prompt's last token, which has to be computed.
        depth: how many of them it can start after: all or, where there are recurrent states, those up to the last checkpoint.
        tail: behind those, where another request ended; only one can go on from there, and takes its page and its state.
    """

    blocks: tuple[Block, ...] = ()
    depth: int = 0
    tail: Block | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The state to start from, where there are recurrent states."""
        if self.tail is not None:
            return self.tail.checkpoint
        return self.blocks[self.depth - 1].checkpoint if self.depth else None

    def num_tokens(self, page_size: int) -> int:
        """Tokens that it can start after."""
        return self.depth * page_size + (self.tail.length if self.tail is not None else 0)

    def without_tail(self) -> Match:
        """What is left where another request takes the tail."""
        return self if self.tail is None else Match(self.blocks, last_state(self.blocks, self.depth))

    @property
    def pinned_pages(self) -> int:
        """Pages to start after that running requests use already."""
        return sum(block.users > 0 for block in self.blocks[: self.depth])


NOTHING = Match()


def last_state(blocks: Sequence[Block], depth: int) -> int:
    """How many of the first `depth` blocks there are up to the last one with a state."""
    while depth and blocks[depth - 1].checkpoint is None:
        depth -= 1
    return depth
