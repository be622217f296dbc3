"""Which prefixes are in the caches of one dp group: a radix tree of whole pages, with recurrent states at some of its places.

An edge is the tokens of one page. A block, which is a node, has the page with their keys and values, and may have a checkpoint: the
state slot that holds the recurrent state after them. Where the graphs draft, what the draft head caches at a position depends on the
token after it, so an edge has that token too.

Blocks that a running request uses are pinned, and so are all above them. The others are evicted, least recently used leaves first, and
checkpoints likewise. A prefix that is forgotten while requests use it is found no more, and freed when the last of them leaves it.

The order of calls decides everything: no clock, no random number, no address.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from .request_state import RequestState


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
    """A node: the tokens of one page, after those of its parent.

    Attributes:
        key: its tokens.
        depth: pages from the root up to and with this one.
        users: running requests whose page table begins with the pages up to this one.
        last_used: when a request last came or left.
        known: it can be found from the root.
        queued: it is among the leaves to evict.
    """

    __slots__ = ("checkpoint", "children", "depth", "key", "known", "last_used", "number", "page", "parent", "queued", "users")

    def __init__(self, key: bytes, parent: Block | None, page: int, number: int) -> None:
        self.key, self.parent, self.page, self.number = key, parent, page, number
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, Block] = {}
        self.checkpoint: Checkpoint | None = None
        self.users = self.last_used = 0
        self.known, self.queued = True, False


class Match(NamedTuple):
    """What is known of a prompt.

    Attributes:
        blocks: all leading pages that are cached, but for the one with the prompt's last token, which has to be computed.
        depth: how many of them it can start after: all or, where there are recurrent states, those up to the last checkpoint.
    """

    blocks: tuple[Block, ...] = ()
    depth: int = 0

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The state to start from, where there are recurrent states."""
        return self.blocks[self.depth - 1].checkpoint if self.depth else None

    @property
    def pinned_pages(self) -> int:
        """Pages to start after that running requests use already."""
        return sum(block.users > 0 for block in self.blocks[: self.depth])


NOTHING = Match()

MOST_MATCHES = 1024
"""Matches that are remembered while the tree stays as it is."""


