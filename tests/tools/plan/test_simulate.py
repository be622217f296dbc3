"""tools/plan/simulate.py: the same requests at the same times as the scheduler that the server runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduled import served

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.buckets import choose
from npucompile.runtime.scheduler.policy import Policy
from npucompile.tools.plan.simulate import simulate
from npucompile.tools.plan.system import Serving, Workload
from npucompile.tools.plan.table import StepTable

PAGE = 16


def step_s(decode_s, prefill_s):
    """Seconds of a step by its bucket."""
    return lambda step: decode_s(step.bucket.batch) if step.bucket.kind == "decode" else prefill_s(step.bucket)


@st.composite
def loads(draw):
    requests = draw(st.integers(1, 12))
    concurrency = draw(st.integers(1, 6))
    sizes = st.lists(st.integers(1, 60), min_size=requests, max_size=requests)
    arrivals = (
        sorted(i * 0.0371 for i in draw(st.lists(st.integers(0, 80), min_size=requests, max_size=requests))) if draw(st.booleans()) else []
    )
    return Workload(tuple(draw(sizes)), tuple(draw(sizes)), concurrency, tuple(arrivals))


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(16,), (8, 32)]), st.integers(1, 2))
def test_it_is_the_scheduler_that_serves(work: Workload, tokens: int, prompts: int, chunks: tuple[int, ...], burst: int) -> None:
    chunk, most = chunks[-1], work.concurrency
    prefill = tuple(Bucket("prefill", count, chunk) for count in sorted({1, prompts}))
    decode = tuple(Bucket("decode", batch, tokens) for batch in sorted({1, 2, most}))
    limits = Limits(PAGE, 1 + most * 16, 1 + most * tokens, 256, tokens, tokens - 1)
    policy = Policy(limits, (*prefill, *decode), burst)

    def decode_s(batch):
        return 0.01 + 0.002 * batch

    def prefill_s(bucket):
        return 0.03 + 0.001 * bucket.tokens

    expected = served(work, policy, 1, tokens, step_s(decode_s, prefill_s))
    table = StepTable([b.batch for b in decode], 1, 128, lambda batch, context: 0.01 + 0.002 * batch + 0 * context)
    serving = Serving("npucompile", most, chunk * prompts, chunk, prompts, prefill_burst=burst)
    trace = simulate(
        work, serving, [float(tokens)] * work.requests, 1, 1e9, table,
        lambda largest, _, new, cached: 0.03 + 0.001 * largest * new, sizes=prefill,
    )  # fmt: skip
    for ours, theirs in zip((trace.sent, trace.first, trace.end), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert all(choose(decode, rows).batch == table.bucket(rows) for rows in trace.steps)


def plain(work: Workload, policy: str = "sglang", pool: float = 1e9, dp: int = 1, **options):
    """A load on steps of 10 ms and prefill of 1 ms a token."""
    table = StepTable(range(1, work.concurrency + 1), 1, 1000, lambda batch, context: 0.01 + 0 * batch * context)
    serving = Serving(policy, work.concurrency, **{"budget": 100, **options})
    return simulate(work, serving, [1.0] * work.requests, dp, pool, table, lambda largest, _, new, cached: 0.001 * largest * new)


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


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(4, 10), st.integers(5, 60), st.integers(5, 60), st.integers(1, 2))
def test_several_groups_are_near_the_scheduler_that_serves(groups: int, each: int, prompt: int, output: int, tokens: int) -> None:
    """Which of several equally loaded groups a request joins depends on pages, which only the scheduler counts."""
    most = groups * each
    work = Workload.uniform(prompt, output, most, 3 * most)
    prefill, decode = (Bucket("prefill", 1, 32),), tuple(Bucket("decode", batch, tokens) for batch in (1, each // 2, each))
    policy = Policy(Limits(PAGE, 1 + each * 8, 1 + each * tokens, 128, tokens, tokens - 1), (*prefill, *decode))
    sent, first, end = served(work, policy, groups, tokens, step_s(lambda batch: 0.01 + 0.002 * batch, lambda bucket: 0.03))
    table = StepTable([b.batch for b in decode], 1, 128, lambda batch, context: 0.01 + 0.002 * batch + 0 * context)
    trace = simulate(
        work, Serving("npucompile", each, 32, 32, 1), [float(tokens)] * work.requests, groups, 1e9, table,
        lambda largest, _, new, cached: 0.03, sizes=prefill,
    )  # fmt: skip
    for ours, theirs in ((trace.first, first), (trace.end, end)):
        mean = np.mean(np.subtract(theirs, sent))
        assert np.mean(np.subtract(ours, trace.sent)) == pytest.approx(mean, rel=0.1)
    assert trace.makespan_s == pytest.approx(max(end) - min(sent), rel=0.1)
