"""runtime/replay.py: any run repeats to the letter on an equal device, and a changed one is caught at the step that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_device as toy

from npucompile.runtime.journal import Entry
from npucompile.runtime.replay import Divergence, Replay, replay
from npucompile.runtime.request import Request, Sampling

pytestmark = pytest.mark.usefixtures("quiet")


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[toy.Visit, ...], dict[str, Any]]:
    """Requests of any kind on a device that is small enough for preemptions, and may fail."""
    drafts = draw(st.integers(0, 3))
    visits = []
    for i in range(draw(st.integers(1, 6))):
        prompt = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=9)))
        sampling = Sampling(temperature=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 2**64 - 1)))
        request = Request(f"r{i}", prompt, draw(st.integers(1, 14)), sampling)
        arrives = draw(st.integers(0, 9))
        visits.append(toy.Visit(request, arrives, draw(st.none() | st.integers(arrives, arrives + 12))))
    device = {
        "limits": toy.limits_of(2, 17, 4 * (drafts + 1), 24, drafts),
        "buckets": toy.buckets_of(drafts),
        "run_ahead": draw(st.integers(0, 1)),
        "fail_at": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 20), max_size=1)),
    }
    return tuple(visits), device


def repeat(entries: Sequence[Entry], visits: Sequence[toy.Visit], device: dict[str, Any]) -> Replay:
    served = toy.serving(**device)
    for visit in visits:
        served.device.register(visit.request)
    return replay(served.engine, entries)


@settings(max_examples=60)
@given(runs())
def test_a_run_repeats_to_the_letter(run: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    entries = toy.played(*run).entries
    found = repeat(entries, *run)
    assert found.divergence is None
    assert found.steps == sum(entry == ["step"] for entry in entries)
    assert found.requests == len(run[0])


@st.composite
def varied(draw: st.DrawFn) -> tuple[tuple[toy.Visit, ...], dict[str, Any]]:
    """Runs whose requests have priorities, tenants and deadlines; the clock goes on by a second whenever it is read."""
    visits, device = draw(runs())
    seconds = st.none() | st.integers(1, 60).map(lambda s: 1e3 * s)
    device["measured"] = draw(st.booleans())
    device["itl_target_ms"] = draw(st.none() | st.sampled_from([1.0, 2500.0, 9000.0]))
    device["buckets"] = toy.buckets_of(device["limits"].drafts, (1, 3, 8))
    return tuple(
        visit._replace(
            request=replace(
                visit.request,
                priority=draw(st.integers(-1, 1)),
                tenant=draw(st.sampled_from("ab")),
                timeout_ms=draw(seconds),
                first_token_timeout_ms=draw(seconds),
            )
        )
        for visit in visits
    ), device


@settings(max_examples=60)
@given(varied())
def test_a_run_with_priorities_tenants_and_deadlines_repeats_to_the_letter(run: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    entries = toy.played(*run).entries
    assert repeat(entries, *run).divergence is None


def test_how_long_a_step_took_is_an_input() -> None:
    visits = [toy.Visit(Request(f"r{i}", (i,) * 9, 12, Sampling(1.0, seed=i)), 3 * i, None) for i in range(4)]
    device = {"buckets": toy.buckets_of(0, (1, 3, 8)), "itl_target_ms": 5000.0, "run_ahead": 0}
    entries = toy.played(visits, device).entries
    assert sum(entry[0] == "took" for entry in entries) == sum(entry[0] == "result" for entry in entries)
    assert repeat(entries, visits, device).divergence is None
    slower = [["took", 9e9] if entry[0] == "took" else entry for entry in entries]
    assert repeat(slower, visits, device).divergence is not None


def test_a_deadline_is_an_input() -> None:
    visits = [toy.Visit(Request(f"r{i}", (i, 1), 20, Sampling(1.0, seed=i), timeout_ms=9e3 if i == 1 else None), 0, None) for i in range(3)]
    entries = toy.played(visits, DEVICE).entries
    (place,) = [i for i, entry in enumerate(entries) if entry[0] == "expired"]
    assert entries[place][2] == ["r1"]
    assert repeat(entries, visits, DEVICE).divergence is None
    found = repeat([*entries[:place], *entries[place + 1 :]], visits, DEVICE)
    assert found.divergence is not None
    earlier = [*entries[:place], ["expired", entries[place][1] - 5e3, ["r1"]], *entries[place + 1 :]]
    found = repeat(earlier, visits, DEVICE)
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.recorded) == (step_of(entries, place), earlier[place])


VISITS = tuple(toy.Visit(Request(f"r{i}", (i, 1, 2), 6, Sampling(1.0, seed=i)), i, None) for i in range(3))
DEVICE = {"run_ahead": 1}


def step_of(entries: Sequence[Entry], place: int) -> int:
    return sum(entry == ["step"] for entry in entries[: place + 1])


@pytest.mark.parametrize("word", ["launch", "result"])
def test_the_first_step_that_differs_is_named(word: str) -> None:
    entries = toy.played(VISITS, DEVICE).entries
    places = [i for i, entry in enumerate(entries) if entry[0] == word]
    for place in (places[0], places[len(places) // 2], places[-1]):
        changed = [*entries[:place], [word, "another bucket", *entries[place][2:]], *entries[place + 1 :]]
        found = repeat(changed, VISITS, DEVICE)
        assert found.divergence == Divergence(step_of(entries, place), changed[place], entries[place])
        assert found.steps == found.divergence.step - 1


def test_a_request_that_is_refused_now_is_a_difference() -> None:
    entries = toy.played(VISITS, DEVICE).entries
    small = {**DEVICE, "limits": toy.limits_of(2, 5, 4, 2, 0), "buckets": toy.buckets_of(0)}
    found = repeat(entries, VISITS, small)
    assert found.divergence is not None
    assert found.divergence.step == 1
    assert found.divergence.repeated is not None
    assert found.divergence.repeated[0] == "refused"


def test_a_record_that_ends_early_is_repeated_as_far_as_it_goes() -> None:
    entries = toy.played(VISITS, DEVICE).entries
    steps = [i for i, entry in enumerate(entries) if entry == ["step"]]
    found = repeat(entries[: steps[4]], VISITS, DEVICE)
    assert (found.steps, found.divergence) == (4, None)


def test_a_record_may_be_cut_anywhere_and_what_differs_before_is_found() -> None:
    """A process that is killed leaves one that ends between a launch and its result, or between two requests of a step."""
    entries = toy.played(VISITS, DEVICE).entries
    for length in range(1, len(entries) + 1):
        found = repeat(entries[:length], VISITS, DEVICE)
        assert (found.divergence, found.cut) == (None, True), entries[length - 1]
    whole = repeat([*entries, ["end"]], VISITS, DEVICE)
    assert (whole.divergence, whole.cut) == (None, False)
    place = max(i for i, entry in enumerate(entries) if entry[0] == "result" and entries[i - 1] != ["step"])
    early = repeat([*entries[:place], ["end"]], VISITS, DEVICE)
    assert early.divergence is not None
    assert (early.divergence.recorded, early.divergence.repeated) == (None, entries[place])