class PrefixIndex:
    """The tree of one dp group. `KVCacheManager` alone changes it; the scheduler reads it between changes.

    Args:
        page_size: P.
        drafts: whether the graphs draft.
        recurrent: whether the model has recurrent states.
        free_page, free_slot: are called with each page and state slot that the tree lets go of.
        most_pages: most pages that no running request uses; None for as many as requests leave.
    """

    def __init__(
        self,
        page_size: int,
        *,
        drafts: bool,
        recurrent: bool,
        free_page: Callable[[int], None],
        free_slot: Callable[[int], None],
        most_pages: int | None = None,
    ) -> None:
        self.page_size, self.drafts, self.recurrent, self.most_pages = page_size, drafts, recurrent, most_pages
        self.root = Block(b"", None, 0, 0)
        self.num_unused = 0
        """Pages that no running request uses."""
        self.num_shared = 0
        """By how much the pages of all users, counted one by one, are more than the pages that have users."""
        self.num_held = 0
        """Checkpoints that steps to come write or read."""
        self.num_checkpoints = 0
        """All checkpoints."""
        self.flushes = 0
        self._free_page, self._free_slot = free_page, free_slot
        self._paths: dict[str, list[Block]] = {}
        self._leaves: list[tuple[int, int, Block]] = []
        self._states: OrderedDict[Checkpoint, None] = OrderedDict()
        self._matches: dict[int, tuple[int, Match]] = {}
        self._clock = self._numbers = 0

    # What the scheduler reads.

    def match(self, request: RequestState) -> Match:
        """What is known of a waiting request's tokens; nothing where it does not want to know."""
        if request.request.skip_reading_prefix_cache:
            return NOTHING
        count, found = self._matches.get(request.arrival, (-1, NOTHING))
        if count != request.num_tokens:
            found = self.find(request.request.cache_salt, request.token_ids(0, request.num_tokens))
            if len(self._matches) >= MOST_MATCHES:
                self._matches.clear()
            self._matches[request.arrival] = request.num_tokens, found
        return found

    def find(self, salt: str, tokens: Sequence[int]) -> Match:
        """What is known of these tokens."""
        block, blocks = self.root, list[Block]()
        for place in range((len(tokens) - 1) // self.page_size):
            start = place * self.page_size
            found = block.children.get(self.edge(None if place else salt, tokens[start : start + self.page_size + 1]))
            if found is None:
                break
            block = found
            blocks.append(block)
        depth = len(blocks)
        while self.recurrent and depth and blocks[depth - 1].checkpoint is None:
            depth -= 1
        return Match(tuple(blocks), depth)

    def still_used(self, owners: Collection[str]) -> int:
        """Of the pages of these users, counted one by one, how many stay in use, or are counted twice, when all of them leave."""
        leaving = Counter(block for owner in owners for block in self._paths.get(owner, ()))
        return sum(count - (block.users == count) for block, count in leaving.items())

    def path(self, owner: str) -> Sequence[Block]:
        """The blocks that a user's page table begins with."""
        return self._paths.get(owner, ())

    # Users.

    def enter(self, owner: str, match: Match) -> None:
        """A new user of the blocks that it can start after."""
        self._paths[owner] = []
        for block in match.blocks[: match.depth]:
            self._pin(owner, block)
        if match.checkpoint:
            self._states.move_to_end(match.checkpoint)

    def leave(self, owner: str) -> None:
        """A user ends; one that never entered changes nothing."""
        self._clock += 1
        for block in reversed(self._paths.pop(owner, [])):
            block.users -= 1
            block.last_used = self._clock
            if block.users:
                self.num_shared -= 1
            elif block.known:
                self.num_unused += 1
                self._queue(block)
            else:
                self._free_page(block.page)
        self._keep_within_bound()

    def extend(self, owner: str, key: bytes, page: int) -> Block | None:
        """A user has filled one page more. Returns its block, which has another page if the tree had these tokens already.

        None where what the user has was forgotten, and what follows it cannot be found.
        """
        path = self._paths[owner]
        parent = path[-1] if path else self.root
        if not parent.known:
            return None
        block = parent.children.get(key)
        if block is None:
            self._numbers += 1
            block = Block(key, parent, page, self._numbers)
            parent.children[key] = block
            self.num_unused += 1
            self._matches.clear()
        self._pin(owner, block)
        return block

    def edge(self, salt: str | None, tokens: Sequence[int]) -> bytes:
        """The key of a block.

        Args:
            salt: of the first block, whose prefixes these are; None for all others.
            tokens: of its page, and the one after them.
        """
        key = array("i", tokens[: self.page_size + self.drafts]).tobytes()
        # All keys without their salt are of one length, so that no salt can pass for another with tokens.
        return key if salt is None else salt.encode(errors="surrogatepass") + key

    # Checkpoints.

    def new_checkpoint(self, slot: int) -> Checkpoint:
        """A state that a step is going to write; hold it first."""
        self.num_checkpoints += 1
        return Checkpoint(slot)

    def hold(self, checkpoint: Checkpoint) -> None:
        """A step to come writes or reads the state."""
        self.num_held += not checkpoint.holds
        checkpoint.holds += 1

    def drop(self, checkpoint: Checkpoint) -> None:
        """That step is known to have written, or was launched to read it."""
        checkpoint.holds -= 1
        self.num_held -= not checkpoint.holds
        self._free_if_unused(checkpoint)

    def attach(self, block: Block, checkpoint: Checkpoint) -> None:
        """The state after a block's tokens is known; a block that has one keeps it."""
        if block.checkpoint is None and block.known:
            block.checkpoint, checkpoint.block = checkpoint, block
            self._states[checkpoint] = None
            self._matches.clear()

    def evict_checkpoint(self) -> bool:
        """Frees the slot of the least recently used checkpoint that nothing holds; returns whether there was one."""
        checkpoint = next((state for state in self._states if not state.holds), None)
        if checkpoint is not None:
            self._detach(checkpoint)
        return checkpoint is not None

    # Forgetting.

    def evict(self, count: int) -> int:
        """Frees up to so many pages that no running request uses, least recently used leaves first; returns how many."""
        freed = 0
        while freed < count and (block := self._oldest_leaf()):
            self._forget(block)
            freed += 1
        return freed

    def forget(self, owner: str) -> None:
        """Forgets all that a user has, with all that follows it: nobody can tell whether it is right."""
        path = self._paths.get(owner)
        if path and path[0].known:
            self._forget(path[0])

    def flush(self) -> None:
        """Forgets everything, also what running requests are going to compute."""
        self.flushes += 1
        for block in list(self.root.children.values()):
            self._forget(block)
        self._leaves.clear()

    def blocks(self) -> list[Block]:
        """All that can be found, parents first."""
        found, new = list[Block](), list(self.root.children.values())
        while new:
            found += new
            new = [child for block in new for child in block.children.values()]
        return found

    def paths(self) -> dict[str, list[Block]]:
        """What each user has."""
        return self._paths

    def _pin(self, owner: str, block: Block) -> None:
        if block.users:
            self.num_shared += 1
        else:
            self.num_unused -= 1
        self._clock += 1
        block.users, block.last_used = block.users + 1, self._clock
        self._paths[owner].append(block)

    def _queue(self, block: Block) -> None:
        if block.known and not block.users and not block.children and not block.queued and block is not self.root:
            block.queued = True
            heapq.heappush(self._leaves, (block.last_used, block.number, block))

    def _oldest_leaf(self) -> Block | None:
        while self._leaves:
            queued_at, _, block = heapq.heappop(self._leaves)
            block.queued = False
            if queued_at == block.last_used and block.known and not block.users and not block.children:
                return block
            # It was used since, and goes where it belongs now.
            self._queue(block)
        return None

    def _forget(self, block: Block) -> None:
        """Takes a block and all below it out of the tree."""
        assert block.parent is not None
        del block.parent.children[block.key]
        self._queue(block.parent)
        self._matches.clear()
        lost = [block]
        while lost:
            block = lost.pop()
            lost += block.children.values()
            block.children, block.known = {}, False
            if block.checkpoint:
                self._detach(block.checkpoint)
            if not block.users:
                self.num_unused -= 1
                self._free_page(block.page)

    def _detach(self, checkpoint: Checkpoint) -> None:
        block = checkpoint.block
        assert block is not None
        block.checkpoint = checkpoint.block = None
        del self._states[checkpoint]
        self._matches.clear()
        self._free_if_unused(checkpoint)

    def _free_if_unused(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.holds and checkpoint.block is None:
            self.num_checkpoints -= 1
            self._free_slot(checkpoint.slot)

    def _keep_within_bound(self) -> None:
        if self.most_pages is not None and self.num_unused > self.most_pages:
            self.evict(self.num_unused - self.most_pages)
