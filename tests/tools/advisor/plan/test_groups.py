"""tools/advisor/plan/groups.py: ends and cached tokens as a loop over requests has them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.tools.advisor.plan.groups import Groups
from npucompile.tools.advisor.plan.run import Trace
from npucompile.tools.advisor.plan.system import Workload
from npucompile.tools.advisor.plan.waiting import waiting


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40), st.floats(1, 4), st.integers(0, 2)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60),
)
@settings(max_examples=80, deadline=None)
def test_it_is_a_loop_over_requests(requests, steps) -> None:
    work = Workload(tuple(r[0] for r in requests), tuple(r[1] for r in requests), 8)
    trace = Trace([0.0] * len(requests), [0.1] * len(requests), [0.0] * len(requests))
    groups = Groups(work, [r[2] for r in requests], 3, 1e9, trace)
    made = {}
    for index, (_, _, _, group) in enumerate(requests):
        groups.start(group, index, [0.0] * len(requests))
        made[index] = 1.0
    for missing, misses in steps:
        without = [missing] if misses else []
        groups.step(1, without)
        for index, tokens in list(made.items()):
            _, _, rate, group = requests[index]
            made[index] = tokens + (0 if group in without else rate)
        ended = {i for i, tokens in made.items() if tokens >= requests[i][1] - 1e-6}
        assert set(groups.finish(1.0)) == ended
        for index in ended:
            del made[index]
        for group in range(3):
            own = [requests[i][0] + tokens for i, tokens in made.items() if requests[i][3] == group]
            assert groups.count[group] == len(own)
            assert abs(groups.used(group) - sum(own)) < 1e-6
        if made:
            assert abs(groups.context() - sum(requests[i][0] + t for i, t in made.items()) / len(made)) < 1e-6


@pytest.mark.parametrize(("priorities", "loses"), [((), 1), ((4, 0), 0)], ids=["least done", "least urgent"])
def test_crowded_groups_take_back_the_least(priorities: tuple[int, ...], loses: int) -> None:
    work = Workload((10, 10), (50, 50), 2, priorities=priorities)
    groups = Groups(work, [1.0, 1.0], 1, 40, Trace([0.0] * 2, [0.1] * 2, [0.0] * 2))
    remaining, queues = [0.0, 0.0], [waiting(work)]
    groups.start(0, 0, remaining)
    groups.step(3, ())
    groups.start(0, 1, remaining)
    steps = groups.until_full()
    assert not groups.retract(queues, remaining)
    groups.step(steps, ())
    assert groups.retract(queues, remaining)
    assert list(queues[0].first(2)) == [loses]
    assert remaining[loses] == 10 + 1 + steps + (3 if loses == 0 else 0)
