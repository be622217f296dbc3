"""lowering/ascend/overlap.py: a body that dispatches in parts runs first what its longest path waits for, and nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emulated import DeviceGraph

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.ge_file import STREAM, GeFile, parse
from npucompile.lowering.ascend.overlap import in_order_of_time, start_times
from npucompile.lowering.ascend.streams import EXCHANGE
from npucompile.lowering.platform import Platform

A3 = Platform("ascend910_93", "9.1")
NOTHING, LINKS, CORES = range(3)


@pytest.mark.parametrize(
    ("reads", "lasts", "runs_on", "starts"),
    [
        ([[], [], [1]], [3, 1, 5], [CORES, CORES, LINKS], [1, 0, 1]),  # the message's source goes first, whatever the order of the list
        ([[], [0], [], [2, 1]], [2, 4, 9, 1], [CORES, LINKS, CORES, CORES], [9, 11, 0, 15]),  # nothing waits while cores are free
        ([[], [0], [1], [], [3]], [1, 0, 5, 1, 1], [CORES, NOTHING, LINKS, CORES, CORES], [0, 1, 1, 1, 2]),  # a view takes no time
        ([[], [], []], [2, 2, 2], [LINKS, LINKS, LINKS], [0, 2, 4]),  # of equals the first of the list
        ([], [], [], []),
    ],
)
def test_the_longest_path_goes_first(reads: Any, lasts: Any, runs_on: Any, starts: Any) -> None:
    assert start_times(reads, lasts, runs_on) == starts


TASKS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from((CORES, LINKS, NOTHING)), st.sets(st.integers(1, 4), max_size=3)), max_size=16
)


@given(TASKS)
def test_tasks_wait_for_what_they_read_and_for_each_other(drawn: Any) -> None:
    reads = [{i - back for back in backs if back <= i} for i, (_, _, backs) in enumerate(drawn)]
    lasts = [float(seconds) if kind != NOTHING else 0.0 for seconds, kind, _ in drawn]
    starts = start_times(reads, lasts, [kind for _, kind, _ in drawn])
    for i, sources in enumerate(reads):
        assert all(starts[source] + lasts[source] <= starts[i] for source in sources)
    for kind in (CORES, LINKS):
        busy = sorted((starts[i], lasts[i]) for i, (_, own, _) in enumerate(drawn) if own == kind)
        assert all(start + last <= later for (start, last), (later, _) in itertools.pairwise(busy))
    assert max((start + last for start, last in zip(starts, lasts, strict=True)), default=0) <= sum(lasts), "something always runs"


def in_parts(parts: int = 2) -> GeFile:
    """x -> shared expert, which nothing waits for but combines, listed first; then router -> dispatches -> products -> combines."""
    hand = DeviceGraph()
    x, weight = hand.operand(0, "bf16[64,256]", "x"), hand.operand(1, "bf16[256,256]", "weight")
    ids = hand.operand(2, "i32[64,4]", "ids")

    def op(kind: str, inputs: dict[str, str], name: str, meta: Sequence[str] = ("bf16[64,256]",), **more: Any) -> str:
        return hand.op(kind, inputs, f"layer00_moe/{name}", meta, **more)

    shared = op("MatMul", {"x1": x, "x2": weight}, "shared", transpose_x1=False, transpose_x2=False)
    normed = op("RmsNorm", {"x": x, "gamma": weight}, "norm", ("bf16[64,256]", "f32[64,1]"), epsilon=1e-6)
    exchange = {"group_ep": "dispatch", "ep_world_size": 4, "ep_rank_id": 0, "moe_expert_num": 8}
    sent = ["bf16[1024,256]", "f32[1024]", "i32[131072]", "i64[2]", "i32[8]", "i32[1]", "f32[1]"]
    rows, last = list[str](), list[str]()
    order = [step for i in range(parts + 1) for step in (("dispatch", i), ("combine", i - 1)) if 0 <= step[1] < parts]
    for kind, i in order:
        if kind == "dispatch":
            rows.append(op("MoeDistributeDispatchV2", {"x": normed, "expert_ids": ids}, f"dispatch{i}", sent, **exchange))
        else:
            made = op("MatMul", {"x1": rows[i], "x2": weight}, f"experts{i}", ["bf16[1024,256]"], transpose_x1=False, transpose_x2=False)
            inputs = {"expand_x": made, "expert_ids": ids, "shared_expert_x": shared}
            op("MoeDistributeCombineV2", inputs, f"combine{i}", **exchange)
        # Control inputs stand behind the others.
        hand.model.graph[0].op[-1].input.extend(last)
        last = [f"layer00_moe/{kind}{i}:-1"]
        hand.model.graph[0].op[-1].attr[STREAM].s = EXCHANGE.encode()
    return hand.file("layer00_moe/combine0:0", inputs=3)


def names(file: GeFile) -> list[str]:
    return [op.name.rpartition("/")[2] for op in parse(file.graph).graph[0].op]


def test_what_a_dispatch_waits_for_comes_before_the_shared_expert() -> None:
    file = in_parts()
    ordered = in_order_of_time(file, Mesh.parse("dp=4"), A3)
    assert names(file)[3:] == ["shared", "norm", "dispatch0", "dispatch1", "experts0", "combine0", "experts1", "combine1", "NetOutput"]
    assert names(ordered)[3:] == ["norm", "dispatch0", "shared", "dispatch1", "experts0", "combine0", "experts1", "combine1", "NetOutput"]
    before, after = (
        {op.name: op.SerializeToString(deterministic=True) for op in parse(each.graph).graph[0].op} for each in (file, ordered)
    )
    assert before == after, "operators change their places alone"


def test_graphs_that_dispatch_once_or_run_in_one_stream_are_left_as_they_are() -> None:
    assert in_order_of_time(in_parts(1), Mesh.parse("dp=4"), A3) == in_parts(1)
    for platform in (Platform(), Platform("ascend910_93", "9.1", serial=True)):
        assert in_order_of_time(in_parts(), Mesh.parse("dp=4"), platform) == in_parts()
