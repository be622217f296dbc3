"""Requests with pictures on a toy device that reads the rows of its pool: each gets what it gets alone, and every row comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_device as toy

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.journal import PICTURE, RESULT, Journal
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

PAD = 12
"""The token in the places of all pictures."""


pytestmark = pytest.mark.usefixtures("quiet")


def ask(name: str, *parts: int | tuple[int, int, int], max_tokens: int = 4, broken: bool = False, **fields: Any) -> Request:
    """A prompt of text tokens, and rows, columns and seeds of pictures between them."""
    prompt: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
        else:
            pictures.append(toy.picture(len(prompt), *part, broken=broken))
            prompt += [PAD] * part[0] * part[1]
    return Request(name, tuple(prompt), max_tokens, pictures=tuple(pictures), **{"sampling": Sampling(seed=0), **fields})


def limits_of(drafts: int = 0, rows: int = 24, length: int = 40, requests: int = 4, pages: int = 0) -> Limits:
    return Limits(4, 1 + (pages or 3 * length // 4), 1 + requests * (drafts + 1), length, drafts + 1, drafts, picture_rows=1 + rows)


def buckets_of(drafts: int = 0, encode: tuple[tuple[int, int], ...] = ((1, 80), (3, 16))) -> tuple[Bucket, ...]:
    return (*toy.buckets_of(drafts), Bucket("prefill", 3, 5), *(Bucket("encode", *size) for size in encode))


def expect(sink: toy.Collector, request: Request, length: int = 40) -> None:
    assert (sink.tokens, sink.end.reason, sink.end.message) == (*toy.reference_run(request, length)[:2], None)


def empty(served: toy.Serving) -> None:
    """Every row is free, or of a picture that nobody needs."""
    served.engine.stepper.check()
    for manager in served.engine.stepper.cache_managers:
        assert manager.pictures.num_pinned == 0
        manager.flush()
        assert manager.pictures.num_available == len(manager.pictures._free) == served.device.limits.picture_rows - 1


# Any mixture of requests.


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[toy.Visit, ...], dict[str, Any]]:
    """Requests with and without pictures, some of them the same, on a device that is small enough for preemptions, and may fail."""
    drafts, page_size, per_request = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([14, 9]))
    length, token = page_size * per_request, st.integers(0, toy.VOCAB - 1)
    extra = draw(st.sampled_from([0, 2]))
    sizes = [(rows, columns) for rows in (1, 2, 3) for columns in (1, 2, 3) if rows * columns <= length - 4]
    largest = max(rows * columns for rows, columns in sizes)
    limits = Limits(
        page_size,
        1 + per_request + draw(st.sampled_from([3, 0, 2 * per_request])),
        1 + (drafts + 1) * draw(st.sampled_from([4, 2, 1])) + extra,
        length,
        drafts + 1,
        drafts,
        checkpoint_slots=extra,
        picture_rows=1 + draw(st.sampled_from([largest, largest + 3, 3 * largest])),
    )
    part = token | st.tuples(st.sampled_from(sizes), st.integers(0, 3)).map(lambda made: (*made[0], made[1]))
    visits: list[toy.Visit] = []
    known: list[Any] = []
    for i in range(draw(st.integers(2, 7))):
        parts = draw(st.lists(part, max_size=8))
        if known and draw(st.booleans()):
            # It begins as an earlier one does, pictures included.
            parts = draw(st.sampled_from(known))[: draw(st.integers(1, 6))] + parts[:2]
        fits: list[Any] = []
        for item in parts:
            size = 1 if isinstance(item, int) else item[0] * item[1]
            rows = {each for each in [*fits, item] if not isinstance(each, int)}
            taken = sum(1 if isinstance(other, int) else other[0] * other[1] for other in fits)
            if taken + size <= length - 3 and sum(r * c for r, c, _ in rows) < limits.picture_rows:
                fits.append(item)
        known.append(fits)
        request = ask(
            f"r{i}",
            *fits,
            draw(token),
            max_tokens=draw(st.integers(1, length)),
            broken=draw(st.sampled_from([False] * 7 + [True])),
            sampling=Sampling(draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 9))),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
        )
        arrives = draw(st.integers(0, 20))
        visits.append(toy.Visit(request, arrives, draw(st.none() | st.none() | st.integers(arrives, arrives + 6))))
    largest_patches = 4 * largest
    encode = {
        (draw(st.integers(1, 2)), largest_patches),
        *draw(st.sets(st.tuples(st.integers(1, 3), st.sampled_from([4, 16])), max_size=2)),
    }
    device = {
        "limits": limits,
        "buckets": (
            *(Bucket("decode", b, drafts + 1) for b in draw(st.sets(st.integers(1, 4), min_size=1, max_size=2))),
            *(Bucket("prefill", *size) for size in draw(st.sets(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=2))),
            *(Bucket("encode", *size) for size in encode),
        ),
        "groups": draw(st.sampled_from([1, 1, 2])),
        "recurrent": draw(st.booleans()),
        "prefix_cache": draw(st.sampled_from([None, PrefixCacheSettings(), PrefixCacheSettings(2 * page_size)])),
        "prefill_burst": draw(st.integers(1, 2)),
        "run_ahead": draw(st.integers(0, 1)),
        "lazy": draw(st.booleans()),
        "right": draw(st.sampled_from([0.5, 1.0])),
        "fail_at": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 30), max_size=1)),
        "refuse_at": draw(st.just(frozenset()) | st.just(frozenset()) | st.frozensets(st.integers(1, 30), max_size=1)),
    }
    return tuple(visits), device


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_whatever_shares_rows_each_request_gets_what_it_gets_alone(world: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    visits, device = world
    served, sinks, entries = toy.played(visits, device)
    length, failures = device["limits"].max_model_len, device["fail_at"] | device["refuse_at"]
    for visit, sink in zip(visits, sinks, strict=True):
        request, end = visit.request, sink.end
        broken = any(picture.patches[0, 0] == toy.BROKEN for picture in request.pictures)
        if end.reason == "cancelled":
            assert visit.cancelled is not None
        elif end.reason == "error":
            assert "was told to fail" in end.message if failures and not broken else broken or failures, end
            assert broken or "no finite number" not in end.message
        else:
            assert not broken
            expect(sink, request, length)
        if not broken:
            assert sink.tokens == toy.reference_run(request, length).tokens[: len(sink.tokens)]
    stats = served.engine.stats()
    assert stats["steps_total"] == served.device.runs - stats["steps_failed_total"]
    encoded = sum(sink.end.record.encoded_pictures for sink in sinks)
    assert encoded <= sum(memory.encoded for memory in served.device.memories)
    assert stats["picture_row_hits_total"] <= stats["picture_row_queries_total"]
    empty(served)
    served.device.check_order(device["run_ahead"])
    again = toy.serving(**device)
    for visit in visits:
        again.device.register(visit.request)
    assert replay(again.engine, entries).divergence is None


# What is encoded, and when.


def kinds(served: toy.Serving, steps: int) -> str:
    """First letters of the kinds of the next steps."""
    before = len(served.device.steps)
    launched: list[str] = []
    launch = served.device.launch
    served.device.launch = lambda bucket, inputs: (launched.append(bucket.kind[0]), launch(bucket, inputs))[1]  # type: ignore[method-assign]
    for _ in range(steps):
        served.engine.step()
    served.device.launch = launch  # type: ignore[method-assign]
    assert len(served.device.steps) - before == len(launched)
    return "".join(launched)


def serve(*requests: Request, **options: Any) -> tuple[toy.Serving, list[toy.Collector]]:
    drafts = options.pop("drafts", 0)
    limits, buckets = options.pop("limits", None) or limits_of(drafts), options.pop("buckets", None) or buckets_of(drafts)
    served = toy.serving(limits, buckets, refresh_every_s=None, **options)
    return served, [served.submit(request) for request in requests]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_picture_over_several_chunks_is_encoded_once(drafts: int, run_ahead: int) -> None:
    """The widest chunk has eight tokens; the picture has twenty, and stands twice."""
    request = ask("a", 1, 2, (4, 5, 1), 3, (4, 5, 1), max_tokens=3)
    requests = [replace(request, prompt=(*request.prompt[:43], 5)), ask("b", 1, (4, 5, 1), 4), ask("c", 5)]
    served, sinks = serve(*requests, drafts=drafts, run_ahead=run_ahead, limits=limits_of(drafts, length=60))
    served.drain()
    for sink, own in zip(sinks, requests, strict=True):
        expect(sink, own, 60)
    stats = served.engine.stats()
    assert [sink.end.record.encoded_pictures for sink in sinks] == [1, 0, 0]
    assert served.device.memories[0].encoded == stats["encoded_pictures_total"] == 1
    assert (stats["picture_row_queries_total"], stats["picture_row_hits_total"]) == (40, 20)
    assert (stats["picture_rows_pinned"], stats["picture_rows_cached"], stats["picture_evictions_total"]) == (0, 20, 0)
    assert stats["bucket_steps"]["encode-b1-q80"] == 1
    assert stats["encode_seconds_total"] > 0
    empty(served)


def test_pictures_of_several_prompts_share_a_step() -> None:
    requests = [ask(f"r{i}", 1, (1, 2, i), 2) for i in range(3)]
    served, sinks = serve(*requests)
    served.drain()
    assert served.engine.stats()["bucket_steps"]["encode-b3-q16"] == 1
    for sink, request in zip(sinks, requests, strict=True):
        expect(sink, request)


def test_streams_keep_their_turn_while_pictures_are_encoded() -> None:
    served, (stream,) = serve(ask("stream", 1, max_tokens=38), buckets=buckets_of(encode=((1, 16),)), run_ahead=0)
    while len(stream.tokens) < 3:
        served.engine.step()
    served.submit(ask("a", (1, 2, 1), 3, (1, 2, 2), 4, (1, 2, 3), 5))
    # Its first chunk reads all three.
    assert kinds(served, 10) == "edededpdpd"
    served.drain()
    expect(stream, ask("stream", 1, max_tokens=38))


def test_prompts_that_have_their_rows_take_turns_with_encode_steps() -> None:
    long, many = ask("long", *[1] * 30, 2, max_tokens=1), ask("many", *[(1, 2, seed) for seed in range(4)], 1, max_tokens=1)
    buckets = (Bucket("decode", 2, 1), Bucket("prefill", 2, 4), Bucket("encode", 1, 8))
    served, sinks = serve(long, many, buckets=buckets, run_ahead=0)
    assert kinds(served, 6) == "epepep"
    served.drain()
    for sink, request in zip(sinks, (long, many), strict=True):
        expect(sink, request)


def test_a_request_goes_to_the_group_that_has_rows_of_its_picture() -> None:
    """It would go to the first one, which has nothing to do either."""
    served, sinks = serve(ask("a", 1, 2), ask("b", 1, (2, 5, 2), 3), groups=2)
    served.drain()
    later = [ask("c", 4, (2, 5, 2), 5), ask("d", 6, (2, 5, 3), 7)]
    sinks += [served.submit(request) for request in later]
    served.drain()
    for sink, request in zip(sinks[2:], later, strict=True):
        expect(sink, request)
    assert [sink.end.record.encoded_pictures for sink in sinks] == [0, 1, 0, 1]
    assert [memory.encoded for memory in served.device.memories] == [1, 1]


def test_admission_waits_while_rows_are_in_use() -> None:
    first, second, text = ask("a", (4, 5, 1), *[3] * 9), ask("b", (2, 5, 2), 4), ask("c", 6)
    served, sinks = serve(first, second, text, buckets=(Bucket("decode", 4, 1), Bucket("prefill", 4, 4), *buckets_of()[-2:]))
    for _ in range(3):
        served.engine.step()
    (group,) = served.engine.stepper.state.groups
    assert [state.id for state in (*group.running, *group.waiting)] == ["a", "b", "c"]
    assert len(group.running) == 1
    assert group.pictures is not None
    assert group.pictures.num_pinned == 20
    served.drain()
    for sink, request in zip(sinks, (first, second, text), strict=True):
        expect(sink, request)
    assert served.engine.stats()["picture_evictions_total"] == 1


@pytest.mark.parametrize("drafts", [0, 1])
def test_pictures_of_equal_size_find_no_prefixes_of_each_other(drafts: int) -> None:
    options = {"drafts": drafts, "prefix_cache": PrefixCacheSettings(), "limits": limits_of(drafts, pages=40)}
    served, _ = serve(**options)
    cached = []
    for i, seed in enumerate([1, 2, 1]):
        request = ask(f"r{i}", 5, 6, (2, 5, seed), 7, 8, 9)
        sink = served.submit(request)
        served.drain()
        expect(sink, request)
        cached.append((sink.end.record.cached_tokens, sink.end.record.encoded_pictures))
    # The third finds what the first left, all of its picture included, and encodes nothing.
    assert cached[:2] == [(0, 1), (0, 1)]
    assert cached[2][0] >= 12
    assert cached[2][1] == 0


def test_a_picture_that_is_no_number_fails_those_that_read_it_and_nobody_else() -> None:
    requests = [ask("a", 1, (2, 2, 1), 2, broken=True), ask("b", (2, 2, 1), 3, broken=True), ask("c", (2, 2, 1), 4), ask("d", 5)]
    served, sinks = serve(*requests)
    served.drain()
    for sink, request in zip(sinks[2:], requests[2:], strict=True):
        expect(sink, request)
    for sink in sinks[:2]:
        assert (sink.end.reason, sink.tokens) == ("error", [])
        assert (
            sink.end.message
            == f"picture {requests[0].pictures[0].digest.hex()[:16]} of the prompt: the vision tower returned what is no finite number"
        )
    assert served.engine.stats()["requests_not_finite_total"] == 2
    empty(served)
    # Nothing of it is kept.
    again = served.submit(ask("e", 1, (2, 2, 1), 2))
    served.drain()
    expect(again, ask("e", 1, (2, 2, 1), 2))


def test_an_encode_step_that_fails_fails_those_with_its_pictures() -> None:
    requests = [ask("text", *[1] * 9), ask("a", (2, 2, 1), 3), ask("b", (2, 2, 1), 4)]
    served, sinks = serve(*requests, fail_at=frozenset({1}), buckets=(Bucket("decode", 4, 1), Bucket("prefill", 4, 4), *buckets_of()[-2:]))
    served.drain()
    expect(sinks[0], requests[0])
    assert [sink.end.message for sink in sinks[1:]] == ["encode-b3-q16: Failed: run 1 was told to fail"] * 2
    empty(served)


def test_steps_are_encoded_within_the_time_between_tokens() -> None:
    """A reading of this clock takes a second: a minute between two tokens leaves time for the chunk behind the encode step, and a
    millisecond for neither but the first."""
    for target_ms, expected in ((6e4, "p"), (1.0, "d")):
        served, _ = serve(itl_target_ms=target_ms, run_ahead=0)
        # What was not measured goes first or not at all.
        for seed in range(2, 6):
            served.submit(ask("before", (1, 2, seed), 3))
            served.drain()
        stream = served.submit(ask("stream", 1, max_tokens=38))
        while len(stream.tokens) < 8:
            served.engine.step()
        request = ask("a", (1, 2, 1), 3, max_tokens=2)
        sink = served.submit(request)
        order = kinds(served, 4)
        assert order[order.index("e") + 1] == expected, order
        served.drain()
        expect(sink, request)


# What a journal keeps.


@pytest.mark.parametrize("any_size", [frozenset(), frozenset({"prefill", "decode"})], ids=["buckets", "any size"])
def test_a_bound_between_tokens_changes_none_of_them(any_size: frozenset[str]) -> None:
    """Steps are chosen by what others took, also where nothing may run before the next decode step."""
    requests = [ask(f"r{i}", 1, (1 + i % 3, 2, i % 4), 2, max_tokens=20) for i in range(12)]
    served, sinks = serve(*requests[:3], itl_target_ms=2500.0, any_size=any_size, prefix_cache=PrefixCacheSettings())
    for request in requests[3:]:
        for _ in range(3):
            served.engine.step()
        sinks.append(served.submit(request))
    served.drain()
    for sink, request in zip(sinks, requests, strict=True):
        expect(sink, request)
    empty(served)


def test_a_journal_has_patches_once_and_repeats_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    served, _ = serve()
    entries: list[Any] = []
    served.engine.stepper.journal = Journal(entries.append)
    requests = [ask("a", 1, (2, 2, 1), 2), ask("b", (2, 2, 1), 3), ask("c", (1, 2, 2), 3)]
    for request in requests:
        served.submit(request)
    served.drain()
    assert [word for word, *_ in entries].count(PICTURE) == 2
    assert any(word == RESULT and len(values) == 3 and values[2] == [[True, True]] for word, *values in entries)
    again = serve()[0]
    for request in requests:
        again.device.register(request)
    assert replay(again.engine, entries).divergence is None
    monkeypatch.setattr("npucompile.runtime.journal.MOST_PICTURE_BYTES", 60)
    bounded: list[Any] = []
    served.engine.stepper.journal = Journal(bounded.append)
    served.submit(ask("d", (2, 2, 3), 2))
    served.submit(ask("e", (1, 1, 4), 2))
    served.drain()
    assert [word for word, *_ in bounded].count(PICTURE) == 2
    bounded = [entry for entry in bounded if entry[0] != PICTURE]
    divergence = replay(serve()[0].engine, bounded).divergence
    assert divergence is not None
    assert divergence.repeated is not None
    assert "request 'd' has picture 33203220322030, of which the journal has no patches" in divergence.repeated[1]
