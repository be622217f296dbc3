"""tools/prove/bringup/operators.py: an operator that computes something else, or is refused, is named; every kind of operand is run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import bringups
from support.faulty import FaultyDevice, lost_writes, right, wrong_results

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.ge_program import BORDER
from npucompile.lowering.ascend.emulator.memory import NZ
from npucompile.lowering.ascend.subgraph import WholeGraph
from npucompile.lowering.device_error import DeviceError
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.operators import chosen, distinct_operators
from npucompile.tools.prove.bringup.recording import StepRecorder, is_int4, shipped_buckets
from npucompile.tools.prove.bringup.steps import StepPlanner
from npucompile.tools.ranks.random_weights import random_params


@pytest.fixture(scope="module")
def cases(npu_artifact):
    return recorded(npu_artifact, shipped_buckets(npu_artifact)[0], 2)


def recorded(artifact, graph, steps):
    """The distinct operators of a graph after a number of steps."""
    planner = StepPlanner(artifact.manifest.limits, 260)
    recorder = StepRecorder(graph, Mesh(), lambda rank: random_params(artifact, rank), planner.initial_state(graph.signature.state))
    for step in planner.of_one_bucket(graph.bucket, steps):
        values = recorder.run(step)
    return list(distinct_operators(graph.bucket, graph.whole, values).values())


def test_a_case_is_one_operator_with_what_cannot_be_an_operand(tmp_path, monkeypatch):
    artifact = bringups.npu_artifact(tmp_path, monkeypatch, "1", {"buckets": (1,), "num_speculative_tokens": 3})
    graph = next(graph for graph in shipped_buckets(artifact) if graph.bucket.kind == "decode")
    for case in recorded(artifact, graph, 1):
        inner = [op for op in WholeGraph(case.subgraph.ge_file).ops.values() if op.type not in BORDER]
        assert [op.type for op in inner if not is_int4(op)] == [case.op.type]


def of_type(cases, kind):
    return [case for case in cases if case.op.type == kind]


def run(device, cases, tmp_path: Path):
    host = Host(device, tmp_path)
    judged = [case.judge(host) for case in cases]
    return tuple([each for judgement in judged for each in judgement[part]] for part in (0, 1))


FAULTS = {
    "RmsNorm": (wrong_results(lambda _: True), "kernels", "recorded operands"),
    "FusedInferAttentionScore": (wrong_results(lambda _: True), "lengths", "values differ"),
    "ScatterPaKvCache": (lost_writes(lambda _: True), "kv-writes", "operand "),
    "RecurrentGatedDeltaRule": (lost_writes(lambda _: True), "delta-rule", "operand "),
    "GroupedMatmul": (wrong_results(lambda _: True), "grouped-products", "values differ"),
    "MoeGatingTopKSoftmaxV2": (wrong_results(lambda _: True), "gating", "random operands"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_operator_is_named_with_the_assumption_that_it_refutes(cases, tmp_path, kind):
    fault, assumption, message = FAULTS[kind]
    failures, timings = run(FaultyDevice(fault), of_type(cases, kind)[:1], tmp_path)
    assert [failure.assumption for failure in failures] == [assumption]
    assert kind in failures[0].what
    assert message in failures[0].message
    assert len(timings) == 1


def test_a_product_that_is_wrong_with_its_weight_in_nz_alone_is_about_nz(cases, tmp_path):
    def in_nz(executable, operands):
        results = right(executable, operands)
        if any(operand.allocation.format == NZ for operand in operands):
            results[0].zero_()
        return results

    (failure,), _ = run(FaultyDevice(in_nz), of_type(cases, "GroupedMatmul")[:1], tmp_path)
    assert failure.assumption == "nz-weights"


def test_only_extreme_operands_show_some_faults(cases, tmp_path):
    def saturates(executable, operands):
        results = right(executable, operands)
        if float(operands[0].held.float().abs().max()) == 64.0:
            results[0].zero_()
        return results

    (failure,), _ = run(FaultyDevice(saturates), of_type(cases, "SwiGlu")[:1], tmp_path)
    assert failure.message.startswith("large operands")


def test_a_refused_operator_is_reported_and_the_others_run(cases, tmp_path):
    def refuse(executable):
        if executable.types == ["MatMul"]:
            raise LoweringError("no kernel for this shape")

    some = [*of_type(cases, "MatMul")[:1], *of_type(cases, "RmsNorm")[:1]]
    failures, timings = run(FaultyDevice(right, refuse), some, tmp_path)
    assert [(failure.assumption, "no kernel" in failure.message) for failure in failures] == [("compiles", True)]
    assert ["RmsNorm" in timing.what for timing in timings] == [True]


def test_a_device_that_fails_in_a_step_is_spent_and_one_that_refuses_is_not(cases, tmp_path):
    def fails(executable, operands):
        raise DeviceError("a step", "error code is 507015")

    def refuses(executable):
        raise LoweringError("no kernel for this shape")

    case = of_type(cases, "MatMul")[0]
    judgement = case.judge(Host(FaultyDevice(fails), tmp_path))
    assert (judgement.spent, [failure.code for failure in judgement.failures]) == (True, ["507015"])
    assert not case.judge(Host(FaultyDevice(right, refuses), tmp_path)).spent


def test_of_too_many_the_smallest_and_the_largest_of_each_kind_are_kept_in_order_of_risk(cases):
    selected, left_out = chosen(cases, most=1)
    assert len(selected) + len(left_out) == len(cases)
    assert selected[0].op.type == "FusedInferAttentionScore"
    for case in left_out:
        family = [other.elements for other in selected if other.family == case.family]
        assert len(family) == 2
        assert min(family) <= case.elements <= max(family)
    assert chosen(cases)[1] == []
