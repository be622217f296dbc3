"""runtime/scheduler/picture_ledger.py: rows are shared, kept, given up and never lost, whatever happens in whichever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support import toy_device as toy

from npucompile.runtime.picture_spans import PictureInput, position_offset, positions
from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.picture_ledger import PictureLedger, PictureRoom, key_of, to_read
from npucompile.runtime.scheduler.pools import OwnershipError

ROWS = 12


def ask(name: str, *parts: int | tuple[int, int, int]) -> Request:
    """Text, and rows, columns and seeds of pictures between it."""
    count, pictures = 0, list[PictureInput]()
    for part in parts:
        if isinstance(part, int):
            count += part
        else:
            pictures.append(toy.picture(count, *part))
            count += part[0] * part[1]
    return Request(name, (1,) * count, 1, pictures=tuple(pictures))


def ledger_of(rows: int = ROWS, drafts: bool = False) -> PictureLedger:
    return PictureLedger(rows + 1, drafts=drafts)


def test_rows_that_are_known_from_a_token_on() -> None:
    ledger, one = ledger_of(), ask("a", 2, (2, 2, 1), 1)
    assert ledger.known_rows(one, 0) == 0
    ledger.enter([(one, 0)])
    other = ask("b", 5, (2, 2, 1), 1, (1, 2, 3), (2, 2, 1), 1)
    assert [ledger.known_rows(other, start) for start in (0, 5, 7, 9, 12, 13, 17)] == [8, 8, 6, 4, 4, 3, 0]


def encode(ledger: PictureLedger, *pictures: PictureInput, finite: bool = True) -> list[tuple[int, ...]]:
    rows = ledger.launched(pictures)
    ledger.finished(pictures, [finite] * len(pictures))
    return rows


class Model(RuleBasedStateMachine):
    """Requests that come, have their pictures encoded, read them chunk by chunk and go, in any order a scheduler may have."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts = False
        self.ledger = ledger_of()
        self.running: dict[str, tuple[Request, int]] = {}
        # What each row of the pool holds, and encode steps in flight with what they will say.
        self.pool: dict[int, tuple[object, int]] = {}
        self.in_flight: list[tuple[list[PictureInput], list[bool]]] = []
        # Pictures that come out as no numbers, by key, while that is not known.
        self.broken: set[object] = set()
        self.doomed: set[str] = set()
        self.count = 0

    def enters(self, *requests: tuple[Request, int]) -> None:
        room = PictureRoom(self.ledger)
        taken = [(request, start) for request, start in requests if room.takes(request, start)]
        needed = {key_of(p): p.span.rows * p.span.columns for request, start in taken for p in to_read(request.pictures, start)}
        pinned = {key for key in needed if self.ledger.is_pinned(key)}
        # There is room for them if there is for what nobody keeps.
        assert sum(count for key, count in needed.items() if key not in pinned) <= self.ledger.num_available
        self.ledger.enter(taken)
        self.running |= {request.id: (request, start) for request, start in taken}

    @rule(data=st.data(), drafts=st.booleans())
    def come(self, data: st.DataObject, drafts: bool) -> None:
        part = st.integers(1, 3) | st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 4))
        new = []
        for _ in range(data.draw(st.integers(1, 2))):
            self.count += 1
            request = ask(f"r{self.count}", *data.draw(st.lists(part, max_size=4)), 1)
            new.append((request, data.draw(st.integers(0, len(request.prompt) - 1))))
        self.enters(*new)

    @rule(data=st.data(), finite=st.booleans())
    @precondition(lambda self: self.running and len(self.in_flight) < 2)
    def encode(self, data: st.DataObject, finite: bool) -> None:
        request, start = data.draw(st.sampled_from(list(self.running.values())))
        lacking = self.ledger.lacking(request, start, data.draw(st.integers(1, len(request.prompt))))
        if lacking:
            for picture, rows in zip(lacking, self.ledger.launched(lacking), strict=True):
                self.pool.update({row: (key_of(picture), place) for place, row in enumerate(rows)})
            self.in_flight.append((lacking, [finite, *[True] * (len(lacking) - 1)]))

    @rule()
    @precondition(lambda self: self.in_flight)
    def ended(self) -> None:
        pictures, finite = self.in_flight.pop(0)
        needs = self.needs
        failures = self.ledger.finished(pictures, finite)
        assert [failure.key for failure in failures] == [key_of(p) for p, good in zip(pictures, finite, strict=True) if not good]
        for failure in failures:
            # All who read it, or were going to, and nobody else.
            expected = {name for name, (request, _) in self.running.items() if failure.key in map(key_of, needs[name])}
            assert set(failure.owners) == expected
            for owner in failure.owners:
                self.leave(owner)

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def chunk(self, data: st.DataObject) -> None:
        request, start = self.running[data.draw(st.sampled_from(list(self.running)))]
        left = len(request.prompt) - start
        if not left:
            self.leave(request.id)
            return
        count = data.draw(st.integers(1, left))
        if self.ledger.lacking(request, start, count):
            with pytest.raises(OwnershipError, match="which has no rows"):
                self.ledger.places(request, start, count)
            return
        places = self.ledger.places(request, start, count)
        if places is None:
            assert not request.pictures
        else:
            assert places.positions.tolist() == positions(len(request.prompt), [p.span for p in request.pictures])[start:][:count].tolist()
            for offset, row in enumerate(places.picture_rows):
                span = next((p for p in request.pictures if p.span.first <= start + offset < p.span.end), None)
                behind = offset == count and not self.ledger.drafts
                assert (row > 0) == (span is not None and not behind)
                if row:
                    assert self.pool[row] == (key_of(span), start + offset - span.span.first)
        self.running[request.id] = request, start + count

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def go(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(list(self.running))))

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        assert self.ledger.num_cached == 0

    def leave(self, name: str) -> None:
        self.ledger.leave(name)
        del self.running[name]

    @property
    def needs(self) -> dict[str, list[PictureInput]]:
        """Of each running request the pictures that it was admitted with."""
        owned = {name: set(self.ledger._owned.get(name, ())) for name in self.running}
        return {name: [p for p in request.pictures if key_of(p) in owned[name]] for name, (request, _) in self.running.items()}

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ledger.check(set(self.running))
        assert self.ledger.num_pinned + self.ledger.num_available == ROWS
        if not self.running and not self.in_flight:
            assert self.ledger.num_pinned == 0


