"""Which prefixes are in the caches of one dp group: a radix tree of whole pages, with recurrent states at some of its places.

An edge is the tokens of one page. A block, which is a node, has the page with their keys and values, and may have a checkpoint: the
state slot that holds the recurrent state after them. Where the graphs draft, what the draft head caches at a position depends on the
token after it, so an edge has that token too.

Where there are recurrent states, a request that ends between two pages leaves a tail: the page that it did not fill, and the state after
its last token. A request that goes on from there takes both: it writes to that page. So a tail is used once, by one.

Blocks that a running request uses are pinned, and so are all above them. The others are evicted, least recently used leaves first, and
checkpoints likewise. A prefix that is forgotten while requests use it is found no more, and freed when the last of them leaves it.

The order of calls decides everything: no clock, no random number, no address.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence

from .prefix_blocks import NOTHING, Block, Checkpoint, Match, last_state
from .request_state import RequestState

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
        self.root = Block(b"", None, 0, 0, page_size)
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
        """The longest cached prefix of a waiting request, up to where it is scored; an empty one where the request skips the cache. Looked
        up once for its tokens."""
        if request.request.skip_reading_prefix_cache:
            return NOTHING
        count, match = self._matches.get(request.arrival, (-1, NOTHING))
        if count != request.num_tokens:
            match = self.find(request.request.cache_salt, request.key_ids(0, min(request.num_to_prefill, request.score_from + 1)))
            if len(self._matches) >= MOST_MATCHES:
                self._matches.clear()
            self._matches[request.arrival] = request.num_tokens, match
        return match

    def depth(self, salt: str, tokens: Sequence[int]) -> int:
        """How many whole pages of these tokens are cached; reads alone, so that any thread may ask while the tree changes."""
        block = self.root
        for place in range((len(tokens) - 1) // self.page_size):
            start = place * self.page_size
            child = block.children.get(self.edge(None if place else salt, tokens[start : start + self.page_size + 1]))
            if child is None:
                return place
            block = child
        return max(0, (len(tokens) - 1) // self.page_size)

    def find(self, salt: str, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of these tokens."""
        block, blocks = self.root, list[Block]()
        for place in range((len(tokens) - 1) // self.page_size):
            start = place * self.page_size
            child = block.children.get(self.edge(None if place else salt, tokens[start : start + self.page_size + 1]))
            if child is None:
                break
            block = child
            blocks.append(block)
        depth = last_state(blocks, len(blocks)) if self.recurrent else len(blocks)
        # What is deeper saves more: a tail behind the last state, or else that.
        for place in range(len(blocks), depth - 1, -1):
            tail = self._tail(blocks[place - 1] if place else self.root, salt, tokens, place * self.page_size)
            if tail is not None:
                return Match(tuple(blocks), place, tail)
        return Match(tuple(blocks), depth)

    def _tail(self, parent: Block, salt: str, tokens: Sequence[int], start: int) -> Block | None:
        """The longest tail of a block with these tokens from `start` on, but for the last one, which has to be computed."""
        for length in sorted({length for length, _ in parent.tails}, reverse=True):
            if start + length < len(tokens):
                key = self.edge(None if start else salt, tokens[start : start + length + 1], length)
                if (length, key) in parent.tails:
                    return parent.tails[length, key]
        return None

    def still_used(self, owners: Collection[str]) -> int:
        """Pages of `owners` that releasing all of them does not free: those that others share, and second and later counts of one."""
        leaving = Counter(block for owner in owners for block in self._paths.get(owner, ()))
        return sum(count - (block.users == count) for block, count in leaving.items())

    def path(self, owner: str) -> Sequence[Block]:
        """The blocks that a user's page table begins with."""
        return self._paths.get(owner, ())

    # Users.

    def enter(self, owner: str, match: Match) -> None:
        """A new user of the blocks that it can start after, and the owner of the tail's page; hold its state first."""
        self._paths[owner] = []
        for block in match.blocks[: match.depth]:
            self._pin(owner, block)
        if match.tail is not None:
            self._take(match.tail)
        elif match.checkpoint:
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
            block = Block(key, parent, page, self._numbers, self.page_size)
            parent.children[key] = block
            self.num_unused += 1
            self._matches.clear()
        self._pin(owner, block)
        return block

    def end(self, owner: str, salt: str, tokens: Sequence[int], page: int, slot: int) -> bool:
        """A user ends between two pages; returns whether its page and the slot with its state are kept, as they are not known yet.

        Args:
            tokens: behind its blocks, at least one and fewer than a page; where the graphs draft, with the one after them.
        """
        path = self._paths[owner]
        parent, length = path[-1] if path else self.root, len(tokens) - self.drafts
        key = length, self.edge(None if path else salt, tokens, length)
        if not parent.known or key in parent.tails:
            return False
        self._numbers += 1
        self._clock += 1
        tail = parent.tails[key] = Block(key[1], parent, page, self._numbers, length)
        tail.last_used = self._clock
        self.num_unused += 1
        self.attach(tail, self.new_checkpoint(slot))
        self._queue(tail)
        return True

    def _take(self, tail: Block) -> None:
        """Takes a tail out of the tree, but not its page and its state, which somebody holds."""
        assert tail.parent is not None
        assert tail.checkpoint is not None
        del tail.parent.tails[tail.length, tail.key]
        tail.known = False
        self.num_unused -= 1
        self._queue(tail.parent)
        self._detach(tail.checkpoint)

    def edge(self, salt: str | None, tokens: Sequence[int], length: int | None = None) -> bytes:
        """The key of a block.

        Args:
            salt: of the first block, whose prefixes these are; None for all others.
            tokens: of its page, and the one after them.
            length: tokens of its page; None is all of it.
        """
        key = array("i", tokens[: (length or self.page_size) + self.drafts]).tobytes()
        # All keys of one length of page are of one length without their salt, so that no salt can pass for another with tokens.
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
            block = checkpoint.block
            assert block is not None
            if block.length < self.page_size:
                # Without its state nobody can go on behind part of a page.
                self._forget(block)
            else:
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
        for block in [*self.root.children.values(), *self.root.tails.values()]:
            self._forget(block)
        self._leaves.clear()

    def blocks(self) -> list[Block]:
        """All that can be found, parents first."""
        blocks, new = list[Block](), [*self.root.children.values(), *self.root.tails.values()]
        while new:
            blocks += new
            new = [child for block in new for child in (*block.children.values(), *block.tails.values())]
        return blocks

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
        if self._is_leaf(block) and not block.queued and block is not self.root:
            block.queued = True
            heapq.heappush(self._leaves, (block.last_used, block.number, block))

    def _oldest_leaf(self) -> Block | None:
        while self._leaves:
            queued_at, _, block = heapq.heappop(self._leaves)
            block.queued = False
            if queued_at == block.last_used and self._is_leaf(block):
                return block
            # It was used since, and goes where it belongs now.
            self._queue(block)
        return None

    @staticmethod
    def _is_leaf(block: Block) -> bool:
        return block.known and not block.users and not block.children and not block.tails

    def _forget(self, block: Block) -> None:
        """Takes a block and all below it out of the tree."""
        assert block.parent is not None
        if block.length < self.page_size:
            del block.parent.tails[block.length, block.key]
        else:
            del block.parent.children[block.key]
        self._queue(block.parent)
        self._matches.clear()
        lost = [block]
        while lost:
            block = lost.pop()
            lost += (*block.children.values(), *block.tails.values())
            block.children, block.tails, block.known = {}, {}, False
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
