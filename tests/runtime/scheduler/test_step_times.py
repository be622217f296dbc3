"""runtime/scheduler/step_times.py: measured times are medians that forget, and decide what runs between two decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduling import add, all_decode, fresh, policy, request, run_step

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.encode import ENCODE
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.types import Bucket
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.step_times import ENOUGH, FRESH_STEPS, SAMPLES, SWEEP_STEPS, UNMEASURED, StepTimes

ONE, EIGHT, LONG = Bucket("prefill", 1, 32), Bucket("prefill", 8, 32), Bucket("prefill", 1, 256)
SMALL, LARGE = Bucket("decode", 1, 1), Bucket("decode", 4, 1)


def test_a_step_that_was_held_up_is_forgotten():
    times = UNMEASURED
    for ms in [5.0] * (ENOUGH - 1):
        times = times.after(ONE, ms)
    assert ONE not in times.ms
    for ms in (900.0, 5.0, 6.0):
        times = times.after(ONE, ms)
        assert times.ms[ONE] < 7
    for _ in range(SAMPLES):
        times = times.after(ONE, 9.0)
    assert (times.ms, times.samples) == ({ONE: 9.0}, {ONE: (9.0,) * SAMPLES})


def test_a_prefill_bucket_that_was_not_used_for_long_is_as_new():
    times = UNMEASURED
    for bucket in [EIGHT, SMALL] * ENOUGH + [ONE] * (FRESH_STEPS + SWEEP_STEPS):
        times = times.after(bucket, 5.0)
    assert set(times.ms) == set(times.samples) == set(times.last) == {ONE, SMALL}


def test_what_was_not_measured_follows_from_what_was():
    prices = {ONE: 64.0, EIGHT: 288.0}
    assert UNMEASURED.cost(PREFILL, prices.__getitem__) is None
    cost = StepTimes(ms={ONE: 32.0}).cost(PREFILL, prices.__getitem__)
    assert (cost(ONE), cost(EIGHT)) == (32.0, 144.0)
    assert UNMEASURED.decode_ms(SMALL) == 0
    # A smaller bucket that takes longer may be what runs, and the next larger one stands for one that was not measured.
    times = StepTimes(ms={SMALL: 9.0, LARGE: 8.0})
    assert [times.decode_ms(Bucket("decode", rows, 1)) for rows in (1, 2, 4, 8)] == [9.0] * 4
    assert StepTimes(ms={LARGE: 8.0}).decode_ms(SMALL) == 8.0


@pytest.mark.parametrize(("together", "expected"), [(300.0, "prefill-b8-q32"), (330.0, "prefill-b1-q32")])
def test_prompts_share_a_step_by_what_steps_really_take(together, expected):
    rules = replace(policy(prefill=(32, (8, 32)), pages=900, length=600), measured=True)
    state = fresh(rules, *(request(f"r{i}", prompt=32) for i in range(8)))
    assert schedule(state).bucket == EIGHT
    assert schedule(replace(state, times=StepTimes(ms={ONE: 40.0, EIGHT: together}))).bucket.name == expected


@pytest.mark.parametrize(("decode", "target", "expected"), [(10.0, None, ONE), (60.0, None, LONG), (60.0, 1e3, ONE)])
def test_decode_steps_between_small_steps_count_as_long_as_they_take(decode, target, expected):
    """Three steps of 20 ms, and two that decode between them; with a target that leaves time for all, none is between."""
    rules = replace(policy(prefill=(32, 256), decode=(4,), pages=900, length=600), measured=True, itl_target_ms=target)
    state, _, _ = run_step(fresh(rules, request("stream", prompt=1, max_tokens=500)))
    state, _, _ = run_step(state)
    state = replace(add(state, request("a", prompt=96)), times=StepTimes(ms={LARGE: decode, ONE: 20.0, LONG: 130.0}))
    assert schedule(state).bucket == expected


def test_nothing_fits_a_target_without_measured_times():
    with pytest.raises(SpecError, match=r"itl_target_ms is 5\.0 and measured is False; legal is above 0 with measured times"):
        replace(policy(), itl_target_ms=5.0)
    with pytest.raises(SpecError, match="itl_target_ms is 0"):
        replace(policy(), measured=True, itl_target_ms=0.0)


def test_the_target_chooses_how_many_chunks_of_which_size():
    rules = replace(policy(prefill=(32, 256), decode=(4,), pages=900, length=600), measured=True, itl_target_ms=100.0)
    state = fresh(rules, request("stream", prompt=1, max_tokens=500))
    state, _, _ = run_step(state)

    def kinds(decode, one, long):
        now = replace(add(state, request("long", prompt=550)), times=StepTimes(ms={LARGE: decode, ONE: one, LONG: long}))
        names = []
        for _ in range(7):
            now, step, _ = run_step(now)
            names.append({LARGE: "d", ONE: "s", LONG: "l"}[step.bucket])
        return "".join(names)

    # 550 tokens are two long steps and two small ones.
    assert kinds(10, 20, 60) == "lsdlsdd"
    assert kinds(10, 20, 95) == "ssssdss"
    assert kinds(50, 20, 60) == "ssdssds"
    # The step before them was one, too.
    assert kinds(99, 20, 60) == "dsdsdsd"
    # With nobody to wait for it the largest step is chosen.
    alone = replace(fresh(rules, request("long", prompt=550)), times=StepTimes(ms={LARGE: 99.0, ONE: 20.0, LONG: 600.0}))
    assert schedule(alone).bucket == LONG


def test_until_times_are_known_streams_wait_for_the_smallest_step():
    rules = replace(policy(prefill=(32, 256), decode=(4,), pages=900, length=600), measured=True, itl_target_ms=1e6)
    state = fresh(rules, request("stream", prompt=1, max_tokens=500))
    state, _, _ = run_step(state)
    state, names = add(state, request("long", prompt=590)), []
    for _ in range(6):
        state, step, _ = run_step(state)
        names.append(step.bucket.name)
        state = replace(state, times=state.times.after(step.bucket, 10.0))
    assert names == ["decode-b4-q1", "prefill-b1-q32"] * 3
    # Three times of each are enough.
    assert schedule(state).bucket == LONG


def tokens_of(bucket):
    return float(bucket.tokens)


MS = st.floats(0.5, 50)


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.integers(1, 6), min_size=1, max_size=3),
    st.sets(st.tuples(st.integers(1, 3), st.integers(1, 16)), min_size=1, max_size=4),
    st.floats(1, 120),
    st.data(),
)
def test_the_gap_between_decode_steps_has_a_bound_and_prompts_go_on(decode, prefill, target, data):
    rules = replace(policy(decode=decode, prefill=prefill, pages=400, length=32), measured=True, itl_target_ms=target)
    ms = {bucket: data.draw(MS, label=bucket.name) for bucket in rules.buckets}
    state = replace(fresh(rules), times=StepTimes(ms=ms))
    cheapest = min(ms[b] for b in rules.buckets if b.kind == "prefill")
    arrivals = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 28), st.integers(1, 16)), min_size=1, max_size=12))
    gap, waiting_for = 0.0, 0
    for now in range(3000):
        state = add(state, *(request(f"r{i}", prompt, most) for i, (at, prompt, most) in enumerate(arrivals) if at == now))
        streams = state.groups[0].decodable(rules.limits)
        step = schedule(state)
        if step is None:
            if now > 60:
                break
            continue
        # The gap that somebody sees who decodes since the last decode step, or since his first token.
        gap = gap + ms[step.bucket] if streams else 0.0
        if step.bucket.kind == "decode":
            assert gap <= max(target, ms[step.bucket] + cheapest) + 1e-6 or gap == ms[step.bucket]
            gap, waiting_for = 0.0, waiting_for + 1
        else:
            waiting_for = 0
        # A prompt that can go on does so after every decode step at the latest.
        assert waiting_for < 2 or not any(not r.decoding for r in state.groups[0].running)
        state, _, _ = run_step(state)
    assert not state.groups[0].num_requests


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 2), st.floats(1, 20), st.floats(1, 400), st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_a_chunk_of_any_length_is_as_long_as_the_target_allows(rate, decode_ms, target, lengths):
    """On a machine whose steps take what they cost, once three of each kind are known."""
    rules = policy(prefill=(256,), decode=(8,), pages=2000, length=400, requests=8)
    rules = replace(rules, measured=True, itl_target_ms=target, fixed_tokens=40.0, any_size=frozenset({"prefill", "decode"}))
    machine = StepTimes()
    for _ in range(3):
        machine = machine.after_any_size(Bucket("prefill", 1, 30), rate * rules.price(Bucket("prefill", 1, 30)))
        for rows in range(1, 9):
            machine = machine.after(Bucket("decode", rows, 1), decode_ms)
    state = all_decode(replace(rules, itl_target_ms=None), request("stream", prompt=1, max_tokens=390))
    state = add(replace(state, policy=rules, times=machine), *(request(f"r{i}", prompt=length) for i, length in enumerate(lengths)))
    gap, bound = 0.0, max(target, decode_ms + rate * rules.price(Bucket("prefill", 1, rules.least_tokens(PREFILL))))
    while state.groups[0].waiting or not all(live.decoding for live in state.groups[0].running):
        state, step, _ = run_step(state)
        assert step.sizes is not None
        if step.bucket.kind == "decode":
            assert gap + decode_ms <= bound + 1e-6
            gap = 0.0
            continue
        gap += rate * rules.price(step.sizes)
        row = step.groups[0].rows[0]
        if row.num_tokens < min(row.state.num_to_prefill - row.start, 256):
            longer = rate * rules.price(replace(step.sizes, q_len=row.num_tokens + 1))
            assert row.num_tokens == rules.least_tokens(PREFILL) or gap - rate * rules.price(step.sizes) + longer + decode_ms > target


def test_steps_of_any_size_are_measured_by_their_price():
    times, steps = UNMEASURED, [Bucket("prefill", rows, 10 + rows) for rows in range(1, 12)]
    for number, sizes in enumerate(steps):
        assert (times.rate(PREFILL, tokens_of) is None) == (number < 3)
        times = times.after_any_size(sizes, (100.0 if number == 9 else 2.0) * sizes.tokens)
    # A step that was held up is forgotten, and only the last are kept.
    assert times.rate(PREFILL, tokens_of) == 2.0
    assert len(times.any_size["prefill"]) == 8
    assert times.ms == {}
    assert times.rate(ENCODE, tokens_of) is None
