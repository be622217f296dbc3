"""runtime/lazy_sequence.py: a lazy sequence is the tuple that it stands for, and makes it once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.lazy_sequence import LazySequence


class Counted(LazySequence[int]):
    def __init__(self, items: tuple[int, ...]) -> None:
        self.items, self.times = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def _make(self) -> tuple[int, ...]:
        self.times += 1
        return self.items


@given(st.lists(st.integers(0, 5), max_size=6).map(tuple), st.data())
def test_it_is_the_tuple(items: tuple[int, ...], data: st.DataObject) -> None:
    lazy = Counted(items)
    assert (len(lazy), bool(lazy), lazy.times) == (len(items), bool(items), 0)
    part = data.draw(st.slices(len(items) + 2))
    assert (tuple(lazy), lazy[part], [lazy[i] for i in range(len(items))]) == (items, items[part], list(items))
    assert lazy == items
    assert items == lazy
    assert lazy == Counted(items)
    assert lazy != (*items, 9)
    assert lazy != list(items)
    assert (hash(lazy), repr(lazy), lazy.times) == (hash(items), repr(items), 1)
