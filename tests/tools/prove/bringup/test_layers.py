"""tools/prove/bringup/layers.py: a layer alone runs with its state, and one that is wrong names the step from which on it is."""

from __future__ import annotations

import pytest
from support import tiny
from support.faulty import FaultyDevice, lost_writes, right

from npucompile.graphs.types import Mesh
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.layers import assumption_of, layer_cases
from npucompile.tools.prove.bringup.recording import StepRecorder, distinct_bodies, shipped_buckets
from npucompile.tools.prove.bringup.steps import StepPlanner
from npucompile.tools.ranks.random_weights import random_params


@pytest.fixture
def run(npu_artifact, tmp_path):
    def layers(on_run, steps=3):
        graph = shipped_buckets(npu_artifact)[0]
        planner = StepPlanner(npu_artifact.manifest.limits, 260)
        recorder = StepRecorder(graph, Mesh(), lambda rank: random_params(npu_artifact, rank), planner.initial_state(graph.signature.state))
        with tiny.QUIET.bar("layers", steps) as bar:
            cases, communicating = layer_cases(graph, recorder, planner.of_one_bucket(graph.bucket, steps), bar)
        host = Host(FaultyDevice(on_run), tmp_path)
        judged = [case.judge(host) for case in cases]
        failures, timings = ([each for judgement in judged for each in judgement[part]] for part in (0, 1))
        return graph, (failures, timings, communicating)

    return layers


def test_one_layer_of_each_kind_is_right_on_a_device_without_a_fault(run):
    graph, (failures, timings, communicating) = run(right)
    assert (failures, communicating) == ([], [])
    assert [timing.what.split()[1] for timing in timings] == list(distinct_bodies(graph))
    assert {"layer00_linear_attention", "layer03_full_attention"} <= set(distinct_bodies(graph))


def test_a_lost_write_is_seen_in_the_state_of_the_layers_that_have_one(run):
    _, (failures, _, _) = run(lost_writes(lambda executable: "RecurrentGatedDeltaRule" in executable.types))
    assert ["linear_attention" in failure.what for failure in failures] == [True]
    assert "state state.layers.0." in failures[0].message
    assert "from step 0 on" in failures[0].message


def test_a_fault_in_a_later_step_is_dated(run):
    calls = []

    def later(executable, operands):
        results = right(executable, operands)
        if "RecurrentGatedDeltaRule" in executable.types:
            calls.append(executable)
            if len(calls) > 2:
                results[0].zero_()
        return results

    _, (failures, _, _) = run(later)
    assert "from step 2 on" in failures[0].message


def test_a_wrong_layer_whose_operators_are_right_alone_is_about_what_joins_them():
    assert assumption_of(frozenset({"RecurrentGatedDeltaRule"}), ["state pool"]) == "write-after-read"
    assert assumption_of(frozenset({"RecurrentGatedDeltaRule"}), ["out", "state pool"]) == "delta-rule"
    assert assumption_of(frozenset({"FusedInferAttentionScore"}), ["out"]) == "lengths"
    assert assumption_of(frozenset({"BatchMatMul"}), ["out"]) == "delta-rule-prefill"
