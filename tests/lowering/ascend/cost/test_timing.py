"""lowering/ascend/cost/timing.py: the slowest unit decides, messages grow with bytes, ranks and nodes, published figures come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.lowering.ascend.cost.timing import Topology, duration
from npucompile.lowering.ascend.operators.work import Work

A3, A2 = parameters("ascend910_93"), parameters("ascend910b")


def seconds(work: Work, mesh: str = "tp=2", speeds=A3) -> float:
    return duration(work, speeds, Topology.of(Mesh.parse(mesh), speeds.npus_per_node)).busy_s


def test_the_slowest_unit_decides():
    work = Work(hbm_bytes=1e9, bf16_ops=1e12, vector_ops=1e9)
    cases = {"matrix": work, "memory": replace(work, hbm_bytes=1e10), "vector": replace(work, vector_ops=1e11)}
    for cause, changed in cases.items():
        assert duration(changed, A3, Topology.of(Mesh(), 16)).cause == cause
    assert seconds(Work(hbm_bytes=1.6e12 * 0.84)) == pytest.approx(1)


def test_attention_of_few_requests_is_bound_by_its_cores():
    """One request and head: one of 24 cores works."""
    few, many = (seconds(Work(streamed_bytes=1e9, tasks=tasks)) for tasks in (1, 48))
    assert few == pytest.approx(1e9 / A3.core_bytes_per_s)
    assert many < few / 8


@pytest.mark.parametrize(("ranks", "dispatch_us", "combine_us"), [(8, 132, 126), (16, 139, 135), (32, 153, 151)])
def test_expert_exchange_takes_what_was_published(ranks, dispatch_us, combine_us):
    """128 tokens, 8 experts, 7168 wide (sgl-kernel-npu README, DeepEP-Ascend), within 12 %."""
    rows = 128 * 8 * 7168
    dispatch = seconds(Work(sent_bytes=rows, group="dispatch", exchange="dispatch"), f"dp={ranks}")
    combine = seconds(Work(sent_bytes=2 * rows, group="dispatch", exchange="combine"), f"dp={ranks}")
    assert dispatch * 1e6 == pytest.approx(dispatch_us, rel=0.12)
    assert combine * 1e6 == pytest.approx(combine_us, rel=0.12)


def test_collectives_take_longer_over_more_ranks_and_across_nodes():
    work = Work(sent_bytes=1e7, group="world")
    assert seconds(work, "tp=2") < seconds(work, "tp=4") < seconds(work, "tp=16")
    assert seconds(work, "dp=2,tp=8", A2) > 3 * seconds(work, "tp=8", A2)
    assert Topology.of(Mesh.parse("dp=2,tp=8"), 8).across == {"dp", "world", "dispatch", "fused_experts"}
    assert seconds(replace(work, steps=2)) > seconds(work)
