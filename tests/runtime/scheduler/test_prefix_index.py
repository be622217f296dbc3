"""runtime/scheduler/prefix_index.py against plain dictionaries of whole prefixes, each searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduling import queued, request

from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.prefix_index import Match, PrefixIndex

PAGES, SLOTS = 9, 4
Prefix = tuple[str, tuple[int, ...]]
"""A salt, and all tokens up to the end of a page, with the one after it where there are drafts."""


@dataclass
class Known:
    """What the model knows of a prefix."""

    page: int
    users: set[str]
    last_used: int
    slot: int | None = None
    slot_used: int = 0


@dataclass
class User:
    """A request that has begun."""

    salt: str
    tokens: tuple[int, ...]
    prefixes: list[Prefix] = field(default_factory=list)
    lost: bool = False


class IndexMachine(RuleBasedStateMachine):
    """Requests come, fill pages, write states and go, in a pool that is too small for all that is known."""

    @initialize(page_size=st.integers(1, 3), drafts=st.booleans(), recurrent=st.booleans(), most=st.sampled_from([None, None, 0, 3]))
    def begin(self, page_size: int, drafts: bool, recurrent: bool, most: int | None) -> None:
        self.page_size, self.drafts, self.recurrent, self.most = page_size, drafts, recurrent, most
        self.free_pages, self.free_slots = list(range(1, PAGES)), list(range(1, SLOTS))
        self.index = PrefixIndex(
            page_size,
            drafts=drafts,
            recurrent=recurrent,
            free_page=self.free_pages.append,
            free_slot=self.free_slots.append,
            most_pages=most,
        )
        self.known: dict[Prefix, Known] = {}
        self.users: dict[str, User] = {}
        self.clock = self.count = 0

    def prefix(self, user: User, depth: int) -> Prefix:
        return user.salt, user.tokens[: depth * self.page_size + self.drafts]

    def used(self, prefix: Prefix, name: str) -> None:
        self.clock += 1
        self.known[prefix].users.add(name)
        self.known[prefix].last_used = self.clock

    def expected(self, salt: str, tokens: tuple[int, ...]) -> tuple[list[Prefix], int]:
        """Everything known of tokens, and where they may begin: the longest that is legal."""
        user = User(salt, tokens)
        most = (len(tokens) - 1) // self.page_size
        prefixes = [self.prefix(user, depth) for depth in range(1, most + 1)]
        known = [p for i, p in enumerate(prefixes) if all(q in self.known for q in prefixes[: i + 1])]
        depths = [i + 1 for i, p in enumerate(known) if not self.recurrent or self.known[p].slot is not None]
        return known, max(depths, default=0)

    # Tokens of one kind, so that prompts part and meet.
    tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=10).map(tuple)

    @rule(salt=st.sampled_from(["", "", "b"]), tokens=tokens)
    def comes(self, salt: str, tokens: tuple[int, ...]) -> None:
        match = self.index.find(salt, tokens)
        known, depth = self.expected(salt, tokens)
        assert [block.page for block in match.blocks] == [self.known[p].page for p in known]
        assert match.depth == depth
        assert match.pinned_pages == sum(bool(self.known[p].users) for p in known[:depth])
        self.count += 1
        name = f"r{self.count}"
        self.index.enter(name, match)
        self.users[name] = user = User(salt, tokens)
        for prefix in known[:depth]:
            user.prefixes.append(prefix)
            self.used(prefix, name)
        if self.recurrent and depth:
            self.known[known[depth - 1]].slot_used = self.tick()

    def tick(self) -> int:
        self.count += 1
        return self.count

    def someone(self, data: Any) -> tuple[str, User]:
        name = data.draw(st.sampled_from(sorted(self.users)))
        return name, self.users[name]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def fills_a_page(self, data: Any) -> None:
        name, user = self.someone(data)
        depth = len(user.prefixes) + 1
        if depth * self.page_size + self.drafts > len(user.tokens):
            return
        if not self.free_pages:
            self.evicts(1)
        if not self.free_pages:
            assert all(k.users for k in self.known.values()), "a page that nobody uses is not given up"
            return
        page = self.free_pages.pop()
        salt, edge = user.salt, user.tokens[(depth - 1) * self.page_size :]
        block = self.index.extend(name, self.index.edge(salt if depth == 1 else None, edge), page)
        if user.lost:
            assert block is None
            self.free_pages.append(page)
            return
        assert block is not None
        prefix = self.prefix(user, depth)
        if prefix in self.known:
            assert block.page == self.known[prefix].page
            self.free_pages.append(page)
        else:
            assert block.page == page
            self.known[prefix] = Known(page, set(), 0)
        user.prefixes.append(prefix)
        self.used(prefix, name)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def writes_a_state(self, data: Any) -> None:
        name, user = self.someone(data)
        if not user.prefixes or user.lost or not self.recurrent:
            return
        if not self.free_slots:
            states = {p: k.slot_used for p, k in self.known.items() if k.slot is not None}
            oldest = min(states, key=lambda p: states[p])
            assert self.index.evict_checkpoint()
            assert self.free_slots == [self.known[oldest].slot]
            self.known[oldest].slot = None
        checkpoint = self.index.new_checkpoint(self.free_slots.pop())
        self.index.hold(checkpoint)
        assert self.index.num_held == 1
        block = self.index.path(name)[-1]
        self.index.attach(block, checkpoint)
        self.index.drop(checkpoint)
        state = self.known[user.prefixes[-1]]
        if state.slot is None:
            state.slot, state.slot_used = checkpoint.slot, self.tick()

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def goes(self, data: Any) -> None:
        name, _ = self.someone(data)
        assert self.index.still_used([name]) == sum(len(self.known[p].users) > 1 for p in self.known if name in self.known[p].users) or any(
            user.lost for user in self.users.values()
        )
        self.index.leave(name)
        user = self.users.pop(name)
        self.clock += 1
        for prefix in [] if user.lost else user.prefixes:
            self.known[prefix].users.discard(name)
            self.known[prefix].last_used = self.clock
        unused = sum(not k.users for k in self.known.values())
        if self.most is not None and unused > self.most:
            self.forget_oldest(unused - self.most)

    @rule(count=st.integers(1, 4))
    def evicts(self, count: int) -> None:
        before = list(self.free_pages)
        evicted = self.index.evict(count)
        pages = self.forget_oldest(count)
        assert evicted == len(pages)
        assert self.free_pages == before + pages

    def forget_oldest(self, count: int) -> list[int]:
        """Forgets least recently used leaves one by one; returns their pages."""
        pages = []
        for _ in range(count):
            leaves = [p for p, k in self.known.items() if not k.users and not any(self.parent(q) == p for q in self.known)]
            if leaves:
                # Insertion order decides among equals, in both.
                pages.append(self.known.pop(min(leaves, key=lambda p: self.known[p].last_used)).page)
        return pages

    def parent(self, prefix: Prefix) -> Prefix:
        salt, tokens = prefix
        return salt, tokens[: len(tokens) - self.page_size]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def computed_what_is_no_number(self, data: Any) -> None:
        name, user = self.someone(data)
        self.index.forget(name)
        if user.prefixes and not user.lost:
            first = user.prefixes[0]
            self.lose({p for p in self.known if p[0] == first[0] and p[1][: len(first[1])] == first[1]})

    @rule()
    def flushes(self) -> None:
        self.index.flush()
        self.lose(set(self.known))

    def lose(self, prefixes: set[Prefix]) -> None:
        for prefix in prefixes:
            self.known.pop(prefix)
        for user in self.users.values():
            user.lost = user.lost or any(prefix in prefixes for prefix in user.prefixes)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "index"):
            return
        paths = {name: self.index.path(name) for name in self.users}
        in_use = {block.page for path in paths.values() for block in path}
        known = {k.page for k in self.known.values()}
        assert sorted([*self.free_pages, *(in_use | known)]) == list(range(1, PAGES)), "a page is lost, or free while it is used"
        assert self.index.num_unused == sum(not k.users for k in self.known.values())
        assert self.index.num_shared == sum(map(len, paths.values())) - len(in_use)
        assert self.index.num_held == 0
        slots = [k.slot for k in self.known.values() if k.slot is not None]
        assert self.index.num_checkpoints == len(slots)
        assert sorted([*self.free_slots, *slots]) == list(range(1, SLOTS))


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def index(**options: Any) -> PrefixIndex:
    return PrefixIndex(2, **({"drafts": False, "recurrent": False, "free_page": lambda _: None, "free_slot": lambda _: None} | options))


def filled(tree: PrefixIndex, name: str, *tokens: int, salt: str = "") -> None:
    tree.enter(name, Match())
    for place in range(0, len(tokens) - 1, 2):
        assert tree.extend(name, tree.edge(None if place else salt, tokens[place : place + 3]), 1 + place)
    tree.leave(name)


def test_the_last_token_is_always_computed():
    tree = index()
    filled(tree, "a", 1, 2, 3, 4)
    assert [tree.find("", range(1, count + 1)).depth for count in range(1, 7)] == [0, 0, 1, 1, 2, 2]


def test_a_salt_is_no_token():
    tree = index()
    filled(tree, "a", 1, 2, salt="\x01\0\0\0")
    assert [tree.find(salt, tokens).depth for salt, tokens in (("\x01\0\0\0", (1, 2, 3)), ("", (1, 1, 2)), ("", (1, 2, 3)))] == [1, 0, 0]


def test_a_match_is_found_anew_when_the_tree_or_the_request_changes():
    tree = index()
    waiting = queued(request("b", prompt=5))
    assert tree.match(waiting).depth == 0
    filled(tree, "a", 0, 1, 2, 3)
    assert tree.match(waiting).depth == 2
    tree.evict(1)
    assert tree.match(waiting).depth == 1
    unread = queued(Request("c", (0, 1, 2), 1, skip_reading_prefix_cache=True))
    assert tree.match(unread) == Match()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_state_that_is_held_stays_when_its_prefix_is_forgotten(recurrent):
    freed: list[int] = []
    tree = index(recurrent=recurrent, free_slot=freed.append)
    tree.enter("a", Match())
    block = tree.extend("a", tree.edge("", (1, 2)), 1)
    assert block is not None
    checkpoint = tree.new_checkpoint(7)
    tree.hold(checkpoint)
    tree.attach(block, checkpoint)
    assert not tree.evict_checkpoint()
    tree.flush()
    assert (freed, tree.num_held, tree.num_checkpoints) == ([], 1, 1)
    tree.drop(checkpoint)
    assert (freed, tree.num_held, tree.num_checkpoints) == ([7], 0, 0)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_tail_is_found_with_all_its_tokens_and_by_its_salt_and_goes_to_one(drafts: bool) -> None:
    pages, slots = list[int](), list[int]()
    index = PrefixIndex(4, drafts=drafts, recurrent=True, free_page=pages.append, free_slot=slots.append)
    said = (1, 2, 3, 4, 5, 6, 7)
    index.enter("a", index.find("", said))
    index.extend("a", index.edge("", said), 1)
    # It ends behind six or, where the draft of a place depends on the token after it, five and that.
    assert index.end("a", "", said[4:], 2, 11 + drafts)
    assert not index.end("a", "", said[4:], 3, 12)
    index.leave("a")
    assert (index.num_unused, index.num_checkpoints) == (2, 1)
    length = 3 - drafts
    found = index.find("", (*said, 8))
    assert (found.num_tokens(4), found.tail.page if found.tail else None) == (4 + length, 2)
    # Another token, another salt, or nothing left to compute: there are pages without a state.
    for salt, tokens in (("", (*said[:6], 9, 9)), ("b", (*said, 8)), ("", said[: 4 + length])):
        other = index.find(salt, tokens)
        assert (other.depth, other.tail) == (0, None), (salt, tokens)
    state = found.checkpoint
    assert state is not None
    index.hold(state)
    index.enter("b", found)
    assert index.find("", (*said, 8)).tail is None
    # Its page is the new user's, its state is free once it was read.
    assert (index.num_unused, pages, slots) == (0, [], [])
    index.drop(state)
    assert slots == [state.slot]
    index.leave("b")
    # A tail goes before the block that it hangs on, and with its state.
    index.enter("c", index.find("", said))
    index.extend("c", index.edge("", said), 1)
    assert index.end("c", "", said[4:], 5, 13)
    index.leave("c")
    assert index.evict_checkpoint()
    assert (pages[-1], slots[-1]) == (5, 13)
    assert index.evict(9) == 1
    assert (index.num_unused, index.num_checkpoints) == (0, 0)
