"""tools/advisor/plan/simulate.py: the same requests at the same times as the scheduler that the server runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduled import served

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.step_times import StepTimes
from npucompile.runtime.steps.sizes import choose
from npucompile.tools.advisor.plan.simulate import SimulatedSetting, simulate
from npucompile.tools.advisor.plan.system import PlannedServing, Workload
from npucompile.tools.advisor.plan.table import StepTable

PAGE = 16
TICK = 1 / 1024
"""Seconds; all times are multiples, so that sums are exact and nothing depends on rounding."""


@st.composite
def loads(draw):
    requests = draw(st.integers(1, 14))

    def each(values):
        return tuple(draw(st.lists(values, min_size=requests, max_size=requests)))

    # Arrivals are never at the end of a step.
    arrivals = sorted((i + 0.25) * TICK for i in each(st.integers(0, 4000))) if draw(st.booleans()) else ()
    priorities = each(st.sampled_from([-1, 0, 7])) if draw(st.booleans()) else ()
    sizes = st.integers(1, 60)
    return Workload(each(sizes), each(sizes), draw(st.integers(1, 9)), tuple(arrivals), priorities=priorities)


def merged(steps):
    """The steps, with decode steps of as many rows that follow one another as one."""
    stretches = []
    for kind, rows, start, end in steps:
        if kind == "decode" and stretches and stretches[-1][:2] == (kind, rows) and stretches[-1][3] == start:
            start = stretches.pop()[2]
        stretches.append((kind, rows, start, end))
    return stretches


@settings(max_examples=300, deadline=None)
@given(
    loads(),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sets(st.tuples(st.integers(1, 3), st.integers(4, 48)), min_size=1, max_size=4),
    st.integers(1, 2),
    st.data(),
)
def test_it_is_the_scheduler_that_serves(work: Workload, running: int, tokens: int, sizes, burst: int, data) -> None:
    prefill = tuple(sorted(Bucket("prefill", *size) for size in sizes))
    decode = tuple(Bucket("decode", batch, tokens) for batch in sorted({1, 2, running}))
    ticks = {bucket: data.draw(st.integers(2, 90), label=bucket.name) for bucket in (*prefill, *decode)}
    seconds = {bucket: count * TICK for bucket, count in ticks.items()}
    target = data.draw(st.sampled_from([None, 1.0, 40.0, 75.0, 125.0, 400.0]), label="target")
    limits = Limits(PAGE, 1 + running * 16, 1 + running * tokens, 256, tokens, tokens - 1)
    fixed = data.draw(st.none() | st.floats(1, 99), label="fixed")
    policy = Policy(limits, (*prefill, *decode), burst, target is not None, target, fixed)
    times = None if target is None else StepTimes(ms={bucket: 1e3 * each for bucket, each in seconds.items()})
    expected = served(work, policy, 1, tokens, lambda step: seconds[step.bucket], times)

    most = max(bucket.batch for bucket in prefill)
    chunk = max(bucket.q_len for bucket in prefill)
    decode_s = {bucket.batch: seconds[bucket] for bucket in decode}
    table = StepTable(list(decode_s), 1, 128, lambda batch, context: np.vectorize(decode_s.get)(batch) + 0 * context)
    serving = PlannedServing(
        "npucompile", running, chunk * most, chunk, most, prefill_burst=burst, itl_target_ms=target, fixed_tokens=fixed
    )
    times_s = lambda largest, _, new, cached: seconds[Bucket("prefill", largest, new)]  # noqa: E731
    trace = simulate(SimulatedSetting(work, serving, [float(tokens)] * work.requests, 1, 1e9, table, times_s), policy.buckets)
    assert (trace.sent, trace.first, trace.end) == (expected.sent, expected.first, expected.end)
    assert merged((span.kind, span.rows, span.start_s, span.end_s) for span in trace.spans) == merged(expected.steps)
    assert sorted(gap for gap, count in trace.gaps for _ in range(count)) == sorted(expected.gaps)
    assert all(choose(decode, rows).batch == table.bucket(rows) for rows in trace.steps)


def plain(work: Workload, policy: str = "sglang", pool: float = 1e9, dp: int = 1, **options):
    """A load on steps of 10 ms and prefill of 1 ms a token."""
    table = StepTable(range(1, work.concurrency + 1), 1, 1000, lambda batch, context: 0.01 + 0 * batch * context)
    serving = PlannedServing(policy, work.concurrency, **{"budget": 100, **options})
    prefill_s = lambda largest, _, new, cached: 0.001 * largest * new  # noqa: E731
    return simulate(SimulatedSetting(work, serving, [1.0] * work.requests, dp, pool, table, prefill_s))


def test_first_tokens_leave_one_step_late_where_results_are_read_late():
    trace = plain(Workload.uniform(100, 11, 2, 2))
    assert trace.first == pytest.approx([0.2, 0.21])
    assert trace.end == pytest.approx([0.3, 0.3])


def test_a_shared_prefix_is_computed_once_a_group():
    with_prefix = plain(Workload.uniform(100, 2, 4, 4, cached=90), budget=1000)
    assert with_prefix.prefill_busy_s == pytest.approx(0.1 + 3 * 0.01)


def test_groups_without_a_prompt_decode_meanwhile():
    work = Workload((100, 100, 100), (6, 60, 5), 2)
    trace = plain(work, dp=2)
    # Group 0's second prompt is one pass, in which the other group takes one step.
    assert sum(trace.steps.values()) == 58


@given(st.integers(2, 6), st.integers(20, 60))
@settings(max_examples=25, deadline=None)
def test_too_little_memory_delays_and_loses_nothing(requests: int, output: int) -> None:
    work = Workload.uniform(50, output, requests, requests * 2)
    ample, scarce = plain(work), plain(work, pool=1.6 * (50 + output))
    assert min(np.asarray(scarce.end) - np.asarray(scarce.first)) > 0
    assert scarce.makespan_s >= ample.makespan_s - 1e-9
    assert all(scarce.end)


def test_prefill_waits_for_all_groups_at_most_thirty_steps():
    work = Workload((100, 100, 100), (4, 200, 2), 2)
    trace = plain(work, dp=2, waits=True)
    eager = plain(work, dp=2)
    assert trace.first[2] - eager.first[2] == pytest.approx(0.30, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4), st.integers(4, 10), st.integers(0, 2), st.integers(5, 60), st.integers(5, 60), st.integers(1, 2),
    st.sampled_from([None, 70.0, 130.0]), st.sampled_from([(0,), (0, 2), (0, 0, -1)]),
)  # fmt: skip
def test_several_groups_are_near_the_scheduler_that_serves(
    groups: int, each: int, waits: int, prompt: int, output: int, tokens: int, target: float | None, levels: tuple[int, ...]
) -> None:
    """Which of several equally loaded groups a request joins depends on pages, which only the scheduler counts."""
    most, places = groups * each, each - waits
    work = replace(Workload.uniform(prompt, output, most, 3 * most), priorities=(levels * 3 * most)[: 3 * most])
    prefill, decode = (Bucket("prefill", 1, 32),), tuple(Bucket("decode", batch, tokens) for batch in sorted({1, places // 2, places}))
    limits = Limits(PAGE, 1 + each * 8, 1 + places * tokens, 128, tokens, tokens - 1)
    policy = Policy(limits, (*prefill, *decode), measured=target is not None, itl_target_ms=target)
    seconds = {bucket: 0.03 if bucket.kind == "prefill" else 0.01 + 0.002 * bucket.batch for bucket in policy.buckets}
    times = None if target is None else StepTimes(ms={bucket: 1e3 * own for bucket, own in seconds.items()})
    expected = served(work, policy, groups, tokens, lambda step: seconds[step.bucket], times)
    table = StepTable([b.batch for b in decode], 1, 128, lambda batch, context: 0.01 + 0.002 * batch + 0 * context)
    serving = PlannedServing("npucompile", places, 32, 32, 1, itl_target_ms=target)
    setting = SimulatedSetting(work, serving, [float(tokens)] * work.requests, groups, 1e9, table, lambda *_: 0.03)
    trace = simulate(setting, policy.buckets)
    for ours, theirs in ((trace.first, expected.first), (trace.end, expected.end)):
        mean = np.mean(np.subtract(theirs, expected.sent))
        assert np.mean(np.subtract(ours, trace.sent)) == pytest.approx(mean, rel=0.1)
    assert trace.makespan_s == pytest.approx(max(expected.end) - min(expected.sent), rel=0.1)
