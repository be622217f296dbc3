"""runtime/stepper.py: requests on a toy device that really reads its pages and slots get what sequential generation gives them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toy_device as toy

from npucompile.graphs.errors import RequestError, SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.delivery import BatchSink
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import RECEIVE, SEND, FinishEvent, Request, Sampling, TokenEvent
from npucompile.runtime.scheduler import advance
from npucompile.runtime.scheduler.pools import OwnershipError

VOCAB = 13
WAIT_S = 60


def ask(name="a", prompt=(1, 2, 3), max_tokens=5, seed=0, stop=(), logprobs=None, speculative_tokens=None, **sampling):
    return Request(name, tuple(prompt), max_tokens, Sampling(seed=seed, **sampling), frozenset(stop), logprobs, speculative_tokens)


# Any mixture of requests gives each of them what it would get by itself.


@dataclass(frozen=True)
class Visit:
    request: Request
    arrives: int
    cancelled: int | None


@dataclass(frozen=True)
class World:
    limits: Limits
    buckets: tuple[Bucket, ...]
    burst: int
    visits: tuple[Visit, ...]
    device: dict


@st.composite
def worlds(draw, crowded=False):
    """Worlds of any kind or, if crowded, ones whose short prompts come at once and outgrow the pages."""
    drafts = draw(st.integers(0, 7))
    page_size, per_request = draw(st.sampled_from([2, 1, 3, 4])), draw(st.sampled_from([12, 8] if crowded else [12, 8, 5, 2]))
    length = page_size * per_request
    limits = Limits(
        page_size,
        num_pages=1
        + per_request
        + draw(st.integers(per_request // 2, per_request) if crowded else st.sampled_from([0, 3, 2 * per_request])),
        num_slots=1 + (drafts + 1) * draw(st.sampled_from([6, 3] if crowded else [6, 3, 2, 1])) + draw(st.integers(0, drafts)),
        max_model_len=length,
        slots_per_request=drafts + 1,
        drafts=drafts,
    )
    buckets = (
        *(Bucket("decode", b, drafts + 1) for b in draw(st.sets(st.integers(1, 5), min_size=1, max_size=3))),
        *(
            Bucket("prefill", b, q)
            for b, q in draw(st.sets(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 9)), min_size=1, max_size=3))
        ),
    )
    most_logprobs = draw(st.sampled_from([0, 0, 3]))
    token = st.integers(0, VOCAB - 1)
    short = st.lists(token, min_size=1, max_size=min(5, length - 1))
    requests = st.builds(
        Request,
        id=st.sampled_from("abc"),
        prompt=(short if crowded else short | st.lists(token, min_size=1, max_size=length - 1)).map(tuple),
        max_tokens=st.just(length) if crowded else st.just(length) | st.integers(1, length),
        sampling=st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
            top_k=st.integers(0, 5),
            top_p=st.sampled_from([0.25, 0.5, 1.0]),
            min_p=st.sampled_from([0.0, 0.25]),
            seed=st.integers(-(2**70), 2**70),
        ),
        stop_token_ids=st.just(frozenset()) if crowded else st.just(frozenset()) | st.frozensets(token, max_size=2),
        logprobs=st.none() | st.integers(0, most_logprobs) if most_logprobs else st.none(),
        speculative_tokens=st.none() | st.integers(0, drafts),
    )
    visits = []
    for _ in range(draw(st.sampled_from([4, 7] if crowded else [4, 7, 2, 1]))):
        arrives = draw(st.integers(0, 3 if crowded else 12))
        visits.append(Visit(draw(requests), arrives, draw(st.none() | st.none() | st.integers(arrives, arrives + 15))))
    chosen = {
        "run_ahead": draw(st.sampled_from([1, 0])),
        "lazy": draw(st.booleans()),
        "any_size": draw(st.sampled_from([frozenset(), frozenset({"prefill", "decode"})])),
        "right": draw(st.sampled_from([0.9, 0.5, 1.0, 0.0])),
        "fail_at": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 40), max_size=2)),
        "refuse_at": draw(st.just(frozenset()) | st.frozensets(st.integers(1, 40), max_size=1)),
    }
    return World(limits, buckets, draw(st.integers(1, 3)), tuple(visits), {"max_logprobs": most_logprobs, **chosen})


def play(world):
    """The request of every visit, under an id that was free when it came, and its sink."""
    served = toy.serving(world.limits, world.buckets, prefill_burst=world.burst, **world.device)
    outcomes: list = [None] * len(world.visits)
    for now in range(45):
        for i, visit in enumerate(world.visits):
            if visit.arrives == now:
                live_ids = {request.id for request, sink in filter(None, outcomes) if sink.end is None}
                # An id is used again as soon as it is free, while steps of its last owner may be in flight.
                request = replace(visit.request, id=visit.request.id if visit.request.id not in live_ids else f"r{i}")
                outcomes[i] = (request, served.submit(request))
            if visit.cancelled == now and outcomes[i][1].end is None:
                served.engine.cancel(outcomes[i][0].id)
        served.engine.step()
        served.engine.stepper.check()
    served.drain((world.burst + 3) * world.limits.num_slots * world.limits.max_model_len * len(world.visits))
    served.engine.stepper.check()
    return served, outcomes


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_whatever_shares_the_engine_each_request_gets_what_it_gets_alone(world):
    check_world(world)


@settings(max_examples=200, deadline=None)
@given(worlds(crowded=True))
def test_requests_that_take_each_others_pages_get_what_they_get_alone(world):
    check_world(world)


@settings(max_examples=150, deadline=None)
@given(worlds() | worlds(crowded=True), st.integers(2, 3))
def test_whatever_shares_the_groups_each_request_gets_what_it_gets_alone(world, groups):
    check_world(replace(world, device={**world.device, "groups": groups, "any_size": frozenset()}))


@settings(max_examples=150, deadline=None)
@given(worlds() | worlds(crowded=True), st.data())
def test_priorities_and_tenants_change_the_order_and_no_token(world, data):
    kinds = st.tuples(st.integers(-1, 1), st.sampled_from("ab"))
    visits = []
    for visit in world.visits:
        priority, tenant = data.draw(kinds)
        visits.append(replace(visit, request=replace(visit.request, priority=priority, tenant=tenant)))
    check_world(replace(world, visits=tuple(visits)))


def check_world(world):
    logging.disable(logging.CRITICAL)
    try:
        served, outcomes = play(world)
    finally:
        logging.disable(logging.NOTSET)
    for manager in served.engine.stepper.cache_managers:
        for pool in (manager.pages, manager.state_slots, manager.request_slots):
            assert pool.free_count == pool.size - 1
    failures = world.device["fail_at"] | world.device["refuse_at"]
    for visit, (request, sink) in zip(world.visits, outcomes, strict=True):
        compare_with_reference(request, sink, world.limits, cancelled=visit.cancelled is not None, failed=bool(failures))
    reconcile(served, [sink for _, sink in outcomes])
    served.device.check_order(world.device["run_ahead"])


def compare_with_reference(request, sink, limits, *, cancelled=False, failed=False):
    expected, end = toy.reference_run(request, limits.max_model_len), sink.end
    assert end.prompt_tokens == len(request.prompt)
    assert sink.logprobs == expected.logprobs[: len(sink.tokens)]
    if end.reason in ("cancelled", "error"):
        assert cancelled if end.reason == "cancelled" else failed and "was told to fail" in end.message
        assert sink.tokens == expected.tokens[: len(sink.tokens)]
        assert end.completion_tokens == len(sink.tokens)
    else:
        assert (sink.tokens, end.reason, end.completion_tokens, end.message) == (*expected[:3], None)


def reconcile(served, sinks):
    """Checks that execution records, counters and the device agree."""
    stats, device = served.engine.stats(), served.device
    ends = [sink.end for sink in sinks]
    records = [end.record for end in ends]
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == stats["kv_cache_usage_perc"] == 0
    assert stats["requests_total"] == len(ends)
    for reason, count in Counter(end.reason for end in ends).items():
        assert stats[f"requests_finished_{reason}"] == count
    assert stats["generation_tokens_total"] == sum(end.completion_tokens for end in ends)
    assert stats["prompt_tokens_total"] == sum(end.prompt_tokens for end in ends if end.record.first_token_ms is not None)
    rows = Counter()
    for record in records:
        rows.update(record.prefill_chunks)
        rows.update(dict(record.decode_steps))
    assert rows <= device.rows
    assert device.rows.total() - rows.total() == stats["discarded_rows_total"]
    batch = {bucket.name: bucket.batch for bucket in device.buckets}
    steps = stats["bucket_steps"]
    whole = {name: n for name, n in steps.items() if not name.startswith(tuple(device.any_size))}
    padded = device.groups * sum(batch[name] * n for name, n in whole.items()) - sum(device.rows[name] for name in whole)
    assert stats["padded_rows_total"] == padded
    assert stats["steps_total"] == sum(steps.values()) == device.runs - stats["steps_failed_total"]
    decode = {name for name in steps if name.startswith("decode")}
    batches = {int(size): count for size, count in stats["decode_batch_steps"].items()}
    assert sum(batches.values()) == sum(steps[name] for name in decode)
    live, largest = sum(device.rows[name] for name in decode), sum(size * count for size, count in batches.items())
    assert largest <= live <= device.groups * largest
    assert stats["preemptions_total"] == sum(record.preemptions for record in records)
    assert stats["spec_decode_num_drafts_total"] == sum(record.verify_steps for record in records)
    assert stats["spec_decode_num_draft_tokens_total"] == sum(record.drafted_tokens for record in records)
    accepted = [sum(times) for times in zip(*(record.accepted_per_position for record in records), strict=True)]
    assert stats["spec_decode_num_accepted_tokens_per_pos"] == {str(place): times for place, times in enumerate(accepted)}
    assert stats["spec_decode_num_accepted_tokens_total"] == sum(accepted)
    for end in ends:
        reconcile_record(end, device.limits)
    reconcile_latencies(stats["histograms"], ends)


def reconcile_latencies(histograms, ends):
    """Checks that what was observed as it happened agrees with the records of the ends."""
    first = [end.record.first_token_ms for end in ends if end.record.first_token_ms is not None]
    assert histograms["time_to_first_token_seconds"].counts[-1] == len(first)
    assert histograms["time_to_first_token_seconds"].total == pytest.approx(sum(first) / 1e3)
    good = [end for end in ends if end.reason != "error" and end.record.first_token_ms is not None]
    assert histograms["e2e_request_latency_seconds"].counts[-1] == len(good)
    assert histograms["request_generation_tokens"].total == sum(end.completion_tokens for end in good)
    if len(good) == len(ends):
        # The gaps of a request that ended with its last token add up to what came after its first.
        decode_s = sum(end.record.total_ms - end.record.first_token_ms for end in ends if end.reason in ("stop", "length")) / 1e3
        assert histograms["inter_token_latency_seconds"].total >= decode_s - 1e-6


def reconcile_record(end, limits):
    record = end.record
    steps, accepted = sum(dict(record.decode_steps).values()), sum(record.accepted_per_position)
    assert 0 < record.queue_ms <= record.total_ms
    assert (record.first_token_ms is None) == (end.completion_tokens == 0)
    if record.first_token_ms is not None:
        assert record.queue_ms < record.first_token_ms <= record.total_ms
    assert len(record.accepted_per_position) == limits.drafts
    assert accepted <= record.drafted_tokens <= limits.drafts * record.verify_steps
    assert record.verify_steps <= steps
    assert list(record.accepted_per_position) == sorted(record.accepted_per_position, reverse=True)
    if end.completion_tokens and not record.preemptions:
        # Every decode step gives a token and those of its drafts that were accepted; the last one may give more than are wanted.
        assert 0 <= 1 + steps + accepted - end.completion_tokens <= (limits.drafts if steps else 0)


def test_a_record_to_the_letter():
    ticks = itertools.count()
    served = toy.serving(clock=lambda: next(ticks) / 8, refresh_every_s=None, run_ahead=0)
    sink = served.submit(ask(prompt=range(1, 12), max_tokens=4))
    served.drain()
    record = sink.end.record
    assert record.prefill_chunks == ("prefill-b1-q8", "prefill-b1-q3")
    assert record.decode_steps == (("decode-b2-q1", 3),)
    assert (record.padded_rows, record.preemptions, record.cached_tokens) == (3, 0, 0)
    assert (record.verify_steps, record.drafted_tokens, record.accepted_per_position, record.acceptance_length) == (0, 0, (), None)
    # Tick 0 is the constructor's, 1 the submission; each of the five steps reads the clock when it begins and when it ends.
    assert (record.queue_ms, record.first_token_ms, record.total_ms) == (125.0, 500.0, 1250.0)


def test_greedy_needs_no_randomness_and_seeds_matter():
    def tokens(**kinds):
        served = toy.serving()
        sink = toy.Collector()
        served.engine.submit(ask(max_tokens=20, **kinds), sink)
        served.drain()
        return sink.tokens

    assert tokens(seed=1) == tokens(seed=2)
    assert tokens(seed=1, temperature=1.0) == tokens(seed=1, temperature=1.0)
    assert tokens(seed=1, temperature=1.0) != tokens(seed=2, temperature=1.0)
    # No seed: each submission draws its own.
    assert tokens(seed=None, temperature=1.0) != tokens(seed=None, temperature=1.0)


# Running ahead.


def test_the_next_step_is_launched_before_the_outcome_of_the_one_before_is_read():
    served = toy.serving(toy.limits_of(4, 40, 8, 64, 2), refresh_every_s=None)
    sinks = [served.submit(ask(f"r{i}", (i, 1), 40, seed=i)) for i in range(2)]
    while any(len(sink.tokens) < 20 for sink in sinks):
        served.engine.step()
    log, steady = served.device.log, []
    for number in range(2, served.device.runs):
        steady += [("launch", number), ("result", number - 1)]
    assert log == [("launch", 1), *steady, ("launch", served.device.runs), ("result", served.device.runs - 1)]
    served.drain()
    served.device.check_order(1)
    assert all(sink.end.reason == "length" for sink in sinks)


def test_a_prompt_is_computed_when_its_last_chunk_has_ended():
    """That is in flight when the chunk before it ends."""
    served = toy.serving(toy.limits_of(4, 40, 8, 64, 2), refresh_every_s=None)
    parked = []
    served.engine.stepper.on_parked = lambda event: parked.append((event.request_id, list(served.device.log)))
    served.submit(replace(ask("a", [place % VOCAB for place in range(50)], 1), handover=SEND))
    for _ in range(30):
        served.engine.step()
    ((name, log),) = parked
    assert (name, log[-1]) == ("a", ("result", served.device.runs))
    assert served.device.runs > 1
    served.engine.cancel("a")
    served.drain()


def test_peers_write_to_pages_once_no_step_in_flight_can_use_them():
    served = toy.serving(toy.limits_of(4, 40, 8, 64, 2), refresh_every_s=None)
    device, told, parked = served.device, [], []
    device.receive = lambda group, numbers, ready: told.append((group, numbers, list(device.log), ready))
    served.engine.stepper.on_parked = parked.append
    running = served.submit(ask("a", max_tokens=60))
    while len(running.tokens) < 10:
        served.engine.step()
    before = device.runs
    served.submit(replace(ask("b", range(1, 10)), handover=RECEIVE))
    while not told:
        served.engine.step()
    (group, numbers, log, ready), state = told.pop(), ("result", before)
    assert (group, len(numbers["pages"]), len(numbers["slots"])) == (0, 2, 1)
    assert log[-1] == state
    assert ("launch", before + 1) in log
    assert parked == []
    ready()
    assert [(event.request_id, event.pages, event.slot) for event in parked] == [("b", numbers["pages"], *numbers["slots"])]
    served.engine.cancel("b")
    served.drain()
    # With nothing in flight they may at once.
    served.submit(replace(ask("c", range(1, 10)), handover=RECEIVE))
    served.engine.step()
    told.pop()[-1]()
    assert parked[-1].request_id == "c"
    served.engine.cancel("c")
    served.drain()


@pytest.mark.parametrize("how", ["fail_at", "refuse_at"])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_step_that_fails_while_another_is_in_flight_ends_its_own_requests_only(how, number, caplog):
    served = toy.serving(drafts=2, buckets=toy.buckets_of(2, (8,), (1,)), **{how: frozenset({number})})
    requests = [ask(f"r{i}", (i, 2), 12, seed=i, temperature=0.5) for i in range(3)]
    sinks = [served.submit(request) for request in requests]
    served.drain()
    served.engine.stepper.check()
    ends = Counter(sink.end.reason for sink in sinks)
    assert ends == {"error": 1, "length": 2}
    for request, sink in zip(requests, sinks, strict=True):
        compare_with_reference(request, sink, served.device.limits, failed=True)
    reconcile(served, sinks)
    assert f"run {number} was told to fail" in caplog.text


def test_tokens_in_flight_before_a_step_that_cannot_be_launched_are_delivered(caplog):
    served = toy.serving(refuse_at=frozenset({4}))
    sink = served.submit(ask(max_tokens=9))
    served.drain()
    assert (sink.end.reason, len(sink.tokens)) == ("error", 3)
    assert served.device.log == [("launch", 1), ("launch", 2), ("result", 1), ("launch", 3), ("result", 2), ("refused", 4), ("result", 3)]
    assert "failed" in caplog.text


@pytest.mark.parametrize("ahead", [-1, 1, 2])
def test_running_ahead_is_what_the_executor_allows(ahead):
    device = toy.serving().device
    device.run_ahead = 0
    with pytest.raises(SpecError, match=f"run_ahead is {ahead}; legal is 0 to 0, the executor allows 0"):
        Engine(device, run_ahead=ahead)
    device.run_ahead = 2
    with pytest.raises(SpecError, match="run_ahead is 2; legal is 0 to 1, the executor allows 2"):
        Engine(device)


# Buckets that a device cannot run.


def test_steps_of_a_bucket_that_cannot_run_go_to_the_next_larger_one_and_are_counted():
    small, large = Bucket("decode", 2, 1), Bucket("decode", 4, 1)
    prefill, longer = Bucket("prefill", 1, 3), Bucket("prefill", 1, 8)
    served = toy.serving(buckets=(longer, large), missing={small: "no kernel", prefill: "no kernel"}, run_ahead=0)
    one = served.submit(ask("one", (1, 2), 3))
    served.drain()
    assert one.tokens == toy.reference_run(ask("one", (1, 2), 3), 32).tokens
    assert served.engine.stats()["degraded_steps"] == {small.name: 2, prefill.name: 1}
    for name in "abc":
        served.submit(ask(name, (1, 2, 3, 4), 3))
    served.drain()
    # Three rows fit neither bucket that is missing; the steps of the first and of the last row do.
    assert served.engine.stats()["degraded_steps"][prefill.name] == 1
    assert served.engine.stats()["bucket_steps"][large.name] > 2


# Refusals.


def test_an_id_is_unique_among_live_requests_only():
    served = toy.serving()
    first = served.submit(ask("a"))
    with pytest.raises(RequestError, match="'a' is the id of a live request"):
        served.submit(ask("a"))
    served.drain()
    second = served.submit(ask("a"))
    served.drain()
    assert first.tokens == second.tokens != []


def test_an_id_is_free_again_inside_the_last_event():
    served = toy.serving()
    ends = []

    def resubmit(event):
        if isinstance(event, FinishEvent) and len(ends) < 3:
            ends.append(event)
            served.submit(ask("a"), resubmit)

    served.submit(ask("a"), resubmit)
    served.drain()
    assert len(ends) == 3
    assert served.engine.stats()["requests_finished_length"] == 4


# Cancel and failure.


def test_cancel_before_the_first_step_while_decoding_and_when_unknown():
    served = toy.serving()
    early = served.submit(ask("early"))
    assert served.engine.cancel("early")
    late = served.submit(ask("late", max_tokens=20))
    for _ in range(4):
        served.engine.step()
    assert served.engine.cancel("late")
    assert not served.engine.cancel("nobody")
    served.drain()
    assert (early.end.reason, early.tokens, early.end.record.prefill_chunks) == ("cancelled", [], ())
    assert late.end.reason == "cancelled"
    assert 0 < len(late.tokens) < 20
    assert late.tokens == toy.reference_run(ask("late", max_tokens=20), 32).tokens[: len(late.tokens)]
    assert not served.engine.cancel("late")


def test_a_late_cancel_does_not_hit_a_new_request_of_the_same_id():
    served = toy.serving()
    first, second = toy.Collector(), toy.Collector()

    def sink(event):
        if isinstance(event, TokenEvent):
            # Queued while the request lives, handled when it is over: max_tokens is 1.
            served.engine.cancel("a")
        else:
            served.submit(ask("a"), second)
        first(event)

    served.submit(ask("a", max_tokens=1), sink)
    served.drain()
    assert (first.end.reason, second.end.reason) == ("length", "length")


def test_a_failed_step_that_preempted_loses_only_its_own_rows(caplog):
    limits = Limits(page_size=2, num_pages=6, num_slots=9, max_model_len=8)
    requests = [ask(n, max_tokens=5) for n in "ab"]

    def begun(fail_at):
        served = toy.serving(limits, toy.buckets_of(0, (8,), (4,)), fail_at=fail_at)
        sinks = [served.submit(request) for request in requests]
        while not served.engine.stats()["preemptions_total"]:
            assert served.engine.step()
            served.engine.stepper.check()
        return served, sinks

    # The second run fails in the step in which the first one preempted "b".
    served, _ = begun(frozenset())
    served, sinks = begun(frozenset({served.device.runs}))
    served.drain()
    assert [sink.end.reason for sink in sinks] == ["error", "length"]
    assert sinks[1].end.record.preemptions == 1
    assert sinks[1].tokens == toy.reference_run(requests[1], 8).tokens
    reconcile(served, sinks)
    assert "was told to fail" in caplog.text


def test_a_sink_that_raises_loses_its_request_only(caplog):
    served = toy.serving()

    def broken(event):
        raise ValueError("no reader")

    served.submit(ask("broken", max_tokens=20), broken)
    good = served.submit(ask("good"))
    served.drain()
    assert good.tokens == toy.reference_run(ask("good"), 32).tokens
    assert served.engine.stats()["requests_finished_cancelled"] == 1
    assert "the sink of 'broken' raised" in caplog.text


def test_a_leak_is_found_when_idle():
    served = toy.serving()
    served.submit(ask())
    served.engine.step()
    served.engine.stepper.cache_managers[0].pages.allocate(1, "thief")
    with pytest.raises(OwnershipError, match="thief"):
        served.drain()


# Gauges and refresh.


def test_gauges_while_running():
    served = toy.serving(toy.limits_of(4, 17, 1, 32), refresh_every_s=None)
    served.device.backends = {"decode-b2-q1": "eager"}
    for name in "abc":
        served.submit(ask(name, prompt=[1] * 9))
    assert served.engine.stats()["num_requests_waiting"] == 3
    served.engine.step()
    stats = served.engine.stats()
    assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (1, 2)
    assert stats["kv_cache_usage_perc"] == 3 / 16
    assert stats["backends"] == {"decode-b2-q1": "eager"}
    assert stats["compiles_after_ready_total"] == 0
    served.drain()


def test_refresh_is_called_between_steps_as_often_as_the_clock_allows():
    now = [0.0]
    served = toy.serving(clock=lambda: now[0], refresh_every_s=2.0)
    served.submit(ask(max_tokens=20))
    counts = []
    for now[0] in (0.0, 1.9, 2.0, 2.1, 3.9, 4.0, 9.0, 9.5):
        served.engine.step()
        counts.append(served.device.refreshes)
    assert counts == [0, 0, 1, 1, 1, 2, 3, 3]


# Threads.


@pytest.mark.parametrize("lazy", [False, True])
def test_requests_from_many_threads_are_served_and_stop_drains(lazy):
    served = toy.serving(drafts=2, lazy=lazy)
    served.engine.start()
    requests = {f"r{i}": ask(f"r{i}", (i, i, 1), 12, seed=i, temperature=1.0) for i in range(8)}
    sinks = {name: toy.Collector() for name in requests}

    def client(names):
        for name in names:
            served.submit(requests[name], sinks[name])

    clients = [threading.Thread(target=client, args=(list(requests)[i::4],)) for i in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
    served.engine.stop()
    for name, request in requests.items():
        assert sinks[name].tokens == toy.reference_run(request, 32).tokens
    reconcile(served, list(sinks.values()))
    with pytest.raises(RequestError, match="takes no new requests: it is stopping"):
        served.engine.submit(ask(), toy.Collector())
    served.engine.stop()


def test_every_end_is_told_once_after_its_sink():
    served, told = toy.serving(), []
    sinks = [served.submit(ask(f"r{i}", max_tokens=2 + i)) for i in range(3)]
    served.engine.on_end = lambda end: told.append((end, end in [sink.end for sink in sinks]))
    served.engine.cancel("r2")
    served.drain()
    assert {end.request_id: (end.reason, known) for end, known in told} == {
        "r0": ("length", True),
        "r1": ("length", True),
        "r2": ("cancelled", True),
    }
    assert len(told) == 3


# Each of these mistakes is caught by the toy device or by the oracle.


def spoil_pages(inputs):
    inputs["page_table"][:, 0] = inputs["page_table"][0, 0]


def spoil_base(inputs):
    if "base" in inputs:
        inputs["base"] -= inputs["base"] > 0


def spoil_slots(inputs):
    if "base" in inputs:
        inputs["state_slots_out"] = np_roll(inputs["state_slots_out"])


def np_roll(array):
    return array[:, [*range(1, array.shape[1]), 0]]


def spoil_request_slots(inputs):
    inputs["request_slots"][inputs["request_slots"] > 0] = inputs["request_slots"].max()


def spoil_uniform(inputs):
    inputs["uniform"] += 2.0**-20 * (inputs["request_slots"] > 0)[:, None]


def spoil_settings(inputs):
    inputs["temperature"] *= 2


def spoil_next_tokens(inputs):
    if "next_tokens" in inputs:
        inputs["next_tokens"][:] = -1


@pytest.mark.parametrize(
    "spoil", [spoil_pages, spoil_base, spoil_slots, spoil_request_slots, spoil_uniform, spoil_settings, spoil_next_tokens]
)
def test_the_toy_catches(spoil, caplog):
    served = toy.serving(toy.limits_of(4, 33, 8, 32, 2), toy.buckets_of(2, (2,), (4,)))
    honest = served.device.launch

    def launch(bucket, inputs):
        spoil(inputs[0])
        return honest(bucket, inputs)

    requests = [ask(f"r{i}", (i, 2, 3), 12, seed=i, temperature=1.0) for i in range(3)]
    sinks = [served.submit(request) for request in requests]
    served.device.launch = launch
    try:
        served.drain()
    except (AssertionError, IndexError):
        return
    assert [sink.tokens for sink in sinks] != [toy.reference_run(request, 32).tokens for request in requests]


# Many at once, and an engine that cannot go on.


class Shared(BatchSink):
    """A sink of many requests."""

    def __init__(self):
        self.batches = []

    def deliver(self, events):
        self.batches.append(list(events))


def test_many_requests_come_and_go_in_one_pass_each(monkeypatch):
    """One dropped socket of 2048 requests took a second, four took fourteen: each cancel walked over all that lived."""
    passes = Counter()
    for name in ("submit", "cancel"):
        monkeypatch.setattr(advance, name, counting(getattr(advance, name), passes, name))
    served, sink = toy.serving(), Shared()
    names = [f"r{i}" for i in range(300)]
    for name in names:
        served.engine.submit(ask(name, max_tokens=20), sink)
    served.engine.step()
    assert passes == {"submit": 1}
    assert served.engine.cancel(*names)
    sink.batches.clear()
    served.engine.step()
    assert passes == {"submit": 1, "cancel": 1}
    (ended,) = [batch for batch in sink.batches if any(event.reason == "cancelled" for event in batch if isinstance(event, FinishEvent))]
    assert {event.request_id for event in ended} == set(names)
    served.drain()
    served.engine.stepper.check()


def counting(function, passes, name):
    def counted(*args):
        passes[name] += 1
        return function(*args)

    return counted


# Deadlines.


class Hands:
    """A clock that goes on when a test says so."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.none() | st.integers(1, 12), st.none() | st.integers(1, 6)), min_size=1, max_size=8),
    st.integers(0, 1),
    st.integers(1, 4),
)
def test_a_request_past_its_deadline_ends_within_a_step_wherever_it_is(arrivals, run_ahead, slots):
    clock = Hands()
    served = toy.serving(toy.limits_of(4, 25, slots, 32), clock=clock, run_ahead=run_ahead, refresh_every_s=None)
    sinks = {}
    for now in range(80):
        clock.now_s = float(now)
        for i, (at, most, first) in enumerate(arrivals):
            if at == now:
                limits = {"timeout_ms": most and 1e3 * most, "first_token_timeout_ms": first and 1e3 * first}
                sinks[i] = served.submit(replace(ask(f"r{i}", (i, 1), 9, seed=i), **limits))
        before = {i: len(sink.tokens) for i, sink in sinks.items()}
        served.engine.step()
        served.engine.stepper.check()
        for i, sink in sinks.items():
            at, most, first = arrivals[i]
            late = (most is not None and now - at >= most) or (first is not None and now - at >= first and not before[i])
            if late:
                assert sink.end is not None
            if sink.end is not None and sink.end.reason == "timeout":
                assert sink.end.record.total_ms >= 1e3 * min(limit for limit in (most, first) if limit)
                assert sink.tokens == toy.reference_run(ask(f"r{i}", (i, 1), 9, seed=i), 32).tokens[: len(sink.tokens)]
    served.drain()
    assert {sink.end.reason for sink in sinks.values()} <= {"length", "timeout"}
    reconcile_stats = served.engine.stats()
    assert reconcile_stats["requests_finished_timeout"] == sum(sink.end.reason == "timeout" for sink in sinks.values())
    assert reconcile_stats["kv_cache_usage_perc"] == 0


def test_a_timeout_says_what_it_allowed_and_how_far_it_was():
    clock = Hands()
    served = toy.serving(toy.limits_of(4, 9, 1, 32), clock=clock, run_ahead=0)
    long = served.submit(replace(ask("a", max_tokens=20), timeout_ms=5e3, first_token_timeout_ms=2e3))
    waits = served.submit(replace(ask("b"), timeout_ms=9e3, first_token_timeout_ms=4e3))
    for now in range(7):
        clock.now_s = float(now)
        served.engine.step()
    assert waits.end.message == "the request has taken 4000 ms; it was allowed 4000 ms to its first token and was waiting"
    assert long.end.message == "the request has taken 5000 ms; it was allowed 5000 ms and had 5 tokens"
    assert (waits.end.reason, long.end.reason, long.end.completion_tokens) == ("timeout", "timeout", 5)
