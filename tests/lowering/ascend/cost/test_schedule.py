"""lowering/ascend/cost/schedule.py: streams run beside each other, kernels after each other, and each second has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.lowering.ascend.cost.schedule import Task, schedule, total
from npucompile.lowering.ascend.cost.timing import Duration


def kernel(*after: int, seconds: float = 3.0, stream: str = "") -> Task:
    return Task(Duration(1.0, seconds - 1, "memory"), after, stream)


def message(*after: int, seconds: float = 5.0, stream: str = "") -> Task:
    return Task(Duration(0.0, seconds, "collectives", on_cores=False), after, stream)


@pytest.mark.parametrize(
    ("tasks", "step", "collectives"),
    [
        ([kernel(), message(0), kernel()], 11, 5),  # one stream: in order, whether or not one reads the other
        ([kernel(), message(0), kernel(0, stream="shared")], 8, 2),  # three of five seconds lie behind the kernel
        ([kernel(), message(0), kernel(0, stream="shared", seconds=9)], 12, 0),
        ([kernel(stream="a"), kernel(stream="b")], 6, 0),  # kernels share the cores
        ([message(stream="a"), message(stream="b")], 5, 5),  # messages do not
        ([message(), kernel(stream="b", seconds=2), kernel(0, 1)], 8, 3),
        ([message(), kernel(0), kernel(stream="shared")], 8, 2),  # listed last, it runs beside the message all the same
        ([], 0, 0),
    ],
)
def test_a_stream_waits_for_itself_its_data_and_the_cores(tasks, step, collectives):
    timeline = schedule(tasks)
    assert timeline.step_s == step
    assert total(timeline.exposed)["collectives"] == collectives
    assert sum(total(timeline.exposed).values()) + timeline.waiting_s == step


@pytest.mark.parametrize(
    ("tasks", "step"),
    [
        ([kernel(), kernel()], 6),  # nothing travels
        ([message(stream="b"), kernel()], 5),  # 3 seconds of work take 4.5
        ([message(stream="b", seconds=3), kernel(seconds=6)], 7),  # 3 beside the message are 2 of its work, 4 are left
        ([kernel(seconds=2), kernel(seconds=6), message(0, stream="b", seconds=3)], 9),  # one that runs already is slower from then on
        ([kernel(seconds=6), message(stream="b", seconds=2), message(stream="b", seconds=1)], 7),  # message behind message
        ([message(), kernel(0), kernel()], 11),  # in one stream nothing runs beside another
    ],
)
def test_kernels_take_longer_while_a_message_travels(tasks, step):
    assert schedule(tasks, 1.5).step_s == pytest.approx(step)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 9), st.integers(0, 3)), max_size=24))
def test_seconds_add_up_and_streams_never_cost_time(drawn):
    """Each second belongs to one task; the same tasks in one stream take the sum of their times, and in several at most that."""
    tasks = [
        (message if sends else kernel)(*([i - back] if 0 < back <= i else []), seconds=seconds, stream=stream)
        for i, (stream, sends, seconds, back) in enumerate(drawn)
    ]
    timeline = schedule(tasks)
    assert sum(total(timeline.exposed).values()) + timeline.waiting_s == pytest.approx(timeline.step_s)
    alone = schedule([Task(task.duration, task.after) for task in tasks])
    assert timeline.step_s <= alone.step_s == sum(task.duration.total_s for task in tasks)
    assert timeline.waiting_s == 0, "in a graph without outer events something always runs"
