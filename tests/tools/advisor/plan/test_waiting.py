"""tools/advisor/plan/waiting.py: the order of admission of the scheduler that serves, from the first few of each priority."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.turns import Turns, admitted, in_turn
from npucompile.tools.advisor.plan.system import Workload
from npucompile.tools.advisor.plan.waiting import ByPriority, InOrder, waiting

COMES, ADMITS, LOSES = range(3)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([-1, 0, 3])), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(COMES, LOSES), st.integers(1, 4)), max_size=60),
)
def test_the_next_are_those_of_all_that_wait(requests, events) -> None:
    """Beside the functions of the scheduler, which are shown everybody."""
    work = Workload(tuple(size for size, _ in requests), (1,) * len(requests), 9, priorities=tuple(level for _, level in requests))
    queue, come = ByPriority(work), itertools.count()
    turns, waits, runs = Turns(), list[RequestState](), list[RequestState]()
    for event, number in events:
        if event == COMES and (index := next(come)) < len(requests):
            size, level = requests[index]
            queue.append(index)
            waits.append(RequestState(Request("", (1,) * size, 1, priority=level), index, 0.0))
        elif event == ADMITS and waits:
            states = list(itertools.islice(in_turn(turns, waits, Policy.ageing), number))
            assert list(queue.first(number)) == [state.arrival for state in states]
            queue.admit([state.arrival for state in states])
            turns = admitted(turns, waits, states)
            runs += states
            waits = [state for state in waits if all(state.arrival != other.arrival for other in states)]
        elif event == LOSES and runs:
            state = runs.pop()
            queue.appendleft(state.arrival)
            waits = sorted([*waits, state._replace(started_ms=1.0)], key=lambda each: each.arrival)
        assert len(queue) == len(waits)
        running = [state.arrival for state in runs]
        assert queue.urgent_first(running) == [s.arrival for s in sorted(runs, key=lambda state: (state.level, state.arrival))]
        assert [queue.level(index) for index in running] == [state.level for state in runs]


def test_one_priority_is_order_of_arrival():
    work = Workload.uniform(5, 5, 4, 4)
    queue = waiting(work)
    assert isinstance(queue, InOrder)
    for index in range(3):
        queue.append(index)
    assert list(queue.first(2)) == [0, 1]
    queue.admit([0, 1])
    queue.appendleft(1)
    assert list(queue.first(-1)) == []
    assert list(queue.first(9)) == [1, 2]
    assert isinstance(waiting(Workload((5, 5), (5, 5), 2, priorities=(3, 3))), InOrder)
    assert isinstance(waiting(Workload((5, 5), (5, 5), 2, priorities=(3, 4))), ByPriority)


def test_whose_level_was_asked_for_first_came_first():
    """Those that lose their caches in a group that only decodes never came to its queue: they began in the order in which it asks."""
    work = Workload((5, 5, 5), (5, 5, 5), 3, priorities=(0, 0, 1))
    queue = ByPriority(work)
    assert [queue.level(index) for index in (1, 2, 0)] == [0, 1, 0]
    for index in (0, 2, 1):
        queue.appendleft(index)
    assert list(queue.first(3)) == [1, 0, 2]
