"""runtime/scheduler/pools.py: a pool against a dict of lists, and what its self-check finds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from npucompile.runtime.scheduler.pools import Keeper, OwnershipError, PagePool, Pool, StateSlotPool

SIZE = 9


class PoolMachine(RuleBasedStateMachine):
    """Compares a pool with a plain dict of lists."""

    owners = Bundle("owners")

    def __init__(self):
        super().__init__()
        self.pool = Pool("page", SIZE)
        self.model: dict[str, list[int]] = {}
        self.snapshots: list[tuple[object, list[int]]] = []
        # Of each number: how often `take_unused` was called since it was last owned; None where it never was, or was told since.
        self.idle: dict[int, int | None] = dict.fromkeys(range(1, SIZE))

    @property
    def used(self):
        return sum(map(len, self.model.values()))

    @rule(target=owners, name=st.sampled_from("abcd"))
    def owner(self, name):
        return name

    @rule(owner=owners, count=st.integers(0, SIZE))
    def allocate(self, owner, count):
        if count > SIZE - 1 - self.used:
            with pytest.raises(OwnershipError, match=f"asks for {count} pages"):
                self.pool.allocate(count, owner)
            return
        allocated = self.pool.allocate(count, owner)
        assert len(allocated) == count
        owned = {n for numbers in self.model.values() for n in numbers}
        assert not owned & set(allocated)
        if count:
            self.model.setdefault(owner, []).extend(allocated)

    @rule(owner=owners)
    def free(self, owner):
        assert self.pool.free(owner) == len(self.model.pop(owner, []))

    @rule(owner=owners, number=st.integers(0, SIZE))
    def free_number(self, owner, number):
        numbers = self.model.get(owner, [])
        if number not in numbers:
            with pytest.raises(OwnershipError, match=f"page {number} is given up by '{owner}', which owns"):
                self.pool.free_number(number, owner)
            return
        self.pool.free_number(number, owner)
        numbers.remove(number)
        self.model = {name: held for name, held in self.model.items() if held}

    @rule(owner=owners, number=st.integers(0, SIZE), to=st.sampled_from([Keeper.PREFIXES, "a", "z"]))
    def transfer(self, owner, number, to):
        numbers = self.model.get(owner, [])
        if number not in numbers:
            with pytest.raises(OwnershipError, match=f"page {number} is given up by '{owner}', which owns"):
                self.pool.transfer(number, owner, to)
            return
        self.pool.transfer(number, owner, to)
        numbers.remove(number)
        self.model.setdefault(to, []).append(number)
        self.model = {name: held for name, held in self.model.items() if held}

    @rule(owner=owners)
    def snapshot(self, owner):
        self.snapshots.append((self.pool.owned(owner), list(self.model.get(owner, []))))

    @rule()
    def take_unused(self):
        assert self.pool.take_unused() == tuple(number for number, calls in self.idle.items() if calls and calls >= 1)
        self.idle = {number: None if calls is None or calls >= 1 else 1 for number, calls in self.idle.items()}

    @invariant()
    def agrees_with_the_model(self):
        self.idle |= {number: 0 for numbers in self.model.values() for number in numbers}
        self.pool.check()
        assert self.pool.owners() == frozenset(self.model)
        assert self.pool.free_count == SIZE - 1 - self.used
        for owner, numbers in self.model.items():
            assert list(self.pool.owned(owner)) == numbers
        assert all(0 not in numbers for numbers in self.model.values())

    @invariant()
    def snapshots_never_change(self):
        for view, numbers in self.snapshots:
            assert list(view) == numbers


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_pool_without_a_null_page_is_refused():
    with pytest.raises(OwnershipError, match="at least 1"):
        PagePool(0)


def test_a_negative_count_is_refused():
    with pytest.raises(OwnershipError, match="asks for -1"):
        PagePool(4).allocate(-1, "a")


def test_slot_groups():
    pool = StateSlotPool(8, group=3)
    first, second = pool.allocate_group("a"), pool.allocate_group("b")
    assert len(first) == len(second) == 3
    assert len({*first, *second}) == 6
    with pytest.raises(OwnershipError, match="already holds"):
        pool.allocate_group("a")
    with pytest.raises(OwnershipError, match="asks for 3 state slots; legal is 0 to the 1"):
        pool.allocate_group("c")
    pool.free("a")
    assert sorted(pool.allocate_group("c")) == sorted(first)
    pool.check()


@pytest.mark.parametrize(
    "breakage, message",
    [
        (lambda pool: pool._free.pop(), "neither free nor owned"),
        (lambda pool: pool._free.append(pool._free[0]), "held twice, by None and by None"),
        (lambda pool: pool._owned["a"].update(pool._owned["b"]), "recorded for 'b'"),
        (lambda pool: pool._owned["a"].update({0: None}), "page 0 is held by 'a'"),
        (lambda pool: pool._owned["a"].update({99: None}), "page 99 is held by 'a'"),
        (lambda pool: pool._owned.pop("a"), "neither free nor owned"),
        (lambda pool: pool._free.append(pool.owned("a")[0]), "held by None but recorded for 'a'"),
        (lambda pool: pool._owned.update(c=pool._owned["b"]), "recorded for 'b'|held twice, by 'b' and by 'c'"),
    ],
)
def test_the_self_check_finds(breakage, message):
    pool = PagePool(8)
    pool.allocate(2, "a")
    pool.allocate(2, "b")
    pool.check()
    breakage(pool)
    with pytest.raises(OwnershipError, match=message):
        pool.check()
