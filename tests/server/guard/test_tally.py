"""server/guard/tally.py: what several doors hold counts together, as a model that adds up says."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from npucompile.server.guard.admission import Admission
from npucompile.server.guard.tally import Tally

CHANGES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 3)), max_size=30)


@given(changes=CHANGES)
def test_doors_that_tell_their_changes_agree_on_all(changes: list[tuple[int, str, int]]) -> None:
    tallies, model = [Tally() for _ in range(3)], [Counter[str]() for _ in range(3)]
    for tally in tallies:
        tally.on_change = lambda: None
    for door, name, count in changes:
        tallies[door].add(name, count - model[door][name])
        model[door][name] = count
        told = tallies[door].changes()
        for other in range(3):
            if other != door:
                tallies[other].hear(door, told)
    held = sum(model, Counter[str]())
    for door, tally in enumerate(tallies):
        assert (tally["a"], tally["b"], tally.total, tally.own) == (held["a"], held["b"], held.total(), model[door].total())
        assert tally.names() == set(held)
        assert tally.changes() == {}
        assert tally.held() == {name: count for name, count in model[door].items() if count}
    tallies[0].forget(1)
    tallies[0].forget(2)
    assert tallies[0].total == tallies[0].own


def test_changes_are_kept_for_others_alone() -> None:
    tally, told = Tally(), list[int]()
    tally.add("a", 1)
    assert tally.changes() == {}
    tally.on_change = lambda: told.append(1)
    tally.add("b", 0)
    assert not told
    tally.add("b", 2)
    assert (len(told), tally.changes()) == (1, {"b": 2})


def test_requests_of_other_doors_take_places() -> None:
    admission = Admission(places=10, per_client=4)
    admission.tallies["requests"].hear(1, {"a": 3, "b": 4})
    admission.enter("a")()
    assert admission.live == 0
    admission.enter("c", 2)
    assert admission.tallies["requests"].total == 9
