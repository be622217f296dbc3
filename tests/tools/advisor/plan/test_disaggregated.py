"""tools/advisor/plan/disaggregated.py: prefill instances feed an instance that only decodes."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.plan.disaggregated import HANDOVER_S, simulate_disaggregated
from npucompile.tools.advisor.plan.simulate import SimulatedSetting
from npucompile.tools.advisor.plan.system import PlannedServing, Workload
from npucompile.tools.advisor.plan.table import StepTable


def run(work: Workload, instances: int = 1, most: int = 64, pool: float = 1e9, batch: int = 1):
    table = StepTable(range(1, 65), 1, 1000, lambda rows, context: 0.01 + 0 * rows * context)
    prefill_s = lambda largest, prompts, new, cached: 0.001 * largest * new  # noqa: E731
    setting = SimulatedSetting(work, PlannedServing("sglang", most), [1.0] * work.requests, 1, pool, table, prefill_s)
    return simulate_disaggregated(setting, PlannedServing("sglang", batch, budget=1000), 1, instances, 0.0)


def test_a_request_alone_is_prefilled_handed_over_and_decoded():
    trace = run(Workload.uniform(100, 11, 1, 1))
    assert trace.first == pytest.approx([0.1 + HANDOVER_S])
    assert trace.end == pytest.approx([0.1 + HANDOVER_S + 0.1])


def test_decoding_is_not_held_up_by_prompts():
    trace = run(Workload.uniform(100, 200, 4, 8))
    for first, end in zip(trace.first, trace.end, strict=True):
        assert end - first == pytest.approx(1.99)


def test_two_instances_prefill_twice_as_fast():
    one, two = (run(Workload.uniform(400, 2, 16, 32), instances) for instances in (1, 2))
    assert one.makespan_s / two.makespan_s == pytest.approx(2, rel=0.15)
    assert one.prefill_busy_s == pytest.approx(two.prefill_busy_s)


def test_places_of_the_decode_instance_are_waited_for():
    assert run(Workload.uniform(10, 101, 4, 4), most=1).makespan_s > 4.0


def test_full_caches_take_requests_back_and_lose_none():
    trace = run(Workload.uniform(50, 100, 4, 4), pool=330, batch=4)
    assert all(trace.end)
    assert trace.retracted


def test_urgent_requests_go_first_at_both_instances():
    work = Workload((100,) * 6, (30,) * 6, 6, priorities=(5, 5, 5, 0, 5, 0))
    trace = run(work, most=1)
    # All come at once.
    assert sorted(range(6), key=lambda i: trace.first[i]) == [3, 5, 0, 1, 2, 4]
    crowded = run(Workload((50,) * 4, (100,) * 4, 4, priorities=(5, 0, 5, 0)), pool=330, batch=4)
    assert all(crowded.end)
    assert crowded.retracted
    assert max(crowded.end[1], crowded.end[3]) < min(crowded.end[0], crowded.end[2])
