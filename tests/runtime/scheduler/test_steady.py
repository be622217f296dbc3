"""runtime/scheduler/steady.py: steps of batches are what steps of single requests are, to the last array, event, record and counter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_device as toy

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime import stepper
from npucompile.runtime.journal import LAUNCH, Journal
from npucompile.runtime.prefix_cache import PrefixCacheSettings
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler.decode_batch import DecodeBatch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[tuple[toy.Visit, ...], dict[str, Any]]:
    """Requests that decode together for a while, on a device that is small enough for preemptions, and may fail."""
    drafts, page_size, per_request = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([16, 8, 24]))
    length, most_logprobs = page_size * per_request, draw(st.sampled_from([0, 2]))
    extra = draw(st.sampled_from([0, 3]))
    limits = Limits(
        page_size,
        1 + per_request * draw(st.sampled_from([4, 2, 1])) + draw(st.integers(0, 3)),
        1 + (drafts + 1) * draw(st.sampled_from([6, 4, 2])) + extra,
        length,
        drafts + 1,
        drafts,
        checkpoint_slots=extra,
    )
    token, shared = st.integers(0, toy.VOCAB - 1), draw(st.lists(st.integers(0, toy.VOCAB - 1), min_size=6, max_size=6))
    requests = st.builds(
        Request,
        id=st.just(""),
        prompt=st.builds(
            lambda known, own: (*shared[:known], *own)[: length - 1], st.integers(0, 6), st.lists(token, min_size=1, max_size=3)
        ),
        max_tokens=st.integers(1, length) | st.just(length),
        sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(-(2**70), 2**70)),
        stop_token_ids=st.just(frozenset()) | st.just(frozenset()) | st.frozensets(token, max_size=2),
        logprobs=st.none() | st.integers(0, most_logprobs) if most_logprobs else st.none(),
        speculative_tokens=st.none() | st.integers(0, drafts),
        tenant=st.sampled_from(["", "", "other"]),
        timeout_ms=st.none() | st.none() | st.integers(10_000, 80_000),
    )
    visits = []
    for i in range(draw(st.integers(1, 6))):
        arrives = draw(st.sampled_from([0, 0, 0, 3, 9, 20]))
        cancelled = draw(st.none() | st.none() | st.none() | st.integers(arrives, arrives + 20))
        visits.append(toy.Visit(replace(draw(requests), id=f"r{i}"), arrives, cancelled, draw(st.sampled_from([False] * 6 + [True]))))
    device = {
        "limits": limits,
        "buckets": (
            *(Bucket("decode", b, drafts + 1) for b in draw(st.sampled_from([(8,), (2, 6), (1, 3)]))),
            *(Bucket("prefill", *size) for size in draw(st.sampled_from([((1, 4),), ((4, 9),), ((1, 2), (2, 6))]))),
        ),
        "groups": draw(st.sampled_from([1, 1, 2])),
        "recurrent": draw(st.booleans()),
        "prefix_cache": draw(st.sampled_from([None, PrefixCacheSettings(), PrefixCacheSettings(2 * page_size)])),
        "prefill_burst": draw(st.integers(1, 2)),
        "itl_target_ms": draw(st.sampled_from([None, None, 4000.0])),
        "run_ahead": draw(st.integers(0, 1)),
        "max_logprobs": most_logprobs,
        "lazy": draw(st.booleans()),
        "right": draw(st.sampled_from([0.5, 1.0])),
        "fail_at": draw(st.just(frozenset()) | st.just(frozenset()) | st.frozensets(st.integers(1, 50), max_size=1)),
    }
    device["measured"] = device["itl_target_ms"] is not None
    return tuple(visits), device


class Run(NamedTuple):
    """All that a run does.

    Attributes:
        steps: after each, the scheduler's state and the counters.
        inputs: that the device got, as copied when it got them, and the arrays themselves.
    """

    entries: list[Any]
    events: dict[str, list[Any]]
    steps: list[Any]
    inputs: list[tuple[Any, Any]]
    batches: int


def play(visits: tuple[toy.Visit, ...], device: dict[str, Any]) -> Run:
    served, run = toy.serving(**device), Run([], {}, [], [], 0)
    served.engine.journal = Journal(run.entries.append)
    launch, batches = served.device.launch, 0

    def recorded(bucket: Bucket, inputs: Any) -> Any:
        run.inputs.append(([{name: array.copy() for name, array in own.items()} for own in inputs], inputs))
        return launch(bucket, inputs)

    served.device.launch = recorded  # type: ignore[method-assign]
    now, busy = 0, True
    while busy or now <= 20:
        for visit in visits:
            if visit.arrives == now:
                sink = served.submit(visit.request)
                run.events[visit.request.id] = sink.events
                if visit.flushes:
                    served.engine.flush_prefix_cache()
            if visit.cancelled == now:
                served.engine.cancel(visit.request.id)
        busy, now = served.engine.step(), now + 1
        served.engine.check()
        state = served.engine._state
        batches += any(isinstance(group.running, DecodeBatch) for group in state.groups)
        groups = [(tuple(group.waiting), tuple(group.running), group.turns, group.used_pages) for group in state.groups]
        counters = (state.prefill_steps, state.steps_in_flight, state.num_scheduled, state.times, state.prefill_ms, state.next_deadline_ms)
        run.steps.append((groups, counters, served.engine.stats()))
    return run._replace(batches=batches)


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_any_run_is_the_same_without_batches(world: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    compare(world)


@pytest.mark.parametrize("flushes", [False, True])
def test_requests_that_fill_the_same_pages_share_them(flushes: bool) -> None:
    same = [toy.Visit(Request(f"r{i}", (1, 2, 3), 30, Sampling(seed=i)), 0, None, False) for i in range(3)]
    late = toy.Visit(Request("late", (4,), 3, Sampling(seed=9)), 3, None, flushes)
    limits = Limits(8, 49, 9, 40)
    device = {"limits": limits, "buckets": (Bucket("decode", 4, 1), Bucket("prefill", 4, 4)), "prefix_cache": PrefixCacheSettings()}
    compare(((*same, late), device))


def compare(world: tuple[tuple[toy.Visit, ...], dict[str, Any]]) -> None:
    """Plays a world with batches and without, which has to be the same."""
    batched = play(*world)
    with mock.patch.object(stepper, "gathered", lambda state: state):
        single = play(*world)
    assert not single.batches
    assert batched.entries == single.entries
    assert batched.events == single.events
    assert batched.steps == single.steps
    for (copied, given_), (expected, _) in zip(batched.inputs, single.inputs, strict=True):
        assert_equal_arrays(copied, expected)
        # Nobody has changed what a step got.
        assert_equal_arrays(given_, expected)


def assert_equal_arrays(inputs: Any, expected: Any) -> None:
    for own, others in zip(inputs, expected, strict=True):
        assert list(own) == list(others)
        for name, array in own.items():
            assert array.dtype == others[name].dtype, name
            assert np.array_equal(array, others[name]), name


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("prefix_cache", [None, PrefixCacheSettings()])
@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_that_decode_together_are_a_batch_until_one_ends(drafts: int, prefix_cache: Any, run_ahead: int) -> None:
    requests = [Request(f"r{i}", (i, 1), 40, Sampling(temperature=float(i % 2), seed=i), tenant="ab"[i % 2]) for i in range(4)]
    device = {
        "limits": toy.limits_of(4, 49, 4, 48, drafts),
        "buckets": (Bucket("decode", 4, drafts + 1), Bucket("prefill", 4, 4)),
        "prefix_cache": prefix_cache,
        "run_ahead": run_ahead,
        "right": 0.0,
    }
    run = play(tuple(toy.Visit(request, 0, None, False) for request in requests), device)
    decodes = sum(entry[0] == LAUNCH and entry[1].startswith("decode") for entry in run.entries)
    assert decodes >= 30
    # The steps in which one of them ends, with one in flight behind them, look at each of them.
    assert decodes - 4 * (1 + 2 * run_ahead) <= run.batches <= decodes


def test_an_engine_that_gives_up_knows_what_a_batch_has_generated() -> None:
    served = toy.serving(toy.limits_of(4, 49, 4, 48), (Bucket("decode", 4, 1), Bucket("prefill", 4, 4)))
    sinks = [served.submit(Request(f"r{i}", (i, 1), 40)) for i in range(3)]
    while len(sinks[0].tokens) < 9:
        served.engine.step()
    assert isinstance(served.engine._state.groups[0].running, DecodeBatch)
    served.engine.give_up("it hangs")
    assert [(sink.end.reason, sink.end.message, sink.end.completion_tokens) for sink in sinks] == [("error", "it hangs", 9)] * 3
    assert {sum(steps for _, steps in sink.end.record.decode_steps) for sink in sinks} == {8}
    # The results of a step that was in flight are nobody's.
    tokens = served.engine.stats()["generation_tokens_total"]
    served.engine.step()
    assert [len(sink.tokens) for sink in sinks] == [9] * 3
    assert served.engine.stats()["generation_tokens_total"] == tokens