class Drafting(Model):
    """The same where chunks read the row behind them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_of(drafts=True)


TestModel, TestDrafting = Model.TestCase, Drafting.TestCase
TestModel.settings = TestDrafting.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_goes_first_and_what_another_needs_stays() -> None:
    ledger = ledger_of()
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        request = ask(name, (2, 2, seed), 1)
        ledger.enter([(request, 0)])
        encode(ledger, *request.pictures)
        ledger.places(request, 0, 5)
        ledger.leave(name)
    assert (ledger.num_cached, ledger.num_pinned) == (12, 0)
    # "a" is used again, so "b" goes; in one step with a request that needs what would go next.
    again, new, keeps = ask("a", (2, 2, 1), 1), ask("d", (1, 2, 4), 1), ask("c", (2, 2, 3), 1)
    ledger.enter([(again, 0)])
    assert (ledger.hits, ledger.queries) == (4, 16)
    ledger.enter([(new, 0), (keeps, 0)])
    assert [ledger.has_rows(request.pictures[0]) for request in (again, new, keeps)] == [True, False, True]
    assert (ledger.evictions, ledger.num_pinned, ledger.num_available) == (1, 10, 2)
    assert not PictureRoom(ledger).takes(ask("e", (2, 2, 5), 1), 0)
    # What is there already, or is computed, takes no room.
    assert PictureRoom(ledger).takes(ask("e", (2, 2, 3), 1, (1, 2, 6), 1), 0)
    assert PictureRoom(ledger).takes(ask("e", (2, 2, 5), 3), 4)


def test_one_picture_twice_has_rows_once_and_one_of_another_shape_its_own() -> None:
    ledger = ledger_of()
    twice, other = ask("a", 2, (1, 3, 1), 2, (1, 3, 1), 1), ask("b", (3, 1, 1), 1)
    ledger.enter([(twice, 0), (other, 0)])
    assert ledger.num_pinned == 6
    assert len(ledger.lacking(twice, 0, len(twice.prompt))) == 1
    (first,), (second,) = encode(ledger, twice.pictures[0]), encode(ledger, other.pictures[0])
    assert not set(first) & set(second)
    places = ledger.places(twice, 0, 11)
    assert places is not None
    assert list(places.picture_rows) == [0, 0, *first, 0, 0, *first, 0, 0]


def test_output_behind_a_prompt_is_text_behind_its_pictures() -> None:
    ledger, request = ledger_of(), ask("a", 1, (2, 3, 1), 1)
    ledger.enter([(request, 0)])
    encode(ledger, *request.pictures)
    places = ledger.places(request, 6, 5)
    assert places is not None
    offset = position_offset(picture.span for picture in request.pictures)
    assert places.positions[1:].tolist() == [[index + offset] * 3 for index in range(7, 11)]


def test_what_cannot_be_is_said() -> None:
    ledger = ledger_of(4)
    request = ask("a", (2, 2, 1), 1)
    ledger.enter([(request, 0)])
    with pytest.raises(OwnershipError, match="'b' asks for 1 rows of a picture; legal is 0 to the 0"):
        ledger.enter([(ask("b", (1, 1, 2), 1), 0)])
    with pytest.raises(OwnershipError, match="'a' reads the picture at 0 from 0 to 2, which has no rows"):
        ledger.places(request, 0, 2)
    with pytest.raises(OwnershipError, match=r"rows are of \['a'\], and 0 pictures of nobody; running are \[\]"):
        ledger.check(())
    ledger._free.append(1)
    with pytest.raises(OwnershipError, match="legal is each from 1 to 4 once"):
        ledger.check({"a"})
